"""A link to a target over a stream that is none: what is written is kept, and what is read is what a test puts in."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.coordinator.sessions.messages import RoundResults
from outrider.coordinator.workers.links import TargetLink
from outrider.v1 import target_pb2


class Stream:
    """The worker's end."""

    def __init__(self) -> None:
        self.written: list[target_pb2.RoundCommands] = []
        self.results: asyncio.Queue[target_pb2.RoundResults] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[target_pb2.RoundResults]:
        while True:
            yield await self.results.get()

    async def write(self, commands: target_pb2.RoundCommands) -> None:
        """Commands have come."""
        self.written.append(commands)

    def cancel(self) -> None:
        """The stream's end."""


class LinkToStream(TargetLink):
    """A link whose stream a test gives, and what became of it."""

    def __init__(
        self,
        stream: Any,
        *,
        on_results: Callable[[RoundResults], None] = lambda results: None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.stream, self.lost = stream, list[str]()
        super().__init__(
            "127.0.0.1:1", incarnation=1, vocab_size=256, on_results=on_results, on_lost=on_lost or self.lost.append
        )

    def _start(self, call: Any) -> None:
        call.cancel()
        super()._start(self.stream)


async def settle() -> None:
    """Have the event loop do what there is to do."""
    for _ in range(10):
        await asyncio.sleep(0)
