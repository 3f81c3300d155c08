"""The stream of events of one request while it is generated, all its choices together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.messages import (
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    SpeculationCounts,
    TokenDelta,
)
from outrider.coordinator.sessions.totals import SourceTally
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.coordinator.sessions.session import Session


@dataclass(kw_only=True, slots=True)
class RequestTimes:
    """Monotonic times of a request's stages, in nanoseconds; 0 before a stage is reached.

    Attributes:
        arrived_ns: it was accepted.
        admitted_ns: its first choice left the queue.
        first_token_ns: its first token was ready for the client.
        finished_ns: its last one was.
    """

    arrived_ns: int = field(default_factory=clock.now_ns)
    admitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0


class Generation:
    """The events of one request, all its choices together; iterate, and always `cancel` in the end.

    Its sessions keep their tokens until the reader waits for some, so that what several rounds have given while it was
    busy becomes one event.

    Args:
        max_unread_rounds: a reader this far behind is stalled, and its sessions rest until it has read all of it,
            counted over all choices together.

    Attributes:
        is_awaited: the reader has taken all events, and waits for more.
        is_stalled: the reader is so far behind that generating more would only fill memory.
        on_awaited: called when the reader begins to wait.
    """

    # Every round asks each session's for its reader.
    __slots__ = (
        "_events",
        "_max_unread_rounds",
        "_release",
        "_unread_rounds",
        "_wake",
        "error",
        "is_awaited",
        "is_closed",
        "is_stalled",
        "on_awaited",
        "request",
        "sessions",
        "times",
        "weights",
    )

    def __init__(
        self, request: GenerationRequest, *, max_unread_rounds: int, release: Callable[["Generation"], None]
    ) -> None:
        self.request = request
        self._max_unread_rounds, self._unread_rounds = max_unread_rounds, 0
        self.sessions: list[Session] = []
        self.is_awaited = self.is_closed = self.is_stalled = False
        self._release = release
        self._events: deque[GenerationEvent] = deque()
        self._wake = asyncio.Event()
        self.error: OutriderError | None = None
        """The error that has ended the request early, if any."""
        self.times = RequestTimes()
        self.weights = request.weights
        """Version of those that its tokens are chosen with; empty before it is placed, or where nobody knows."""
        self.on_awaited: Callable[[], None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once the request has been placed at a target, or resumes."""
        return bool(self.times.admitted_ns or (self.weights and self.request.received))

    def note_round(self) -> None:
        """Note that a round has given a choice tokens, which the reader has not got yet."""
        self._unread_rounds += 1
        if self._unread_rounds >= self._max_unread_rounds:
            self.is_stalled = True

    def emit(self, event: GenerationEvent) -> None:
        """Add an event for the reader."""
        if self.is_closed:
            return
        if not self.times.first_token_ns and isinstance(event, TokenDelta):
            self.times.first_token_ns = clock.now_ns()
        self._events.append(event)
        self.is_awaited = False
        self._wake.set()

    def finish_if_done(self) -> None:
        """Emit the result, once, when every choice has ended."""
        results, times = [session.result for session in self.sessions], self.times
        if self.is_closed or times.finished_ns or any(result is None for result in results):
            return
        now = times.finished_ns = clock.now_ns()
        first = times.first_token_ns or now
        self.emit(
            GenerationResult(
                choices=[result for result in results if result is not None],
                speculation=SpeculationCounts(
                    verify_steps=sum(session.verify_steps for session in self.sessions),
                    drafted_tokens=sum(session.drafted_tokens for session in self.sessions),
                    accepted_tokens=sum(session.accepted_tokens for session in self.sessions),
                    sources=sum((session.sources for session in self.sessions), SourceTally()).counts(),
                ),
                queue_s=((times.admitted_ns or now) - times.arrived_ns) / 1e9,
                ttft_s=(first - times.arrived_ns) / 1e9,
                total_s=(now - times.arrived_ns) / 1e9,
                cached_tokens=min((session.cached_tokens or 0 for session in self.sessions), default=0),
            )
        )

    def abort(self, error: OutriderError) -> None:
        """End the stream with an error, behind all that was committed; what was delivered stays valid."""
        if self.error is None and not self.is_closed:
            for session in self.sessions:
                session.deliver()
            self.error = error
            self._wake.set()
            self.cancel()

    def cancel(self) -> None:
        """Stop the work of this request and free what it holds; harmless when it has ended."""
        if not self.is_closed:
            self.is_closed = True
            self._wake.set()
            self._release(self)

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, GenerationResult):
                    return
            if self.error is not None:
                raise self.error
            if self.is_closed:
                return
            self._wake.clear()
            self.is_awaited, self.is_stalled, self._unread_rounds = True, False, 0
            if self.on_awaited is not None:
                self.on_awaited()
            await self._wake.wait()
