"""The fake target behind a real stream: commands are handed to it, and what its rounds give is sent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.coordinator.fake_workers import FakeTarget

from outrider.coordinator.sessions.messages import Outcome, RoundResults
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes


class RoundServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves any number of coordinators, each with a fake target of its own.

    Attributes:
        commands: what has come, of all streams.
        targets: of the streams that are open, by incarnation of the coordinator.
        open_streams: how many there are.
    """

    def __init__(self, make_target: Callable[[], FakeTarget]) -> None:
        self.make_target = make_target
        self.commands: list[target_pb2.RoundCommands] = []
        self.targets: dict[int, FakeTarget] = {}
        self.open_streams = 0

    async def Verify(self, request_iterator: AsyncIterator[target_pb2.RoundCommands], context: Any) -> None:  # noqa: N802
        target, outgoing = self.make_target(), asyncio.Queue[target_pb2.RoundResults | None]()
        target.on_results = lambda results: outgoing.put_nowait(_packed(results))
        reader = asyncio.create_task(self._read(target, request_iterator))
        reader.add_done_callback(lambda _: outgoing.put_nowait(None))
        self.open_streams += 1
        try:
            while (response := await outgoing.get()) is not None:
                await context.write(response)
            await reader
        finally:
            self.open_streams -= 1
            self.targets = {number: other for number, other in self.targets.items() if other is not target}
            target.is_lost = True
            reader.cancel()

    async def _read(self, target: FakeTarget, messages: AsyncIterator[target_pb2.RoundCommands]) -> None:
        async for message in messages:
            self.commands.append(message)
            self.targets[message.incarnation] = target
            for opening in message.opens:
                target.open_session(opening)
            told = message.places
            for change in zip(told.session_ids, told.epochs, told.places, told.changes, strict=True):
                target.change_place(*change)
            if message.growth.session_ids:
                target.grow(message.growth)
            bounds = message.bounds
            for *bound, alone in zip(bounds.session_ids, bounds.epochs, bounds.allow, bounds.alone, strict=True):
                target.bound(*bound, alone=alone)
            for close in zip(message.close_session_ids, message.close_epochs, strict=True):
                target.close_session(*close)


def _packed(results: RoundResults) -> target_pb2.RoundResults:
    results.message.logprobs.extend(_logprobs(row, outcome) for row, outcome in enumerate(results.outcomes))
    return results.message


def _logprobs(row: int, outcome: Outcome) -> target_pb2.Logprobs:
    count = len(outcome.token_ids)
    return target_pb2.Logprobs(
        row=row,
        token_logprobs=floats_to_bytes([-0.5] * count),
        top_count=2,
        top_token_ids=[1, 2] * count,
        top_logprobs=floats_to_bytes([-0.5, -1.5] * count),
    )
