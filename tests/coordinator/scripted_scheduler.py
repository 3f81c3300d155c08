"""A scheduler that plays scripts: what the tests of all doors share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import GenerationEvent, GenerationRequest
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.errors import OutriderError, Overloaded

Play = Callable[[GenerationRequest], Sequence[GenerationEvent | OutriderError | None]]


class ScriptedGeneration(Generation):
    """Plays one event after the other; None waits until it is told to go on, or ended."""

    def __init__(self, request: GenerationRequest, events: Sequence[GenerationEvent | OutriderError | None]) -> None:
        super().__init__(request, max_unread_rounds=1, release=lambda _: self.go_on.set())
        self._script = events
        self.go_on = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.played = 0

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for event in self._script:
            if event is None:
                await self.go_on.wait()
            if self.error is not None:
                raise self.error
            if isinstance(event, OutriderError):
                raise event
            if event is not None:
                self.played += 1
                yield event

    def cancel(self) -> None:
        super().cancel()
        self.is_cancelled.set()


class ScriptedScheduler(Scheduler):
    """Gives out generations made by `play`, and keeps what it was asked."""

    def __init__(self, play: Play) -> None:
        super().__init__(CoordinatorConfig())
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
        self.generations.append(ScriptedGeneration(request, self.play(request)))
        return self.generations[-1]
