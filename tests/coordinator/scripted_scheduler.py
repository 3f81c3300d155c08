"""A scheduler that plays scripts: what the tests of all doors share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from outrider.coordinator.sessions.messages import GenerationEvent, GenerationRequest
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.errors import OutriderError, Overloaded

Play = Callable[[GenerationRequest], Sequence[GenerationEvent | OutriderError | None]]


class ScriptedGeneration:
    """Plays one event after the other; None waits until it is told to go on, or ended."""

    weights = ""

    def __init__(self, events: Sequence[GenerationEvent | OutriderError | None]) -> None:
        self._events = events
        self._error: OutriderError | None = None
        self.go_on = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.played = 0

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for event in self._events:
            if event is None:
                await self.go_on.wait()
            if self._error is not None:
                raise self._error
            if isinstance(event, OutriderError):
                raise event
            if event is not None:
                self.played += 1
                yield event

    def cancel(self) -> None:
        self.go_on.set()
        self.is_cancelled.set()

    def abort(self, error: OutriderError) -> None:
        self._error = error
        self.go_on.set()


class ScriptedScheduler:
    """Gives out generations made by `play`, and keeps what it was asked."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.error: OutriderError | None = None
        self.room = 100

    def check_room(self, choices: int = 1, *, entry: str = "") -> None:
        if choices > self.room:
            raise Overloaded("full", retry_after_s=2.5)

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> ScriptedGeneration:
        if self.error is not None:
            raise self.error
        assert len(text_streams) == request.n
        self.requests.append(request)
        self.generations.append(ScriptedGeneration(self.play(request)))
        return self.generations[-1]
