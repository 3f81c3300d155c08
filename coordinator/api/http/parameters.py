"""From OpenAI's names, and vLLM's beside them, to a GenerateRequest: what completions and chat have in common.

Bounds are the gRPC door's: the request goes through the same checks, and what these find is told in this door's names
(`renamed`). Three lists say what happens to fields that do not become part of the request (docs/openai.md has them).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.coordinator.api.http.fields import Fields
from outrider.coordinator.api.http.structured_fields import read_structured_outputs
from outrider.coordinator.api.http.tool_calls import Tools
from outrider.drafting.growth_source import WORDS, source_of_word, to_proto
from outrider.errors import FieldViolation, InvalidRequest
from outrider.sampling import MODE_NUMBERS, RULE_NUMBERS, SpeculationMode, VerificationRule
from outrider.v1 import generation_pb2

# What clients send for the sake of somebody else, or to know later what they sent.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "verbosity", "priority", "spaces_between_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
# What would change the output, or what comes back, and is not served: the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (-1,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "cache_salt": (),
    "kv_transfer_params": (),
    "lora_name": (),
}
NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "echo": (False,),
}
METRICS_LEVELS = ("none", "summary", "detailed")
MAX_PROMPTS = 128
# OpenAI's, which clients rely on.
_MOST_TEMPERATURE = 2
_SEED_SPAN = 1 << 64

# Ours to theirs.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request by HTTP.

    Attributes:
        include_usage: a last chunk says what was used.
        continuous_usage: every chunk does.
        logprobs: how many alternatives of each token; None without log probabilities.
        metrics: how much is told of speculation: none, summary or detailed.
        echo: in front of each prompt's output; empty for nothing.
        scores_prompts: the log probabilities of prompts are sent with theirs.
        generates: there is to be an output; without one, prompts alone are sent back.
        names: of each of `requests`, how fields are called here that the common checks may find wrong (`renamed`).
        is_new: it was made here.
        traceparent: of the client's span, where both ends trace.
    """

    requests: Sequence[generation_pb2.GenerateRequest]
    choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    return_token_ids: bool
    metrics: str
    echo: Sequence[str]
    names: Sequence[Mapping[str, str]]
    request_id: str
    is_new: bool
    scores_prompts: bool = False
    generates: bool = True
    tools: Tools | None = None
    traceparent: str = ""


def read_sampling(fields: Fields) -> tuple[generation_pb2.SamplingParams, Mapping[str, str]]:
    """Read the sampling parameters, except log probabilities and output length.

    Returns:
        The parameters, and how structured outputs are called here.
    """
    params = generation_pb2.SamplingParams()
    # OpenAI's default is to sample.
    temperature = fields.number("temperature")
    params.temperature = 1.0 if temperature is None else temperature
    if params.temperature > _MOST_TEMPERATURE:
        fields.wrong("temperature", f"{temperature:g} given, 0 to {_MOST_TEMPERATURE} needed")
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (value := fields.number(name)) is not None:
            setattr(params, name, value)
    if (top_k := fields.whole("top_k", low=-1, high=(1 << 31) - 1)) is not None:
        params.top_k = top_k
    if (seed := fields.whole("seed", low=-(1 << 63), high=_SEED_SPAN - 1)) is not None:
        params.seed = seed % _SEED_SPAN
    if (least := fields.whole("min_tokens", low=0, high=(1 << 32) - 1)) is not None:
        params.min_new_tokens = least
    if (choices := fields.whole("n", low=1, high=(1 << 32) - 1)) is not None:
        params.n = choices
    params.stop.extend(fields.texts("stop"))
    params.stop_token_ids.extend(fields.token_ids("stop_token_ids"))
    params.allowed_token_ids.extend(fields.token_ids("allowed_token_ids"))
    params.ignore_eos = fields.flag("ignore_eos")
    _read_logit_bias(fields, params)
    return params, read_structured_outputs(fields, params)


def read_length(fields: Fields, params: generation_pb2.SamplingParams, *names: str, low: int = 1) -> str:
    """Set the most tokens of output, at least `low`, by the first of these names that is given; return that name."""
    given = [name for name in names if name in fields]
    for name in names:
        value = fields.whole(name, low=low, high=(1 << 32) - 1)
        if value is not None and name == given[0]:
            params.max_new_tokens = value
    return given[0] if given else names[0]


def _read_logit_bias(fields: Fields, params: generation_pb2.SamplingParams) -> None:
    given = fields.take("logit_bias")
    if given is None:
        return
    if not isinstance(given, dict):
        fields.wrong("logit_bias", "an object of token id to bias needed")
        return
    for token_id, bias in given.items():
        is_bias = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= 1e30
        if not re.fullmatch(r"[0-9]{1,9}", token_id) or not is_bias:
            fields.wrong("logit_bias", "token ids as strings, each with a number from -100 to 100, needed")
            return
        params.logit_bias[int(token_id)] = bias


def read_speculation(fields: Fields) -> generation_pb2.SpeculationParams:
    """Read `speculation`: a mode by name, or an object of SpeculationParams in lower case."""
    params = generation_pb2.SpeculationParams()
    if isinstance(fields.take("speculation"), str):
        if (mode := fields.one_of("speculation", tuple(SpeculationMode))) is not None:
            params.mode = MODE_NUMBERS[SpeculationMode(mode)]
        return params
    given = fields.within("speculation")
    if given is None:
        return params
    if (mode := given.one_of("mode", tuple(SpeculationMode))) is not None:
        params.mode = MODE_NUMBERS[SpeculationMode(mode)]
    if (rule := given.one_of("verification", tuple(VerificationRule))) is not None:
        params.verification = RULE_NUMBERS[VerificationRule(rule)]
    for name in ("max_nodes", "max_depth"):
        if (count := given.whole(name, low=0, high=(1 << 32) - 1)) is not None:
            setattr(params, name, count)
    for name in ("threshold_single", "threshold_acc"):
        if (threshold := given.number(name)) is not None:
            setattr(params, name, threshold)
    _read_sources(given, params)
    rates = given.take("synthetic_rates")
    if rates is not None:
        if isinstance(rates, list) and all(type(rate) in (int, float) and abs(rate) <= 1e30 for rate in rates):
            params.synthetic_rates.extend(rates)
        else:
            given.wrong("synthetic_rates", "a list of numbers from 0 to 1 needed")
    given.refuse_others(kind="a field of speculation")
    return params


def _read_sources(given: Fields, params: generation_pb2.SpeculationParams) -> None:
    words = given.take("sources")
    if words is None:
        return
    if not isinstance(words, list) or any(word not in WORDS for word in words):
        given.wrong("sources", f"a list of {', '.join(WORDS)} needed")
        return
    params.sources.extend(to_proto(source_of_word(word)) for word in words)


def read_streaming(fields: Fields) -> dict[str, bool]:
    """Read stream, include_usage and continuous_usage of an `Asked`."""
    stream, options = fields.flag("stream"), fields.within("stream_options")
    if options is None:
        return {"stream": stream, "include_usage": False, "continuous_usage": False}
    if not stream:
        fields.wrong("stream_options", "only with stream: true")
    read = {
        "stream": stream,
        "include_usage": options.flag("include_usage"),
        "continuous_usage": options.flag("continuous_usage_stats"),
    }
    # Padding against guessing from the size of packets; there is none here.
    options.take("include_obfuscation")
    options.refuse_others(kind="a field of stream_options")
    return read


def read_metrics(fields: Fields) -> str:
    """Read the level of speculation metrics in the response."""
    return fields.one_of("per_request_spec_decode_metrics", METRICS_LEVELS) or "none"


def refuse_what_is_not_served(fields: Fields, neutral: Mapping[str, tuple[Any, ...]], *, choices: int) -> None:
    """Names what would change the output and is not served; last of all, what nobody knows."""
    for name in IGNORED:
        fields.take(name, {"description": "Ignored: it changes nothing here."})
    for name, allowed in neutral.items():
        value = fields.take(name, {"enum": list(allowed), "description": "Nothing else is served."})
        if value is None or (name == "best_of" and value == choices):
            continue
        # True equals 1, which is not what was meant.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            default = f" (only {json.dumps(allowed[0])} is)" if allowed else ""
            fields.wrong(name, f"not served{default}: leave it out")
    fields.refuse_others()


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the common checks' violations under the HTTP API's field names.

    Args:
        names: of this request: field of GenerateRequest to what stands for it here.
    """
    return InvalidRequest([_renamed(violation, names) for violation in error.violations])


def _renamed(violation: FieldViolation, names: Mapping[str, str]) -> FieldViolation:
    field = violation.field.removeprefix("sampling_params.")
    head = re.match(r"[A-Za-z_]+(\.ids)?", field)
    known = names.get(head[0]) or _NAMES.get(head[0]) if head else None
    if field in names:
        field = names[field]
    elif head and known:
        field = known + field[head.end() :]
    description = violation.description
    for ours, usual in _NAMES.items():
        description = description.replace(ours, names.get(ours, usual))
    return FieldViolation(field, description, violation.code)
