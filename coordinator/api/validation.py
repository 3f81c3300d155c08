"""From GenerateRequest to GenerationRequest: every default filled in, every wrong field named at once."""

import itertools
import re
import secrets
from collections.abc import Sequence

from outrider.coordinator.api.field_checks import FieldChecks, RequestLimits, unknown_fields
from outrider.coordinator.api.sampling_fields import sampling_spec
from outrider.coordinator.api.speculation_fields import asked_sources, speculation
from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest
from outrider.rpc import MAX_MESSAGE_BYTES
from outrider.sampling import SpeculationMode
from outrider.v1 import common_pb2, generation_pb2

MAX_REQUEST_ID_CHARS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_CHOICES = 16

# On the wire: an id, at most; an entry of logit_bias; a token of a tokenizer that does not say.
_ID_BYTES, _BIAS_BYTES, _UNKNOWN_TOKEN_BYTES = 5, 13, 64

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]+")


def max_request_bytes(model: common_pb2.ModelInfo, tokenizer: TextTokenizer | None) -> int:
    """Bytes of the largest request that could be right: a larger one is not even read.

    A prompt and 16 choices received so far as token ids, or a prompt of the longest tokens' text, and lists over the
    vocabulary; at least 1 MiB, at most what any message may have.
    """
    longest, vocab_size = model.max_model_len, model.vocab_size
    text_bytes = longest * ((tokenizer and tokenizer.longest_token_bytes) or _UNKNOWN_TOKEN_BYTES)
    ids_bytes = longest * _ID_BYTES * (1 + MAX_CHOICES) + vocab_size * (2 * _ID_BYTES + _BIAS_BYTES)
    return min(MAX_MESSAGE_BYTES, max(1 << 20, text_bytes + ids_bytes))


class RequestValidator:
    """Checks requests against one model.

    Args:
        tokenizer: None where the model has none: prompts are token ids then, and stop strings are refused.
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
            raise InvalidRequest(check.violations)
        prompt, stop = generation.prompt_token_ids, generation.stop
        streams = [TextStream(self._tokenizer, stop=stop, prompt_token_ids=prompt) for _ in range(generation.n)]
        return generation, streams


class _Check(FieldChecks):
    """One pass over one request, collecting violations."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        model: common_pb2.ModelInfo,
        tokenizer: TextTokenizer | None,
        limits: RequestLimits,
    ) -> None:
        super().__init__(request.sampling_params, model)
        self._request, self._tokenizer, self._limits = request, tokenizer, limits

    def run(self, request_id: str, known_seed: int | None) -> GenerationRequest:
        """The request, meaningful only if there are no violations."""
        request = self._request
        self.wrong_entries("request", unknown_fields(request), "unknown fields")
        self._check_request_id()
        prompt = self._prompt()
        n = self.whole("n", default=1, low=1, high=MAX_CHOICES)
        max_new_tokens = self._max_new_tokens(prompt)
        asked, limits = request.speculation, self._limits
        sampling = sampling_spec(
            self,
            asked,
            self._tokenizer and self._tokenizer.grammars,
            max_new_tokens=max_new_tokens,
            seed=self._seed(known_seed),
            allow_synthetic=limits.allow_synthetic,
        )
        stop = self._stop()
        mode, max_nodes, max_depth = speculation(self, asked, limits)
        if sampling.forced_token_ids:
            # The target grows what it is to score, and bounds it itself.
            mode, max_nodes, max_depth = SpeculationMode.OFF, 0, 0
        generation = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt[: self.model.max_model_len]),
            sampling=sampling,
            stop=stop,
            mode=mode,
            max_nodes=max_nodes,
            max_depth=max_depth,
            sources=asked_sources(self, asked),
            n=n,
            received=self._received(sampling.max_new_tokens),
            trace=request.trace,
            weights=request.weights,
        )
        self._check_received(generation)
        return generation

    # ------------------------------------------------------------------------------------------------ request, prompt

    def _check_request_id(self) -> None:
        request_id = self._request.request_id
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            self.wrong("request_id", f"{len(request_id)} characters given, at most {MAX_REQUEST_ID_CHARS} allowed")
        elif request_id and not _REQUEST_ID.fullmatch(request_id):
            self.wrong("request_id", "use only letters, digits and . _ : - or leave it empty for one made here")

    def _prompt(self) -> Sequence[int]:
        kind = self._request.WhichOneof("prompt")
        if kind is None:
            self.wrong("prompt", "missing: give text or token_ids")
            return ()
        if kind == "text":
            return self._prompt_of_text(self._request.text)
        token_ids = self._request.token_ids.ids
        if not token_ids:
            self.wrong("token_ids.ids", "empty: give at least one token")
        if len(token_ids) > self.model.max_model_len:
            # `_max_new_tokens` says so.
            return token_ids
        self.check_token_ids("token_ids.ids", token_ids)
        return token_ids

    def _prompt_of_text(self, text: str) -> Sequence[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            self.wrong("text", "this model has no tokenizer: give the prompt as token_ids")
            return ()
        if not text:
            self.wrong("text", "empty: give at least one character")
            return ()
        longest = tokenizer.longest_token_bytes
        # A text that cannot fit is refused before time is spent on its tokens.
        if longest is not None and len(text) > longest * self.model.max_model_len:
            self.wrong(
                "text",
                f"the prompt is too long: it has at least {len(text) // longest} tokens, the model takes "
                f"{self.model.max_model_len} (prompt and output): shorten it",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
            return ()
        token_ids = tokenizer.encode(text)
        if not token_ids:
            self.wrong("text", "it has no tokens: give at least one character that the tokenizer keeps")
        return token_ids

    def _max_new_tokens(self, prompt: Sequence[int]) -> int:
        longest = self.model.max_model_len
        room = longest - len(prompt)
        prompt_field = "text" if self._request.WhichOneof("prompt") == "text" else "token_ids.ids"
        if room < 1:
            self.wrong(
                prompt_field,
                f"the prompt is too long: it has {len(prompt)} tokens, the model takes {longest} (prompt and output): "
                f"shorten it to at most {longest - 1}",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        given = self.whole("max_new_tokens", default=len(self.params.forced_token_ids) or None, low=1)
        if given is None:
            return max(1, min(self._limits.default_max_new_tokens, room))
        if given > room >= 1:
            self.wrong(
                "sampling_params.max_new_tokens",
                f"prompt ({len(prompt)}) + max_new_tokens ({given}) = {len(prompt) + given} tokens, which is longer "
                f"than the model's context length {longest}: give at most {room}, or shorten the prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return max(1, given)

    # ------------------------------------------------------------------------------------- seed, stop strings

    def _seed(self, known_seed: int | None) -> int:
        if self.params.HasField("seed"):
            return self.params.seed
        if known_seed is not None:
            return known_seed
        received = itertools.islice(self._request.received, MAX_CHOICES)
        if any(entry.token_ids for entry in received) and self.params.temperature > 0:
            self.wrong("sampling_params.seed", "missing: to resume, give the seed that Started announced")
        return secrets.randbits(64)

    def _stop(self) -> tuple[str, ...]:
        stop = self.params.stop
        if stop and self._tokenizer is None:
            self.wrong("sampling_params.stop", "this model has no tokenizer: use stop_token_ids")
        if len(stop) > MAX_STOP_STRINGS:
            self.wrong("sampling_params.stop", f"{len(stop)} strings given, at most {MAX_STOP_STRINGS} allowed")
            return ()
        wrong = []
        for position, string in enumerate(stop):
            size, field = len(string.encode("utf-8")), f"sampling_params.stop[{position}]"
            if not string:
                wrong.append((field, "empty: remove it or give at least one character"))
            elif size > MAX_STOP_BYTES:
                wrong.append((field, f"{size} bytes given, at most {MAX_STOP_BYTES} allowed"))
        self.wrong_entries("sampling_params.stop", wrong, "wrong strings")
        return tuple(dict.fromkeys(stop))

    # ------------------------------------------------------------------------------------------------- resume

    def _received(self, max_new_tokens: int) -> dict[int, tuple[int, ...]]:
        entries = self._request.received
        if len(entries) > MAX_CHOICES:
            return {}
        return {entry.index: tuple(entry.token_ids) for entry in entries if 0 < len(entry.token_ids) <= max_new_tokens}

    def _check_received(self, generation: GenerationRequest) -> None:
        if len(self._request.received) > MAX_CHOICES:
            self.wrong("received", f"{len(self._request.received)} entries given, at most {MAX_CHOICES} allowed")
            return
        seen: set[int] = set()
        for position, entry in enumerate(self._request.received):
            field = f"received[{position}]"
            if entry.index >= generation.n:
                self.wrong(f"{field}.index", f"{entry.index} given, the request has {generation.n} choices, from 0")
            if entry.index in seen:
                self.wrong(f"{field}.index", f"{entry.index} given twice: one entry a choice")
            seen.add(entry.index)
            before = len(self.violations)
            if len(entry.token_ids) > generation.sampling.max_new_tokens:
                self.wrong(
                    f"{field}.token_ids",
                    f"{len(entry.token_ids)} tokens given, max_new_tokens is {generation.sampling.max_new_tokens}: "
                    "resume with the parameters of the first request",
                )
                continue
            self.check_token_ids(f"{field}.token_ids", entry.token_ids)
            # Text can be compared only when all it depends on is right.
            if len(self.violations) == before == 0 and (fault := _received_fault(entry, self._tokenizer, generation)):
                self.wrong(f"{field}.{fault[0]}", fault[1])


def _received_fault(
    entry: generation_pb2.Received, tokenizer: TextTokenizer | None, generation: GenerationRequest
) -> tuple[str, str] | None:
    """Return the first violation in one choice's received tokens and text, as (field, fix); None if there is none.

    The tokens are decoded once more as the request would have: they must not go on behind its end, and the text sent
    with them must have as many bytes.
    """
    token_ids, sampling = list(entry.token_ids), generation.sampling
    stop_ids = set(sampling.stop_token_ids)
    end = next((i for i, t in enumerate(token_ids) if t in stop_ids and i >= sampling.min_new_tokens), None)
    stream = TextStream(tokenizer, stop=generation.stop, prompt_token_ids=generation.prompt_token_ids)
    # A stop token has no text.
    kept = stream.push(token_ids if end is None else token_ids[:end]).consumed
    if end is not None and stream.stop_string is None:
        kept = end + 1
    if kept < len(token_ids):
        ended = f"the output ended after {kept} of these {len(token_ids)} tokens: send only what was received"
        return "token_ids", ended
    if stream.stop_string is None and (end is not None or len(token_ids) == sampling.max_new_tokens):
        stream.flush()
    if entry.text_bytes == stream.text_bytes:
        return None
    return "text_bytes", (
        f"{entry.text_bytes} given, the text sent with these {len(token_ids)} tokens has {stream.text_bytes}: "
        "send the bytes of all text received"
    )
