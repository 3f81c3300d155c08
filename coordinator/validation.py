"""From GenerateRequest to GenerationRequest: every default filled in, every wrong field named at once."""

import itertools
import math
import re
import secrets
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from outrider.coordinator.messages import GenerationRequest, SpeculationMode
from outrider.coordinator.received_text import received_fault
from outrider.coordinator.source_fields import asked_sources
from outrider.coordinator.structured_outputs import structured_outputs
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.tokenizer import TextTokenizer
from outrider.coordinator.unknown_fields import unknown_fields
from outrider.errors import FieldViolation, InvalidRequest
from outrider.growth_source import GrowthSource
from outrider.rpc import MAX_MESSAGE_BYTES
from outrider.sampling import SamplingSpec, VerificationRule, rule_from_proto
from outrider.v1 import common_pb2, generation_pb2

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_SYNTHETIC_RATES = 64
# Of one list, this many wrong entries are named; the rest are counted.
_NAMED_ENTRIES = 3
# A status travels in the trailing metadata (the text thrice, in part as base64), of which clients take 8 KiB.
_MAX_VIOLATION_CHARS = 2_100
# Below this, probabilities other than the best one's underflow in float32: the choice is the greedy one.
_GREEDY_BELOW = 1e-30

# On the wire: an id, at most; an entry of logit_bias; a token of a tokenizer that does not say.
_ID_BYTES, _BIAS_BYTES, _UNKNOWN_TOKEN_BYTES = 5, 13, 64

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]+")
_MODES = {
    common_pb2.SPECULATION_MODE_UNSPECIFIED: SpeculationMode.ASYNC,
    common_pb2.SPECULATION_MODE_ASYNC: SpeculationMode.ASYNC,
    common_pb2.SPECULATION_MODE_SYNC: SpeculationMode.SYNC,
    common_pb2.SPECULATION_MODE_OFF: SpeculationMode.OFF,
}


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a request may ask for, and what it gets when it does not say.

    Attributes:
        default_max_new_tokens: cut to the room that is left where the prompt is long.
        max_nodes: most nodes verified for a choice in one step, and the default.
        max_depth: deepest node, and the default.
        allow_synthetic: whether a request may be judged by the synthetic rule, whose output means nothing.
    """

    default_max_new_tokens: int = 128
    max_nodes: int = 24
    max_depth: int = 8
    allow_synthetic: bool = False


def max_request_bytes(model: common_pb2.ModelInfo, tokenizer: TextTokenizer | None) -> int:
    """Bytes of the largest request that could be right: a larger one is not even read.

    A prompt and 16 choices received so far as token ids, or a prompt of the longest tokens' text, and lists over the
    vocabulary; at least 1 MiB, at most what any message may have.
    """
    longest, vocab_size = model.max_model_len, model.vocab_size
    text_bytes = longest * ((tokenizer and tokenizer.longest_token_bytes) or _UNKNOWN_TOKEN_BYTES)
    ids_bytes = longest * _ID_BYTES * (1 + MAX_CHOICES) + vocab_size * (2 * _ID_BYTES + _BIAS_BYTES)
    return min(MAX_MESSAGE_BYTES, max(1 << 20, text_bytes + ids_bytes))


def check_known_fields(request: Message) -> None:
    """For requests of which nothing else can be wrong.

    Raises:
        InvalidRequest: the request holds fields that this protocol does not have.
    """
    violations = [FieldViolation(path, description) for path, description in unknown_fields(request)]
    if violations:
        raise InvalidRequest(_fitting(violations))


class RequestValidator:
    """Checks requests against one model.

    Args:
        model: vocabulary size, longest session, end-of-sequence ids.
        tokenizer: None where the model has none: prompts are token ids then, and stop strings are refused.
        limits: bounds and defaults.
    """

    def __init__(
        self, model: common_pb2.ModelInfo, tokenizer: TextTokenizer | None, limits: RequestLimits | None = None
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits or RequestLimits()

    def check(
        self,
        request: generation_pb2.GenerateRequest,
        *,
        request_id: str | None = None,
        known_seed: int | None = None,
    ) -> tuple[GenerationRequest, list[TextStream]]:
        """The request with every default filled in, and a fresh text stream for each choice.

        Args:
            request_id: made by the server, for a request that names none.
            known_seed: of the live request with the same id, for a resume that names none.

        Raises:
            InvalidRequest: names every field that is wrong, and what to change.
        """
        check = _Check(request, self._model, self._tokenizer, self._limits)
        generation = check.run(request.request_id or request_id or "", known_seed)
        if check.violations:
            raise InvalidRequest(_fitting(check.violations))
        return generation, check.text_streams(generation)


class _Check:
    """One pass over one request, collecting violations.

    A list that is longer than it may be is not looked into: what a request costs is bounded by what it may ask for, and
    not by how much fits into a message.
    """

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        model: common_pb2.ModelInfo,
        tokenizer: TextTokenizer | None,
        limits: RequestLimits,
    ) -> None:
        self._request = request
        self._params = request.sampling_params
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self.violations: list[FieldViolation] = []

    def run(self, request_id: str, known_seed: int | None) -> GenerationRequest:
        """The request, meaningful only if there are no violations."""
        request = self._request
        unknown = unknown_fields(request)
        self._wrong_entries("request", unknown, "unknown fields")
        self._check_request_id()
        prompt = self._prompt()
        n = self._whole("n", default=1, low=1, high=MAX_CHOICES)
        max_new_tokens = self._max_new_tokens(prompt)
        sampling = replace(self._sampling(max_new_tokens, self._seed(known_seed)), **self._verification())
        sampling = replace(sampling, **self._structured_outputs(sampling))
        stop = self._stop()
        mode, max_nodes, max_depth = self._speculation()
        generation = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt[: self._model.max_model_len]),
            sampling=sampling,
            stop=stop,
            mode=mode,
            max_nodes=max_nodes,
            max_depth=max_depth,
            sources=self._sources(),
            n=n,
            received=self._received(sampling.max_new_tokens),
            trace=request.trace,
            weights=request.weights,
        )
        self._check_received(generation)
        return generation

    def text_streams(self, generation: GenerationRequest) -> list[TextStream]:
        """A fresh one for each choice."""
        prompt = generation.prompt_token_ids
        return [TextStream(self._tokenizer, stop=generation.stop, prompt_token_ids=prompt) for _ in range(generation.n)]

    def _wrong(self, field: str, description: str) -> None:
        self.violations.append(FieldViolation(field, description))

    # ------------------------------------------------------------------------------------------------ request, prompt

    def _check_request_id(self) -> None:
        request_id = self._request.request_id
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            self._wrong("request_id", f"{len(request_id)} characters given, at most {MAX_REQUEST_ID_CHARS} allowed")
        elif request_id and not _REQUEST_ID.fullmatch(request_id):
            self._wrong("request_id", "use only letters, digits and . _ : - or leave it empty for one made here")

    def _prompt(self) -> Sequence[int]:
        kind = self._request.WhichOneof("prompt")
        if kind is None:
            self._wrong("prompt", "missing: give text or token_ids")
            return ()
        if kind == "text":
            return self._prompt_of_text(self._request.text)
        token_ids = self._request.token_ids.ids
        if not token_ids:
            self._wrong("token_ids.ids", "empty: give at least one token")
        if len(token_ids) > self._model.max_model_len:
            # `_max_new_tokens` says so.
            return token_ids
        self._check_token_ids("token_ids.ids", token_ids)
        return token_ids

    def _prompt_of_text(self, text: str) -> Sequence[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            self._wrong("text", "this model has no tokenizer: give the prompt as token_ids")
            return ()
        if not text:
            self._wrong("text", "empty: give at least one character")
            return ()
        longest = tokenizer.longest_token_bytes
        # A text that cannot fit is refused before time is spent on its tokens.
        if longest is not None and len(text) > longest * self._model.max_model_len:
            self._wrong(
                "text",
                f"the prompt has at least {len(text) // longest} tokens, the model takes {self._model.max_model_len} "
                "(prompt and output): shorten the prompt",
            )
            return ()
        token_ids = tokenizer.encode(text)
        if not token_ids:
            self._wrong("text", "it has no tokens: give at least one character that the tokenizer keeps")
        return token_ids

    def _max_new_tokens(self, prompt: Sequence[int]) -> int:
        longest = self._model.max_model_len
        room = longest - len(prompt)
        prompt_field = "text" if self._request.WhichOneof("prompt") == "text" else "token_ids.ids"
        if room < 1:
            self._wrong(
                prompt_field,
                f"the prompt has {len(prompt)} tokens, the model takes {longest} (prompt and output): "
                f"shorten the prompt to at most {longest - 1}",
            )
        given = self._whole("max_new_tokens", default=None, low=1)
        if given is None:
            return max(1, min(self._limits.default_max_new_tokens, room))
        if given > room >= 1:
            self._wrong(
                "sampling_params.max_new_tokens",
                f"prompt ({len(prompt)}) + max_new_tokens ({given}) = {len(prompt) + given} tokens, the model takes "
                f"{longest}: give at most {room}, or shorten the prompt",
            )
        return max(1, given)

    # ------------------------------------------------------------------------------------------------------- sampling

    def _sampling(self, max_new_tokens: int, seed: int) -> SamplingSpec:
        params = self._params
        temperature = self._number("temperature", 0.0, "a finite number, 0 (greedy) or more", lambda x: x >= 0)
        top_k = params.top_k if params.HasField("top_k") else 0
        if top_k < -1:
            self._wrong("sampling_params.top_k", f"{top_k} given, 1 or more needed; 0 or -1 turns it off")
        stop_token_ids = self._token_id_list("stop_token_ids")
        eos = () if params.ignore_eos else self._model.eos_token_ids
        min_new_tokens = self._whole("min_new_tokens", default=0, low=0)
        if min_new_tokens > max_new_tokens:
            self._wrong(
                "sampling_params.min_new_tokens",
                f"{min_new_tokens} given, more than max_new_tokens ({max_new_tokens}): lower it or raise that",
            )
        spec = SamplingSpec(
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=max(0, top_k),
            top_p=self._number("top_p", 1.0, "more than 0 and at most 1 (1 is off)", lambda x: 0 < x <= 1),
            min_p=self._number("min_p", 0.0, "0 (off) to 1", lambda x: 0 <= x <= 1),
            repetition_penalty=self._number(
                "repetition_penalty", 1.0, "more than 0 and at most 2 (1 is off)", lambda x: 0 < x <= 2
            ),
            presence_penalty=self._number("presence_penalty", 0.0, "-2 to 2 (0 is off)", lambda x: -2 <= x <= 2),
            frequency_penalty=self._number("frequency_penalty", 0.0, "-2 to 2 (0 is off)", lambda x: -2 <= x <= 2),
            logit_bias=self._logit_bias(),
            allowed_token_ids=self._token_id_list("allowed_token_ids"),
            seed=seed,
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *eos))),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            logprobs=self._whole("logprobs", default=None, low=0, high=MAX_LOGPROBS),
        )
        if min_new_tokens and spec.allowed_token_ids and set(spec.allowed_token_ids) <= set(spec.stop_token_ids):
            self._wrong(
                "sampling_params.allowed_token_ids",
                "only stop tokens, which min_new_tokens forbids at first: allow another token or drop min_new_tokens",
            )
        return spec

    def _structured_outputs(self, sampling: SamplingSpec) -> dict[str, Any]:
        grammars = self._tokenizer and self._tokenizer.grammars
        found, wrong = structured_outputs(self._params, sampling, grammars, self._model.eos_token_ids)
        self.violations.extend(wrong)
        return found

    def _number(self, name: str, default: float, needed: str, fits: Callable[[float], bool]) -> float:
        if not self._params.HasField(name):  # pyright: ignore[reportArgumentType] the generated stub lists the names
            return default
        value = getattr(self._params, name)
        if math.isfinite(value) and fits(value):
            return value
        self._wrong(f"sampling_params.{name}", f"{value:g} given, {needed} needed")
        return default

    def _whole(self, name: str, *, default: Any, low: int, high: int | None = None) -> Any:
        if not self._params.HasField(name):  # pyright: ignore[reportArgumentType]
            return default
        value = getattr(self._params, name)
        if value < low or (high is not None and value > high):
            needed = f"{low} or more" if high is None else f"{low} to {high}"
            self._wrong(f"sampling_params.{name}", f"{value} given, {needed} needed")
            return low
        return value

    def _token_id_list(self, name: str) -> tuple[int, ...]:
        token_ids = getattr(self._params, name)
        if self._is_too_long(f"sampling_params.{name}", token_ids, "token ids"):
            return ()
        self._check_token_ids(f"sampling_params.{name}", token_ids)
        return tuple(dict.fromkeys(token_ids))

    def _is_too_long(self, field: str, entries: Sized, what: str) -> bool:
        """Whether a list over the vocabulary has more entries than that."""
        most = self._model.vocab_size
        if len(entries) > most:
            self._wrong(field, f"{len(entries)} {what} given, at most {most} allowed: the vocabulary has no more")
        return len(entries) > most

    def _check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._model.vocab_size
        # The usual case costs one pass in C; which entries are wrong is asked only when some are.
        if not token_ids or max(token_ids) < vocab_size:
            return
        wrong = [
            (f"{field}[{position}]", f"token id {token_id} is outside the vocabulary: give 0 to {vocab_size - 1}")
            for position, token_id in enumerate(token_ids)
            if token_id >= vocab_size
        ]
        self._wrong_entries(field, wrong, "token ids outside the vocabulary")

    def _wrong_entries(self, field: str, wrong: Sequence[tuple[str, str]], what: str) -> None:
        for path, description in wrong[:_NAMED_ENTRIES]:
            self._wrong(path, description)
        if len(wrong) > _NAMED_ENTRIES:
            self._wrong(field, f"{len(wrong) - _NAMED_ENTRIES} more {what}")

    def _logit_bias(self) -> dict[int, float]:
        field, wrong = "sampling_params.logit_bias", []
        if self._is_too_long(field, self._params.logit_bias, "entries"):
            return {}
        bias, highest = dict(self._params.logit_bias), self._model.vocab_size - 1
        for token_id, value in sorted(bias.items()):
            if token_id > highest:
                wrong.append((f"{field}[{token_id}]", f"outside the vocabulary: give token ids from 0 to {highest}"))
            if not (math.isfinite(value) and -100 <= value <= 100):
                wrong.append((f"{field}[{token_id}]", f"{value:g} given, a finite number from -100 to 100 needed"))
        self._wrong_entries(field, wrong, "wrong entries")
        return bias

    def _seed(self, known_seed: int | None) -> int:
        if self._params.HasField("seed"):
            return self._params.seed
        if known_seed is not None:
            return known_seed
        received = itertools.islice(self._request.received, MAX_CHOICES)
        if any(entry.token_ids for entry in received) and self._params.temperature > 0:
            self._wrong("sampling_params.seed", "missing: to resume, give the seed that Started announced")
        return secrets.randbits(64)

    def _stop(self) -> tuple[str, ...]:
        stop = self._params.stop
        if stop and self._tokenizer is None:
            self._wrong("sampling_params.stop", "this model has no tokenizer: use stop_token_ids")
        if len(stop) > MAX_STOP_STRINGS:
            self._wrong("sampling_params.stop", f"{len(stop)} strings given, at most {MAX_STOP_STRINGS} allowed")
            return ()
        wrong = []
        for position, string in enumerate(stop):
            size, field = len(string.encode("utf-8")), f"sampling_params.stop[{position}]"
            if not string:
                wrong.append((field, "empty: remove it or give at least one character"))
            elif size > MAX_STOP_BYTES:
                wrong.append((field, f"{size} bytes given, at most {MAX_STOP_BYTES} allowed"))
        self._wrong_entries("sampling_params.stop", wrong, "wrong strings")
        return tuple(dict.fromkeys(stop))

    # -------------------------------------------------------------------------------------------- speculation, resume

    def _speculation(self) -> tuple[SpeculationMode, int, int]:
        given = self._request.speculation
        mode = _MODES.get(given.mode)
        if mode is None:
            self._wrong("speculation.mode", f"{given.mode} given, 1 (async), 2 (sync) or 3 (off) needed")
        values = []
        for name in ("max_nodes", "max_depth"):
            highest = getattr(self._limits, name)
            value = getattr(given, name) if given.HasField(name) else highest
            if not 1 <= value <= highest:
                self._wrong(f"speculation.{name}", f"{value} given, 1 to {highest} needed (mode 3, off, needs none)")
            values.append(value)
        return mode or SpeculationMode.ASYNC, values[0], values[1]

    def _sources(self) -> frozenset[GrowthSource]:
        sources, wrong = asked_sources(self._request.speculation)
        self.violations.extend(wrong)
        return sources

    def _verification(self) -> dict[str, Any]:
        """The rule and its thresholds, as fields of a SamplingSpec."""
        given, rule = self._request.speculation, VerificationRule.COUPLED
        try:
            rule = rule_from_proto(given.verification)
        except ValueError as error:
            self._wrong("speculation.verification", str(error))
        chosen: dict[str, Any] = {"verification": rule}
        for name in ("threshold_single", "threshold_acc"):
            if not given.HasField(name):  # pyright: ignore[reportArgumentType] as above
                continue
            value = chosen[name] = getattr(given, name)
            if rule is not VerificationRule.TARGET_ONLY:
                self._wrong(
                    f"speculation.{name}", f"only verification 2 (target_only) has it, not {rule}: leave it out"
                )
            elif not 0 < value <= 1:
                self._wrong(f"speculation.{name}", f"{value:g} given, more than 0 and at most 1 needed (1 is off)")
        return chosen | self._synthetic(rule)

    def _synthetic(self, rule: VerificationRule) -> dict[str, Any]:
        field, rates = "speculation.synthetic_rates", self._request.speculation.synthetic_rates
        if rule is not VerificationRule.SYNTHETIC:
            if rates:
                self._wrong(field, f"only verification 4 (synthetic) has them, not {rule}: leave them out")
            return {}
        if not self._limits.allow_synthetic:
            self._wrong(
                "speculation.verification",
                "4 (synthetic) is for benchmarks, its output means nothing: start the coordinator with "
                "--allow-synthetic, or choose another",
            )
        if not 1 <= len(rates) <= MAX_SYNTHETIC_RATES:
            self._wrong(field, f"{len(rates)} given, 1 to {MAX_SYNTHETIC_RATES} needed")
            return {}
        wrong = [
            (f"{field}[{place}]", f"{rate:g} given, 0 to 1 needed")
            for place, rate in enumerate(rates)
            if not 0 <= rate <= 1
        ]
        self._wrong_entries(field, wrong, "wrong rates")
        return {"synthetic_rates": tuple(rates)}

    def _received(self, max_new_tokens: int) -> dict[int, tuple[int, ...]]:
        entries = self._request.received
        if len(entries) > MAX_CHOICES:
            return {}
        return {entry.index: tuple(entry.token_ids) for entry in entries if 0 < len(entry.token_ids) <= max_new_tokens}

    def _check_received(self, generation: GenerationRequest) -> None:
        if len(self._request.received) > MAX_CHOICES:
            self._wrong("received", f"{len(self._request.received)} entries given, at most {MAX_CHOICES} allowed")
            return
        seen: set[int] = set()
        for position, entry in enumerate(self._request.received):
            field = f"received[{position}]"
            if entry.index >= generation.n:
                self._wrong(f"{field}.index", f"{entry.index} given, the request has {generation.n} choices, from 0")
            if entry.index in seen:
                self._wrong(f"{field}.index", f"{entry.index} given twice: one entry a choice")
            seen.add(entry.index)
            before = len(self.violations)
            if len(entry.token_ids) > generation.sampling.max_new_tokens:
                self._wrong(
                    f"{field}.token_ids",
                    f"{len(entry.token_ids)} tokens given, max_new_tokens is {generation.sampling.max_new_tokens}: "
                    "resume with the parameters of the first request",
                )
                continue
            self._check_token_ids(f"{field}.token_ids", entry.token_ids)
            # Text can be compared only when all it depends on is right.
            if len(self.violations) == before == 0 and (fault := received_fault(entry, self._tokenizer, generation)):
                self._wrong(f"{field}.{fault[0]}", fault[1])


def _fitting(violations: Sequence[FieldViolation]) -> list[FieldViolation]:
    """As many as a status can carry, and how many more there are."""
    chars, kept = 0, []
    for violation in violations:
        chars += len(violation.field) + len(violation.description) + 4
        if chars > _MAX_VIOLATION_CHARS:
            rest = len(violations) - len(kept)
            return [*kept, FieldViolation("request", f"{rest} more fields are wrong: correct these first")]
        kept.append(violation)
    return kept
