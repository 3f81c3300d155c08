"""The fake target behind a real stream: commands are unpacked for it, and what its rounds give is packed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from tests.coordinator.fake_workers import FakeTarget

from outrider.coordinator.sessions.messages import FaultKind, Outcome, RoundResults, SessionOpening
from outrider.sampling import SamplingSpec, SpeculationMode
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes, uints_from_bytes

_MODES = {
    common_pb2.SPECULATION_MODE_ASYNC: SpeculationMode.ASYNC,
    common_pb2.SPECULATION_MODE_SYNC: SpeculationMode.SYNC,
    common_pb2.SPECULATION_MODE_OFF: SpeculationMode.OFF,
}
_CODES = {
    FaultKind.LOST: grpc.StatusCode.NOT_FOUND,
    FaultKind.NO_ROOM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FaultKind.REFUSED: grpc.StatusCode.INVALID_ARGUMENT,
    FaultKind.REPLACED: grpc.StatusCode.ABORTED,
}


class RoundServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves any number of coordinators, each with a fake target of its own.

    Args:
        make_target: makes one.

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
        target.on_results = lambda results: outgoing.put_nowait(self.pack(target, results))
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
                target.open_session(_opening(opening))
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

    def pack(self, target: FakeTarget, results: RoundResults) -> target_pb2.RoundResults:
        """What a round has given, as it travels."""
        outcomes = results.outcomes
        return target_pb2.RoundResults(
            session_ids=[outcome.session_id for outcome in outcomes],
            epochs=[outcome.epoch for outcome in outcomes],
            token_counts=[len(outcome.token_ids) for outcome in outcomes],
            tokens=[token for outcome in outcomes for token in outcome.token_ids],
            accepted_counts=[outcome.accepted for outcome in outcomes],
            selected_counts=[outcome.selected for outcome in outcomes],
            selected_by_source=[count for outcome in outcomes for count in outcome.selected_by_source],
            grown_by_source=[count for outcome in outcomes for count in outcome.grown_by_source],
            accepted_sources=[sources for outcome in outcomes for sources in outcome.sources],
            finishes=[
                target_pb2.FINISH_LENGTH if outcome.is_over else target_pb2.FINISH_UNSPECIFIED for outcome in outcomes
            ],
            cached_tokens=[outcome.cached_tokens for outcome in outcomes],
            lost=[outcome.lost for outcome in outcomes],
            tree_ends=[target_pb2.TreeEnd.Name(outcome.tree_end) for outcome in outcomes],
            logprobs=[_logprobs(row, outcome) for row, outcome in enumerate(outcomes)],
            errors=[
                common_pb2.SessionError(
                    session_id=session_id, epoch=epoch, code=_CODES[fault.kind].value[0], message=fault.message
                )
                for session_id, epoch, fault in results.faults
            ],
            report=common_pb2.StepReport(step_ns=10, tokens=1),
        )


def _opening(message: common_pb2.SessionOpen) -> SessionOpening:
    limits = message.limits
    return SessionOpening(
        session_id=message.session_id,
        epoch=message.epoch,
        prompt=uints_from_bytes(message.prompt).tolist(),
        output=uints_from_bytes(message.output).tolist(),
        sampling=SamplingSpec.from_proto(message.sampling),
        mode=_MODES[limits.mode],
        max_live_nodes=limits.max_live_nodes,
        max_depth=limits.max_depth,
        max_nodes=limits.max_nodes,
        sync_wait_ms=limits.sync_wait_ms,
        weights=message.weights,
    )


def _logprobs(row: int, outcome: Outcome) -> target_pb2.Logprobs:
    count = len(outcome.token_ids)
    return target_pb2.Logprobs(
        row=row,
        token_logprobs=floats_to_bytes([-0.5] * count),
        top_count=2,
        top_token_ids=[1, 2] * count,
        top_logprobs=floats_to_bytes([-0.5, -1.5] * count),
    )
