"""The draft service over gRPC: commands in, growth and errors out, and streams that end or are not read."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.draft_worker.table_model import Bench

from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.loop import GrowthLoop
from outrider.draft_worker.rounds.session import SessionStart
from outrider.draft_worker.service import SERVICE, DraftStream, growth_message
from outrider.drafting.draft_distribution import unpack_distributions
from outrider.drafting.growth_source import GrowthSource
from outrider.front.calls import Calls
from outrider.front.handle import Front
from outrider.front.inbox import Inbox
from outrider.rpc import open_channel
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.security.roles import Role
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.wire import floats_from_bytes, split_by_counts, uints_from_bytes, uints_to_bytes

ASYNC, SYNC, OFF = (getattr(common_pb2, f"SPECULATION_MODE_{name}") for name in ("ASYNC", "SYNC", "OFF"))


def nodes_of(message: draft_pb2.DraftGrowth) -> tuple[list[int], list[int], list[int]]:
    """Ids, parents and tokens."""
    ids, parents, tokens = map(uints_from_bytes, (message.node_ids, message.parents, message.tokens))
    return ids.tolist(), parents.tolist(), tokens.tolist()


class Worker:
    """A draft worker on loopback, with what the tests look into."""

    def __init__(self, drafters: Drafters, loop: GrowthLoop, front: Front) -> None:
        self.drafters, self.loop, self.front = drafters, loop, front

    @asynccontextmanager
    async def stream(self, *, unread_bytes: int | None = None) -> "AsyncIterator[Stream]":
        async with open_channel(self.front.address, unread_bytes=unread_bytes) as channel:
            yield Stream(draft_pb2_grpc.DraftServiceStub(channel).Speculate())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.002)

    @property
    def is_empty(self) -> bool:
        return (self.drafters.num_sessions, self.drafters.slots[0]) == (0, 0)


class Stream:
    """A coordinator's end: sends commands and mirrors the trees, as the protocol says it may."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.messages: list[draft_pb2.DraftGrowth] = []
        self.nodes: dict[int, dict[int, tuple[int, int]]] = {}
        self.growths: list[tuple[int, int, int, int, bool]] = []
        # What was sent again, by session: epoch, committed length and nodes of each time.
        self.again: dict[int, list[tuple[int, int, dict[int, tuple[int, int]]]]] = {}
        self.errors: list[common_pb2.SessionError] = []

    async def send(self, **fields: Any) -> None:
        await self.call.write(draft_pb2.DraftCommands(incarnation=2**63 + 1, **fields))

    async def commit(self, session_id: int, epoch: int, position: int, tokens: list[int]) -> None:
        batch = draft_pb2.CommitBatch(
            session_ids=[session_id], epochs=[epoch], positions=[position], token_counts=[len(tokens)], tokens=tokens
        )
        await self.send(commits=batch)

    async def take(self) -> draft_pb2.DraftGrowth:
        async with asyncio.timeout(30):
            message = await self.call.read()
        assert message, "the stream has ended"
        self.messages.append(message)
        self.errors += message.errors
        acceptance = floats_from_bytes(message.acceptance)
        ids, parents, tokens = nodes_of(message)
        assert len(acceptance) == len(ids)
        assert ((acceptance > 0) & (acceptance <= 1)).all()
        spans = list(split_by_counts(message.node_counts))
        nowhere = [False] * len(spans)
        assert len(message.again or nowhere) == len(message.forgot or nowhere) == len(spans)
        columns = (
            message.session_ids,
            message.epochs,
            message.as_of,
            spans,
            message.complete,
            message.again or nowhere,
        )
        for session_id, epoch, as_of, span, complete, is_again in zip(*columns, strict=True):
            nodes = zip(ids[span], parents[span], tokens[span], strict=True)
            if is_again:
                sent = {node_id: (parent, token) for node_id, parent, token in nodes}
                self.again.setdefault(session_id, []).append((epoch, as_of, sent))
                continue
            known = self.nodes.setdefault(session_id, {})
            for node_id, parent, token in nodes:
                assert node_id > 0
                assert node_id not in known
                assert parent == 0 or parent in known
                known[node_id] = (parent, token)
            self.growths.append((session_id, epoch, as_of, span.stop - span.start, complete))
        return message

    async def take_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.take()


def opening(session_id: int = 1, *, epoch: int = 1, prompt: Any = (1, 2, 3), **limits: int) -> common_pb2.SessionOpen:
    bounds = {"mode": ASYNC, "max_live_nodes": 20, "max_depth": 8, "max_nodes": 12} | limits
    return common_pb2.SessionOpen(
        session_id=session_id,
        epoch=epoch,
        prompt=prompt if isinstance(prompt, bytes) else uints_to_bytes(prompt),
        sampling=SamplingSpec(temperature=1.0, seed=2**64 - 1, max_new_tokens=60).to_proto(),
        limits=common_pb2.SpeculationLimits(**bounds),  # pyright: ignore[reportArgumentType]
    )


@asynccontextmanager
async def serving(drafters: Drafters) -> AsyncIterator[Worker]:
    front = Front(SERVICE, role=Role.DRAFT, address="127.0.0.1:0", most_waiting=1)
    calls = Calls(front.data, SERVICE, {"Speculate": DraftStream})
    with closing(front), closing(Inbox(front.data, calls.commands)) as inbox:
        await front.listen()
        loop = GrowthLoop(lambda: drafters, inbox)
        loop.start()
        await asyncio.wrap_future(loop.ready)
        await front.start()
        yield Worker(drafters, loop, front)
        await front.stop(drain=nothing)
        loop.stop()
        await asyncio.wrap_future(loop.stopped)


async def nothing() -> None:
    pass


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with serving(Drafters(Bench().drafter, None)) as served:
        yield served


async def test_growth_commits_and_close(worker: Worker):
    async with worker.stream() as stream:
        await stream.send(opens=[opening()])
        await stream.take_until(lambda: len(stream.nodes.get(1, {})) == 20)
        assert {(epoch, as_of) for _, epoch, as_of, _, _ in stream.growths} == {(1, 3)}
        report = stream.messages[0].report
        assert report.step_ns > 0 < report.forward_ns
        load = worker.loop.load()
        assert (load.sessions, load.slots_total) == (1, 600)
        assert load.slots_used >= 3
        assert load.steps >= len(stream.messages)
        assert 0 < load.busy <= 1
        (parent, token), *_ = stream.nodes[1].values()
        assert parent == 0
        await stream.commit(1, 1, 3, [token])
        await stream.take_until(lambda: stream.growths[-1][2] == 4)
        await stream.send(close_session_ids=[1], close_epochs=[1])
        await worker.until(lambda: worker.is_empty)


async def test_one_step_is_one_message_for_all_sessions_of_a_stream_alone(worker: Worker):
    async with worker.stream() as one, worker.stream() as other:
        await one.send(opens=[opening(1), opening(2)])
        await one.take_until(lambda: len(one.nodes.get(1, {})) == len(one.nodes.get(2, {})) == 20)
        assert [sorted(message.session_ids) for message in one.messages] == [[1, 2]] * len(one.messages)
        assert len(one.messages) > 1
        await other.send(opens=[opening(3)])
        await other.take_until(lambda: len(other.nodes.get(3, {})) == 20)
        assert set(other.nodes) == {3}
        assert set(one.nodes) == {1, 2}


@pytest.mark.parametrize("end", ["hang up", "cancel"])
async def test_the_streams_end_closes_its_sessions(worker: Worker, end: str):
    async with worker.stream() as one, worker.stream() as other:
        await one.send(opens=[opening(1), opening(2)])
        await other.send(opens=[opening(3)])
        await one.take_until(lambda: len(one.nodes) == 2)
        await other.take_until(lambda: len(other.nodes) == 1)
        if end == "cancel":
            one.call.cancel()
        else:
            await one.call.done_writing()
            while await one.call.read():
                pass
            assert await one.call.code() is grpc.StatusCode.OK
        await worker.until(lambda: worker.drafters.num_sessions == 1)
        await other.commit(3, 1, 3, [4])
        await other.take_until(lambda: other.growths[-1][2] == 4)
        other.call.cancel()
        await worker.until(lambda: worker.is_empty)


async def test_a_newer_epoch_takes_the_session_over_and_the_ghost_is_refused(worker: Worker):
    async with worker.stream() as ghost, worker.stream() as current:
        await ghost.send(opens=[opening(1, epoch=1)])
        await ghost.take_until(lambda: len(ghost.nodes.get(1, {})) == 20)
        await current.send(opens=[opening(1, epoch=2, prompt=[7, 8])])
        await current.take_until(lambda: len(current.nodes.get(1, {})) == 20)
        assert {growth[:3] for growth in current.growths} == {(1, 2, 2)}
        await ghost.commit(1, 1, 3, [4])
        await ghost.send(opens=[opening(1, epoch=1)], close_session_ids=[1], close_epochs=[1])
        await ghost.take_until(lambda: len(ghost.errors) == 2)
        assert [(error.session_id, error.epoch, error.code) for error in ghost.errors] == [(1, 1, 10)] * 2
        ghost.call.cancel()
        await current.commit(1, 2, 2, [9, 9])
        await current.take_until(lambda: current.growths[-1][2] == 4)
        assert not current.errors


async def test_a_live_tree_is_sent_again(worker: Worker):
    async with worker.stream() as stream:
        await stream.send(opens=[opening(1, epoch=2), opening(2)])
        await stream.take_until(lambda: len(stream.nodes.get(1, {})) == len(stream.nodes.get(2, {})) == 20)
        # An unknown session, other epochs; then several in a row.
        for session_id, epoch in ((3, 1), (1, 1), (1, 3)):
            await stream.send(resend_session_ids=[session_id], resend_epochs=[epoch])
        await stream.send(resend_session_ids=[1, 2, 1], resend_epochs=[2, 1, 2])
        await stream.take_until(lambda: {n: len(times) for n, times in stream.again.items()} == {1: 2, 2: 1})
        assert stream.again == {1: [(2, 3, stream.nodes[1])] * 2, 2: [(1, 3, stream.nodes[2])]}
        assert not stream.errors
        assert all(
            not message.forgot and not message.HasField("report") for message in stream.messages if message.again
        )


async def test_a_message_commits_before_it_has_trees_sent_again_and_growth_goes_on_below_them(worker: Worker):
    async with worker.stream() as stream:
        await stream.send(opens=[opening(1)])
        await stream.take_until(lambda: len(stream.nodes.get(1, {})) == 20)
        nodes = stream.nodes[1]
        root = next(node_id for node_id, (parent, _) in nodes.items() if any(p == node_id for p, _ in nodes.values()))
        assert nodes[root][0] == 0
        commits = draft_pb2.CommitBatch(
            session_ids=[1], epochs=[1], positions=[3], token_counts=[1], tokens=[nodes[root][1]]
        )
        await stream.send(commits=commits, resend_session_ids=[1], resend_epochs=[1])
        await stream.take_until(lambda: bool(stream.growths) and stream.growths[-1][2] == 4)
        ((epoch, as_of, tree),) = stream.again[1]
        assert (epoch, as_of) == (1, 4)
        names, alive = {root: 0}, dict[int, tuple[int, int]]()
        for node_id, (parent, token) in nodes.items():
            if parent in names and node_id <= max(tree):
                names[node_id] = node_id
                alive[node_id] = names[parent], token
        assert list(tree.items()) == list(alive.items())
        later = [message for message in stream.messages if list(message.as_of) == [4] and not message.again]
        known = {0, *tree}
        for message in later:
            ids, parents, _ = nodes_of(message)
            known.update(ids)
            assert known >= set(parents)


async def test_a_sync_rounds_tree_is_sent_again_and_rounds_say_that_the_last_tree_is_gone(worker: Worker):
    async with worker.stream() as stream:
        await stream.send(opens=[opening(1, mode=SYNC)])
        await stream.take()
        await stream.send(resend_session_ids=[1], resend_epochs=[1])
        message = await stream.take()
        assert (list(message.again), list(message.complete), list(message.forgot)) == ([True], [True], [])
        assert stream.again[1] == [(1, 3, stream.nodes[1])]
        await stream.commit(1, 1, 3, [5])
        message = await stream.take()
        assert (list(message.again), list(message.complete), list(message.forgot)) == ([], [True], [True])


async def test_faults_of_one_session_leave_the_stream_and_the_others_alone(worker: Worker):
    async with worker.stream() as stream:
        faulty = [
            opening(2, prompt=b"abc"),
            opening(3, prompt=[]),
            opening(4, prompt=[24]),
            opening(5, mode=OFF),
            opening(6, prompt=[1] * 201),
        ]
        await stream.send(opens=[*faulty, opening(1)])
        await stream.commit(7, 1, 3, [4])
        await stream.take_until(lambda: len(stream.errors) == 6 and 1 in stream.nodes)
        codes = {error.session_id: error.code for error in stream.errors}
        assert codes == {2: 3, 3: 3, 4: 3, 5: 3, 6: 3, 7: 10}
        assert all(error.message for error in stream.errors)
        await stream.commit(1, 1, 5, [4])  # leaves a hole: the session is closed
        await stream.take_until(lambda: len(stream.errors) == 7)
        assert (stream.errors[-1].session_id, stream.errors[-1].code) == (1, 9)
        await stream.send(opens=[opening(8)])
        await stream.take_until(lambda: 8 in stream.nodes)
        assert worker.drafters.num_sessions == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"commits": draft_pb2.CommitBatch(session_ids=[1], epochs=[1], positions=[3], token_counts=[2], tokens=[4])},
        {"commits": draft_pb2.CommitBatch(session_ids=[1], epochs=[1], token_counts=[1], tokens=[4])},
        {"close_session_ids": [1, 2], "close_epochs": [1]},
        {"resend_session_ids": [1], "resend_epochs": []},
    ],
)
async def test_columns_that_do_not_fit_end_the_stream(worker: Worker, fields: dict[str, Any]):
    async with worker.stream() as stream:
        await stream.send(opens=[opening(1)])
        await stream.take()
        await stream.send(**fields)
        with pytest.raises(grpc.aio.AioRpcError, match="entries given") as caught:
            while True:
                await stream.take()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await worker.until(lambda: worker.is_empty)


async def test_what_cannot_be_used_is_refused_although_nothing_follows_it(worker: Worker):
    async with worker.stream() as stream:
        await stream.send(close_session_ids=[1, 2], close_epochs=[1])
        await stream.call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="entries given"):
            await stream.take()


async def test_unset_limits_are_the_workers_own(worker: Worker):
    async with worker.stream() as stream:
        await stream.send(opens=[opening(1, mode=0, max_live_nodes=0, max_depth=0, max_nodes=0)])
        await stream.take_until(lambda: len(stream.nodes.get(1, {})) > 50)


class Opened(Drafters):
    """Knows which epochs were opened."""

    def __init__(self) -> None:
        super().__init__(Bench().drafter, None)
        self.epochs: list[int] = []

    def open(self, start: SessionStart) -> None:
        super().open(start)
        self.epochs.append(start.epoch)


async def test_a_session_rests_while_its_growth_is_not_read():
    drafters = Opened()
    async with serving(drafters) as worker, worker.stream(unread_bytes=1) as stream:
        epochs = itertools.count(1)

        async def open_anew() -> int:
            await stream.send(opens=[opening(epoch=(epoch := next(epochs)))])
            await worker.until(lambda: epoch in drafters.epochs)
            return epoch

        # Whoever opens a session anew has its tree grown anew, and would so every time.
        while not worker.loop.holds:
            await open_anew()
        await open_anew()
        steps = drafters.steps
        last = [await open_anew() for _ in range(20)][-1]
        assert drafters.steps == steps
        await stream.commit(1, last, 3, [9])
        async with asyncio.timeout(30):
            while (message := await stream.call.read()).epochs != [last] or message.as_of != [4]:
                pass


def test_a_message_says_what_is_not_the_models_and_has_no_time_of_steps_then():
    growth = Growth(GrowthSource.NGRAM, step_ns=7)
    growth.owners, growth.session_ids, growth.epochs, growth.as_of = [None] * 2, [1, 2], [5, 6], [3, 4]
    growth.complete, growth.counts = [False, True], [2, 0]
    growth.node_ids, growth.parents, growth.tokens, growth.acceptance = [1, 3], [0, 1], [8, 9], [0.5, 0.25]
    message = growth_message(growth)
    assert message.source == GrowthSource.NGRAM
    assert not message.HasField("report")
    assert (list(message.as_of), list(message.node_counts), list(message.complete)) == ([3, 4], [2, 0], [False, True])


def test_a_message_carries_every_nodes_distribution():
    bench = Bench(rejection_top_k=3)
    rejection = SamplingSpec(temperature=1.0, verification=VerificationRule.REJECTION, max_new_tokens=50)
    bench.open(1, sampling=rejection)
    bench.open(2)
    growth = bench.step()
    assert growth is not None
    message = growth_message(growth)
    assert (message.report.steps, message.source) == (1, GrowthSource.MODEL)
    _, _, tokens = nodes_of(message)
    found = unpack_distributions(message.distributions, len(tokens))
    counts = dict(zip(message.session_ids, message.node_counts, strict=True))
    assert counts == {1: 1, 2: 4}
    with_q = [q for q in found if q is not None]
    assert len(with_q) == 1
    assert with_q[0].fault(tokens[found.index(with_q[0])], 24) is None
