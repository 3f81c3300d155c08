"""State of one generation at the client: the request, the tokens received, and how to resume (no transport)."""

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from outrider.client.outputs import (
    ChoiceOutput,
    Delta,
    GenerationOutput,
    Speculation,
    Timings,
    TokenLogprobs,
    Usage,
    copied,
    source_speculation,
    token_logprobs,
)
from outrider.client.request import GenerateOptions, build_request
from outrider.errors import OutriderError, Overloaded, WorkerUnavailable
from outrider.v1 import generation_pb2

DEFAULT_TIMEOUT_S = 600.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

_FINISH_REASONS: dict[int, Literal["stop", "length"]] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


# Of a recorded tree, what is kept: the live page reads no more.
MAX_TREE_CHARACTERS = 16 << 20


@dataclass
class _Received:
    """Tokens and text received of one choice."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    text_bytes: int = 0
    token_logprobs: list[float] = field(default_factory=list)
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)

    def take(self, delta: generation_pb2.Delta) -> Delta | None:
        """Return the new part of a delta; None for a duplicate."""
        known, known_bytes = len(self.token_ids) - delta.offset, self.text_bytes - delta.text_offset
        if known < 0 or known_bytes < 0:
            raise OutriderError(f"choice {delta.index}: the server left out what stands before token {delta.offset}")
        new = Delta(
            index=delta.index,
            token_ids=tuple(delta.token_ids[known:]),
            text=delta.text.encode("utf-8")[known_bytes:].decode("utf-8", errors="ignore"),
            offset=len(self.token_ids),
            text_offset=self.text_bytes,
            logprobs=token_logprobs(delta.logprobs, known) if delta.HasField("logprobs") else None,
        )
        if not new.token_ids and not new.text:
            return None
        self.token_ids += new.token_ids
        self.texts.append(new.text)
        self.text_bytes += len(new.text.encode("utf-8"))
        if new.logprobs is not None:
            self.token_logprobs += new.logprobs.token_logprobs
            self.top += new.logprobs.top
        return new


class Progress:
    """One generation: gives the request to send, takes what comes, and says how to go on after a break.

    Args:
        max_resumes: attempts in a row at each endpoint without a new token between them.
        endpoints: how many there are to turn to in turn.

    Raises:
        InvalidRequest: an option cannot be put into a request.
        TypeError: an option that does not exist.
    """

    def __init__(
        self, prompt: str | Sequence[int], options: GenerateOptions, *, max_resumes: int, endpoints: int = 1
    ) -> None:
        options = cast("GenerateOptions", dict(options))
        timeout_s = options.pop("timeout_s", DEFAULT_TIMEOUT_S)
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._max_resumes, self._endpoints = max_resumes, endpoints
        self._request = build_request(prompt, options)
        # Ours from the first moment on: what breaks before it has started can be sent again, and is taken over.
        self._request.request_id = self._request.request_id or uuid.uuid4().hex
        self._choices = [_Received() for _ in range(self._request.sampling_params.n or 1)]
        self._with_logprobs = self._request.sampling_params.HasField("logprobs")
        self._started: generation_pb2.Started | None = None
        self._finished: generation_pb2.Finished | None = None
        self._rounds: list[generation_pb2.Round] = []
        self._tree_lines: list[str] = []
        self._tree_room = MAX_TREE_CHARACTERS
        self._breaks_in_a_row = 0
        self._resumes = 0

    @property
    def is_finished(self) -> bool:
        """True once the last message has arrived."""
        return self._finished is not None

    @property
    def rounds(self) -> list[generation_pb2.Round]:
        """The verifications so far."""
        return list(self._rounds)

    @property
    def tree_lines(self) -> list[str]:
        """The events of the token tree so far."""
        return list(self._tree_lines)

    def request(self) -> generation_pb2.GenerateRequest:
        """Return the request to send; after a break, with the tokens already received."""
        del self._request.received[:]
        for index, choice in enumerate(self._choices):
            if choice.token_ids:
                self._request.received.add(index=index, token_ids=choice.token_ids, text_bytes=choice.text_bytes)
        return self._request

    def remaining_s(self) -> float | None:
        """Time left until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take(self, response: generation_pb2.GenerateResponse) -> Iterator[Delta]:
        """Take a message; yield the delta it brought, unless it is a duplicate."""
        match response.WhichOneof("event"):
            case "started":
                if self._started is None:
                    self._started = response.started
                    # A resume has to name both.
                    self._request.request_id = response.started.request_id
                    self._request.sampling_params.seed = response.started.seed
            case "delta":
                if response.delta.index >= len(self._choices):
                    raise OutriderError(f"the server sent choice {response.delta.index}, which was not asked for")
                delta = self._choices[response.delta.index].take(response.delta)
                # Whoever goes on with these tokens has to go on with these weights.
                self._request.weights = self._request.weights or response.delta.weights
                if delta is not None:
                    self._breaks_in_a_row = 0
                    yield delta
            case "round":
                self._rounds.append(response.round)
            case "tree":
                for line in response.tree.lines:
                    self._tree_room -= len(line)
                    if self._tree_room >= 0:
                        self._tree_lines.append(line)
            case "finished":
                self._finished = response.finished

    def pause_before_resuming_s(self, error: OutriderError | TimeoutError, *, is_new: bool) -> float:
        """Return the pause before the request is resumed, in seconds; raise the error if it must not be resumed.

        There is no wait before another endpoint: only when all have been tried in vain, and the longer the more often.

        Args:
            is_new: there may be no such service. Then what has not started is tried at every endpoint once, and so is
                what all are too busy for.
        """
        if not isinstance(error, WorkerUnavailable | Overloaded):
            raise error
        tried = self._breaks_in_a_row + 1
        once = self._started is None and (is_new or isinstance(error, Overloaded))
        most = self._endpoints - 1 if once else self._max_resumes * self._endpoints
        if tried > most:
            raise error
        pause_s, rounds = 0.0, tried // self._endpoints
        if tried % self._endpoints == 0:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (rounds - 1)) * random.uniform(0.8, 1.2)
            if isinstance(error, Overloaded):
                pause_s = max(pause_s, error.retry_after_s)
        remaining_s = self.remaining_s()
        if remaining_s is not None and pause_s >= remaining_s:
            raise error
        self._breaks_in_a_row = tried
        self._resumes += 1
        return pause_s

    def check_complete(self) -> None:
        """At the end of a stream without an error.

        Raises:
            OutriderError: the server ended it before its last message.
        """
        if self._finished is None:
            raise OutriderError("the server ended the stream without Finished")

    def choices(self) -> list[ChoiceOutput]:
        """Choices received so far."""
        ends = {choice.index: choice for choice in self._finished.choices} if self._finished is not None else {}
        return [self._choice(index, received, ends.get(index)) for index, received in enumerate(self._choices)]

    def _choice(self, index: int, received: _Received, end: generation_pb2.Choice | None) -> ChoiceOutput:
        stop_kind = end.WhichOneof("stop_reason") if end is not None else None
        return ChoiceOutput(
            index=index,
            text="".join(received.texts),
            token_ids=tuple(received.token_ids),
            finish_reason=_FINISH_REASONS.get(end.finish_reason) if end is not None else None,
            stop_reason=getattr(end, stop_kind) if stop_kind is not None else None,
            logprobs=TokenLogprobs(token_logprobs=tuple(received.token_logprobs), top=tuple(received.top))
            if self._with_logprobs
            else None,
        )

    def result(self) -> GenerationOutput:
        """The whole generation.

        Raises:
            RuntimeError: it has not ended.
        """
        if self._started is None or self._finished is None:
            raise RuntimeError("the stream has not ended: iterate over it first")
        finished = self._finished
        return GenerationOutput(
            request_id=self._started.request_id,
            seed=self._started.seed,
            choices=self.choices(),
            usage=copied(Usage, finished.usage),
            speculation=Speculation(
                verify_steps=finished.speculation.verify_steps,
                drafted_tokens=finished.speculation.spec_draft_tokens,
                accepted_tokens=finished.speculation.spec_accepted_tokens,
                acceptance_length=finished.speculation.acceptance_length,
                sources=source_speculation(finished.speculation),
            ),
            timings=copied(Timings, finished.timings),
            rounds=self._rounds,
            resumes=self._resumes,
            weights=finished.weights,
        )
