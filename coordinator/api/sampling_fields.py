"""The sampling parameters of a request."""

import math
from dataclasses import replace
from typing import Any

from outrider.coordinator.api.field_checks import FieldChecks
from outrider.coordinator.api.speculation_fields import verification
from outrider.errors import GrammarUnsupported
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.library import GrammarError
from outrider.grammar.request import ConstraintError, grammar_of
from outrider.sampling import SCORED_ALONE, SamplingSpec
from outrider.v1 import generation_pb2

MAX_LOGPROBS = 20
# Below this, probabilities other than the best one's underflow in float32: the choice is the greedy one.
_GREEDY_BELOW = 1e-30
_STRUCTURED = "sampling_params.structured_outputs"


def sampling_spec(
    fields: FieldChecks,
    asked: generation_pb2.SpeculationParams,
    grammars: GrammarCompiler | None,
    *,
    max_new_tokens: int,
    seed: int,
    allow_synthetic: bool,
) -> SamplingSpec:
    """Return a request's sampling parameters with defaults, verification rule and grammar."""
    params = fields.params
    temperature = fields.number("temperature", 0.0, "a finite number, 0 (greedy) or more", lambda x: x >= 0)
    top_k = params.top_k if params.HasField("top_k") else 0
    if top_k < -1:
        fields.wrong("sampling_params.top_k", f"{top_k} given, 1 or more needed; 0 or -1 turns it off")
    stop_token_ids = fields.token_id_list("stop_token_ids")
    forced = params.forced_token_ids
    fields.check_token_ids("sampling_params.forced_token_ids", forced)
    eos = () if params.ignore_eos or forced else fields.model.eos_token_ids
    min_new_tokens = fields.whole("min_new_tokens", default=0, low=0)
    if min_new_tokens > max_new_tokens:
        fields.wrong(
            "sampling_params.min_new_tokens",
            f"{min_new_tokens} given, more than max_new_tokens ({max_new_tokens}): lower it or raise that",
        )
    spec = SamplingSpec(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(0, top_k),
        top_p=fields.number("top_p", 1.0, "more than 0 and at most 1 (1 is off)", lambda x: 0 < x <= 1),
        min_p=fields.number("min_p", 0.0, "0 (off) to 1", lambda x: 0 <= x <= 1),
        repetition_penalty=fields.number(
            "repetition_penalty", 1.0, "more than 0 and at most 2 (1 is off)", lambda x: 0 < x <= 2
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, "-2 to 2 (0 is off)", lambda x: -2 <= x <= 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, "-2 to 2 (0 is off)", lambda x: -2 <= x <= 2),
        logit_bias=_logit_bias(fields),
        allowed_token_ids=fields.token_id_list("allowed_token_ids"),
        seed=seed,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *eos))),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        logprobs=fields.whole("logprobs", default=None, low=0, high=MAX_LOGPROBS),
        forced_token_ids=tuple(forced),
    )
    if forced and (not spec.is_scored or params.stop or params.HasField("structured_outputs")):
        fields.wrong("sampling_params.forced_token_ids", SCORED_ALONE)
    if min_new_tokens and spec.allowed_token_ids and set(spec.allowed_token_ids) <= set(spec.stop_token_ids):
        fields.wrong(
            "sampling_params.allowed_token_ids",
            "only stop tokens, which min_new_tokens forbids at first: allow another token or drop min_new_tokens",
        )
    spec = replace(spec, **verification(fields, asked, allow_synthetic=allow_synthetic))
    return replace(spec, **_grammar(fields, spec, grammars))


def _logit_bias(fields: FieldChecks) -> dict[int, float]:
    field, wrong = "sampling_params.logit_bias", []
    if fields.is_too_long(field, fields.params.logit_bias, "entries"):
        return {}
    bias, highest = dict(fields.params.logit_bias), fields.model.vocab_size - 1
    for token_id, value in sorted(bias.items()):
        if token_id > highest:
            wrong.append((f"{field}[{token_id}]", f"outside the vocabulary: give token ids from 0 to {highest}"))
        if not (math.isfinite(value) and -100 <= value <= 100):
            wrong.append((f"{field}[{token_id}]", f"{value:g} given, a finite number from -100 to 100 needed"))
    fields.wrong_entries(field, wrong, "wrong entries")
    return bias


def _grammar(fields: FieldChecks, sampling: SamplingSpec, grammars: GrammarCompiler | None) -> dict[str, Any]:
    """The grammar of structured outputs, as fields of the spec; `grammars` is None where the model has no tokenizer.

    It is compiled here, for the coordinator's own tokenizer, before any worker hears of it: who asks for what cannot be
    compiled is told so at once. That may take a quarter of a second (`Generations` has a thread for it).
    """
    if not fields.params.HasField("structured_outputs"):
        return {}
    before, asked, ends = len(fields.violations), fields.params.structured_outputs, tuple(fields.model.eos_token_ids)
    # What cannot be had beside a grammar: it says when the output ends, and which tokens there are.
    for is_wrong, field, description in (
        (not ends, _STRUCTURED, "this model names no end-of-sequence token, so no output could end: leave it out"),
        (fields.params.ignore_eos, "sampling_params.ignore_eos",
         "not with structured_outputs: the output ends when it matches"),
        (sampling.min_new_tokens, "sampling_params.min_new_tokens",
         "not with structured_outputs, which say when to end"),
        (sampling.allowed_token_ids, "sampling_params.allowed_token_ids",
         "not with structured_outputs: give one of them"),
        (sampling.is_synthetic, "speculation.verification",
         "4 (synthetic) accepts what no grammar allows: choose another"),
        (grammars is None, _STRUCTURED, "this model has no tokenizer: leave structured_outputs out"),
    ):  # fmt: skip
        if is_wrong:
            fields.wrong(field, description)
    if grammars is None or len(fields.violations) > before:
        return {}
    try:
        grammar = grammar_of(asked)
        grammars.compile(grammar, ends)
    except ConstraintError as error:
        fields.wrong(f"{_STRUCTURED}.{error.field}".rstrip("."), str(error))
    except GrammarError as error:
        fields.wrong(f"{_STRUCTURED}.{asked.WhichOneof('constraint')}", f"cannot be compiled: {error}")
    except GrammarUnsupported as error:
        fields.wrong(_STRUCTURED, str(error))
    else:
        return {"grammar": grammar, "grammar_end_ids": ends}
    return {}
