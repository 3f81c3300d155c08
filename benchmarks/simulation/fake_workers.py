"""Fake draft and target workers: real gRPC servers whose model is a sleep and a hash.

    request arrives -> half a round trip -> a step of its time -> half a round trip -> answer leaves

A step's verdicts or nodes are computed at its beginning, inside its time; a step that ends late because this machine
was busy says so in its record, and is charged to the worker, not to the coordinator.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio
from benchmarks.simulation.last_step import LastStep, Outcome, Tree
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.tree_grower import GrownRows, TreeGrower
from grpc.aio import ServicerContext

from outrider.coordinator.alarm import Alarm
from outrider.succession import addition_from_proto, extended, succession_from_proto
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes, split_by_counts, tokens_from_bytes

T = TypeVar("T")
Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StepTrace:
    """One step of a fake worker; `planned_ns` is what it should have taken."""

    began_ns: int
    ended_ns: int
    planned_ns: int
    sessions: int
    nodes: int
    tokens: int


async def sleep_until(due_ns: int) -> None:
    """Sleeps to a time of the monotonic clock; a step that is late already still lets the streams be served."""
    left_ns = due_ns - time.monotonic_ns()
    if left_ns <= 0:
        await asyncio.sleep(0)
        return
    # The loop's own timers would round a draft's step to a whole millisecond.
    is_due = asyncio.Event()
    alarm = Alarm(is_due.set)
    alarm.set(left_ns / 1e9)
    try:
        await is_due.wait()
    finally:
        alarm.close()


class DelayLine(Generic[T]):
    """A network's one way: what goes in comes out in order, `delay_ns` later."""

    def __init__(self, delay_ns: int) -> None:
        self._delay_ns = delay_ns
        self.arrived_ns = 0
        """When what was taken last was due."""
        self._items: deque[tuple[int, T | None]] = deque()
        self._filled, self._taken = asyncio.Event(), asyncio.Event()

    def put(self, item: T | None) -> None:
        """None ends the line."""
        self._items.append((time.monotonic_ns() + self._delay_ns, item))
        self._filled.set()

    async def get(self) -> T | None:
        """The next item when it is due."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        await sleep_until(self._items[0][0])
        self._taken.set()
        self.arrived_ns, item = self._items.popleft()
        return item

    async def drain(self) -> None:
        """Waits while more than two items are overdue: a process that is too slow must not pile them up."""
        while len(self._items) > 2 and self._items[2][0] <= time.monotonic_ns():
            self._taken.clear()
            await self._taken.wait()

    def arrived(self) -> Iterator[T | None]:
        """What is due by now, without waiting."""
        now_ns = time.monotonic_ns()
        while self._items and self._items[0][0] <= now_ns:
            self.arrived_ns, item = self._items.popleft()
            yield item


async def _fill(line: DelayLine[T], source: AsyncIterator[T]) -> None:
    try:
        async for message in source:
            line.put(message)
    finally:
        line.put(None)


async def _serve(
    requests: AsyncIterator[Request],
    rtt_ms: float,
    run: Callable[[DelayLine[Request], DelayLine[Answer]], Coroutine[Any, Any, None]],
) -> AsyncIterator[Answer]:
    """Yields what `run` puts into its second line until it ends; an error of its own ends the stream."""
    one_way_ns = round(rtt_ms * 1e6 / 2)
    incoming: DelayLine[Request] = DelayLine(one_way_ns)
    outgoing: DelayLine[Answer] = DelayLine(one_way_ns)
    reader = asyncio.create_task(_fill(incoming, requests))
    steps = asyncio.create_task(run(incoming, outgoing))
    steps.add_done_callback(lambda _: outgoing.put(None))
    try:
        while (message := await outgoing.get()) is not None:
            yield message
        await steps
    finally:
        reader.cancel()
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await steps


class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """Emits what the path model says, and accepts the nodes that agree with it."""

    def __init__(self, settings: Settings, model: PathModel) -> None:
        self._settings, self._model = settings, model
        self._sessions: dict[int, tuple[int, int, int, int]] = {}
        """Session to its path's key, its epoch, its committed length and the one with which it ends."""
        self._last = LastStep()
        self._additions: Sequence[target_pb2.TreeAddition] = ()
        """To the batch that follows the last step."""
        self.traces: list[StepTrace] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves it there."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def Verify(  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """One answer a step."""
        async for response in _serve(request_iterator, self._settings.target_rtt_ms, self._steps):
            yield response

    async def _steps(
        self, incoming: DelayLine[target_pb2.VerifyRequest], outgoing: DelayLine[target_pb2.VerifyResponse]
    ) -> None:
        ended_ns = 0
        came: deque[tuple[int, target_pb2.VerifyRequest | None]] = deque()
        while True:
            if not came:
                request = await incoming.get()
                came.append((incoming.arrived_ns, request))
            arrived_ns, request = came.popleft()
            if request is None:
                return
            began_ns = time.monotonic_ns()
            for opening in request.opens:
                prompt = tokens_from_bytes(opening.prompt)
                length = len(prompt) + len(opening.output) // 4
                most = len(prompt) + opening.sampling.max_new_tokens
                self._sessions[opening.session_id] = (prompt[0], opening.epoch, length, most)
            for session_id in request.close_session_ids:
                self._sessions.pop(session_id, None)
            if request.step:
                response = await self._step(request, began_ns)
                if request.trees.follows:
                    response.ahead_ns = ended_ns - arrived_ns
                came.extend((incoming.arrived_ns, other) for other in incoming.arrived())
                # What comes later changes nothing.
                follower = request.step + 1
                self._additions = [other.addition for _, other in came if other and other.addition.step == follower]
                response.additions = len(self._additions)
                outgoing.put(response)
                ended_ns = time.monotonic_ns()

    async def _step(self, request: target_pb2.VerifyRequest, began_ns: int) -> target_pb2.VerifyResponse:
        trees = request.trees
        sessions = len(trees.session_ids)
        response = target_pb2.VerifyResponse(
            step=request.step,
            session_ids=trees.session_ids,
            epochs=trees.epochs,
            outcomes=[target_pb2.OUTCOME_ACCEPTED] * sessions,
        )
        sent = self._trees(trees)
        if trees.follows:
            response.verified_counts.extend(len(tokens) for tokens, _ in sent)
        for session_id, epoch, length, tree in zip(trees.session_ids, trees.epochs, trees.lengths, sent, strict=True):
            key, own_epoch, own_length, most = self._sessions[session_id]
            expected = self._last.length(session_id, epoch, own_length) if trees.follows else own_length
            if (epoch, length) != (own_epoch, expected):
                raise ValueError(f"session {session_id}: {(epoch, length)} submitted, {(own_epoch, expected)} held")
            accepted, emitted = self._model.walk(key, own_length, *tree)
            outcome = Outcome.of(own_length, len(tree[0]), accepted, emitted, most=most)
            self._last.note(session_id, epoch, outcome)
            self._sessions[session_id] = (key, epoch, own_length + len(emitted), most)
            response.accepted_counts.append(len(accepted))
            response.accepted_nodes.extend(accepted)
            response.token_counts.append(len(emitted))
            response.tokens.extend(emitted)
        self._last.end()
        nodes = sum(len(tokens) for tokens, _ in sent)
        planned_ns = self._settings.target_step_ns(rows=sessions + nodes, sessions=sessions)
        await sleep_until(began_ns + planned_ns)
        ended_ns = time.monotonic_ns()
        report = response.report
        report.step_ns = report.forward_ns = ended_ns - began_ns
        report.tokens, report.sessions = sessions + nodes, sessions
        self.traces.append(StepTrace(began_ns, ended_ns, planned_ns, sessions, nodes, len(response.tokens)))
        return response

    def _trees(self, trees: target_pb2.TreeBatch) -> list[Tree]:
        """What is verified of each session."""
        if trees.follows:
            sent, _ = extended(succession_from_proto(trees), list(map(addition_from_proto, self._additions)))
            return self._last.trees(sent, trees.session_ids, trees.epochs)
        tokens, parents = list(trees.tokens), list(trees.parents)
        return [(tokens[span], parents[span]) for span in split_by_counts(trees.node_counts)]


class FakeDraft(draft_pb2_grpc.DraftServiceServicer):
    """Grows all sessions' trees by the best nodes of all, one message a step; commits apply between steps."""

    def __init__(self, settings: Settings, model: PathModel) -> None:
        self._settings = settings
        self._grower = TreeGrower(model, width=settings.draft_width)
        self.traces: list[StepTrace] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves it there."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def Speculate(  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftCommands],
        context: ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftGrowth]:
        """Growth, unasked."""
        async for growth in _serve(request_iterator, self._settings.draft_rtt_ms, self._steps):
            yield growth

    async def _steps(
        self, incoming: DelayLine[draft_pb2.DraftCommands], outgoing: DelayLine[draft_pb2.DraftGrowth]
    ) -> None:
        while True:
            for commands in incoming.arrived():
                if commands is None:
                    return
                self._apply(commands)
            began_ns = time.monotonic_ns()
            grown = self._grower.step()
            if not grown:
                commands = await incoming.get()
                if commands is None:
                    return
                self._apply(commands)
                continue
            planned_ns = round(self._settings.draft_step_ms * 1e6)
            await sleep_until(began_ns + planned_ns)
            ended_ns = time.monotonic_ns()
            message = _growth_message(grown)
            message.report.step_ns = message.report.forward_ns = ended_ns - began_ns
            sessions, nodes = len(message.session_ids), len(message.node_ids)
            self.traces.append(StepTrace(began_ns, ended_ns, planned_ns, sessions, nodes, 0))
            outgoing.put(message)
            await outgoing.drain()

    def _apply(self, commands: draft_pb2.DraftCommands) -> None:
        for opening in commands.opens:
            prompt, limits = tokens_from_bytes(opening.prompt), opening.limits
            is_sync = limits.mode == common_pb2.SPECULATION_MODE_SYNC
            self._grower.open(
                opening.session_id,
                key=prompt[0],
                epoch=opening.epoch,
                length=len(prompt) + len(opening.output) // 4,
                is_sync=is_sync,
                max_nodes=limits.sync_nodes if is_sync else limits.max_live_nodes,
                max_depth=limits.max_depth,
            )
        commits = commands.commits
        columns = zip(
            commits.session_ids, commits.epochs, commits.positions, split_by_counts(commits.token_counts), strict=True
        )
        for session_id, epoch, position, span in columns:
            self._grower.commit(session_id, epoch=epoch, position=position, token_ids=commits.tokens[span])
        for session_id, epoch in zip(commands.close_session_ids, commands.close_epochs, strict=True):
            self._grower.close(session_id, epoch=epoch)


def _growth_message(grown: Mapping[int, GrownRows]) -> draft_pb2.DraftGrowth:
    message = draft_pb2.DraftGrowth()
    rows = [row for part in grown.values() for row in part.rows]
    for session_id, part in grown.items():
        message.session_ids.append(session_id)
        message.epochs.append(part.epoch)
        message.as_of.append(part.as_of)
        message.node_counts.append(len(part.rows))
        message.complete.append(part.complete)
    message.node_ids.extend(row[0] for row in rows)
    message.parents.extend(row[1] for row in rows)
    message.tokens.extend(row[2] for row in rows)
    message.acceptance = floats_to_bytes([row[3] for row in rows])
    return message
