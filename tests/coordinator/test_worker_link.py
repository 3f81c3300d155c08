"""A link to a worker: a message is written at once where nothing is being written, and always in its order."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import grpc.aio
import numpy as np
import pytest

from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.trees import Submissions, Trees
from outrider.errors import WorkerUnavailable
from outrider.succession import Addition, Succession
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2
from outrider.wire import floats_to_bytes


class Gate:
    """A stream whose writes wait until it is open, or fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.written: list[int] = []
        self.opened = asyncio.Event()
        self.begun = 0
        self._error = error

    async def __aiter__(self):
        await asyncio.Event().wait()
        yield

    async def write(self, request) -> None:
        self.begun += 1
        if self._error is not None:
            raise self._error
        await self.opened.wait()
        self.written.append(request.step or -request.close_session_ids[0])

    def cancel(self) -> None:
        pass


class GatedLink(TargetLink):
    def __init__(self, gate: Any) -> None:
        self.lost: list[str] = []
        self._gate = gate
        super().__init__("127.0.0.1:1", incarnation=1, on_lost=self.lost.append)

    def _start(self, call) -> None:
        call.cancel()
        super()._start(self._gate)


def one_tree() -> Submissions:
    return Submissions(session_ids=[1], epochs=[1], lengths=[2], trees=Trees.empty(1), resident=())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_messages_keep_their_order_whoever_writes_them():
    gate = Gate()
    link = GatedLink(gate)
    await settle()
    link.submit(one_tree())
    # In this very turn.
    assert gate.begun == 1
    link.close_session(7, 1)
    link.submit(one_tree())
    await settle()
    link.close_session(8, 1)
    link.submit(one_tree())
    await settle()
    assert gate.begun == 1
    gate.opened.set()
    await settle()
    link.submit(one_tree())
    await settle()
    assert gate.written == [1, -7, 2, -8, 3, 4]
    await link.close()


@pytest.mark.parametrize("error", [asyncio.InvalidStateError("it is over"), ValueError("not a message")], ids=type)
async def test_an_error_that_comes_at_once_loses_the_link(error):
    link = GatedLink(Gate(error))
    await settle()
    answer = link.submit(one_tree())
    with pytest.raises(WorkerUnavailable, match=str(error)):
        await answer
    assert len(link.lost) == 1
    await link.close()


async def test_a_link_is_closed_while_it_writes(caplog):
    link = GatedLink(Gate())
    await settle()
    answer = link.submit(one_tree())
    await link.close()
    with pytest.raises(WorkerUnavailable, match="closed"):
        await answer
    del link
    gc.collect()
    assert not caplog.records


class Recorded:
    """A stream that keeps what is written, and reads what the test has it read."""

    def __init__(self) -> None:
        self.written: list[target_pb2.VerifyRequest] = []
        self.answers: asyncio.Queue[target_pb2.VerifyResponse] = asyncio.Queue()

    async def __aiter__(self):
        while True:
            yield await self.answers.get()

    async def write(self, request: target_pb2.VerifyRequest) -> None:
        self.written.append(request)

    def cancel(self) -> None:
        pass


@pytest.fixture
async def recorded():
    link = GatedLink(Recorded())
    await settle()
    yield link
    await link.close()


def one_successor(nodes: int) -> Any:
    """Of sessions 1 and 2, of which the first has so many nodes."""
    numbers, twice = np.arange(nodes), np.array([8, 8])
    sent = Succession(
        is_in_step=np.array([True, True]),
        verified=np.zeros(2, dtype=np.int64),
        counts=np.array([nodes, 0]),
        tokens=numbers + 5,
        parents=numbers,
        values=np.ones(nodes, dtype=np.float32),
        least_value=0.0,
        max_nodes=twice,
        max_depths=twice,
        max_total_nodes=16,
    )
    return SimpleNamespace(group=SimpleNamespace(ids=[1, 2]), epochs=[1, 1], lengths=[2, 2], succession=sent)


def one_addition(*counts: int) -> Addition:
    nodes = sum(counts)
    values = np.full(nodes, 0.5, dtype=np.float32)
    return Addition(np.array(counts), np.arange(nodes) + 7, np.arange(nodes) + 1, values)


def answer(step: int, *, verified: tuple[int, ...] = (), additions: int = 0) -> target_pb2.VerifyResponse:
    """A token for each of two sessions."""
    return target_pb2.VerifyResponse(
        step=step,
        session_ids=[1, 2],
        epochs=[1, 1],
        outcomes=[target_pb2.OUTCOME_ACCEPTED] * 2,
        accepted_counts=[0, 0],
        token_counts=[1, 1],
        tokens=[5, 5],
        cached_tokens=[0, 0],
        verified_counts=verified,
        additions=additions,
    )


def two_trees() -> Submissions:
    return Submissions(session_ids=[1, 2], epochs=[1, 1], lengths=[2, 2], trees=Trees.empty(2), resident=())


async def test_what_is_added_is_said_of_the_batch_before_it(recorded):
    recorded.submit(two_trees())
    recorded.follow(one_successor(2))
    recorded.extend(one_addition(1, 2))
    recorded.extend(one_addition(0, 1))
    await settle()
    first, second, *more = recorded._gate.written
    assert [first.step, second.step, second.trees.follows] == [1, 2, 1]
    assert more == [
        target_pb2.VerifyRequest(
            incarnation=1,
            addition=target_pb2.TreeAddition(
                step=2, node_counts=[1, 2], tokens=[7, 8, 9], parents=[1, 2, 3], values=floats_to_bytes([0.5] * 3)
            ),
        ),
        target_pb2.VerifyRequest(
            incarnation=1,
            addition=target_pb2.TreeAddition(
                step=2, node_counts=[0, 1], tokens=[7], parents=[1], values=floats_to_bytes([0.5])
            ),
        ),
    ]


@pytest.mark.parametrize(("additions", "verified"), [(0, (2, 0)), (1, (3, 2)), (2, (3, 3))])
async def test_answers_may_tell_of_as_many_additions_and_nodes_as_were_sent(recorded, additions, verified):
    one, two = recorded.submit(two_trees()), recorded.follow(one_successor(2))
    recorded.extend(one_addition(1, 2))
    recorded.extend(one_addition(0, 1))
    recorded._gate.answers.put_nowait(answer(1, additions=additions))
    recorded._gate.answers.put_nowait(answer(2, verified=verified))
    async with asyncio.timeout(10):
        assert (await one).additions == additions
        assert (await two).verified == dict(zip((1, 2), verified, strict=True))
    assert not recorded.lost


@pytest.mark.parametrize("follower", ["none", "without any", "with one"])
async def test_a_target_that_tells_of_more_additions_than_were_sent_is_lost(recorded, follower):
    one, sent = recorded.submit(two_trees()), 0
    if follower != "none":
        recorded.follow(one_successor(2))
    if follower == "with one":
        recorded.extend(one_addition(1, 0))
        sent = 1
    recorded._gate.answers.put_nowait(answer(1, additions=sent + 1))
    async with asyncio.timeout(10):
        with pytest.raises(WorkerUnavailable, match=f"additions: {sent + 1} given, {sent} were sent"):
            await one
    assert len(recorded.lost) == 1
    # Growth may come before anybody has heard of it.
    recorded.extend(one_addition(1, 0))


async def test_a_target_that_verifies_more_nodes_than_were_sent_is_lost(recorded):
    recorded.submit(two_trees())
    two = recorded.follow(one_successor(2))
    recorded.extend(one_addition(1, 0))
    recorded._gate.answers.put_nowait(answer(1, additions=1))
    recorded._gate.answers.put_nowait(answer(2, verified=(4, 0)))
    async with asyncio.timeout(10):
        with pytest.raises(WorkerUnavailable, match="verified"):
            await two


class EagerDraft(draft_pb2_grpc.DraftServiceServicer):
    """Says what a step of many sessions has grown, as often as it may."""

    def __init__(self) -> None:
        self.written = 0

    async def Speculate(self, request_iterator, context):  # noqa: N802 - the name is the protocol's
        step = draft_pb2.DraftGrowth(acceptance=bytes(3000))
        while True:
            await context.write(step)
            self.written += 1


class BusyLink(DraftLink):
    async def _read(self) -> None:
        await asyncio.Event().wait()


async def test_a_draft_cannot_be_far_ahead_of_a_coordinator_that_does_not_read():
    draft, server = EagerDraft(), grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ignored = dict.fromkeys(("on_growth", "on_error", "on_lost"), lambda *_: None)
    link = BusyLink(f"127.0.0.1:{port}", incarnation=1, vocab_size=9, **ignored)
    try:
        written, unchanged = 0, 0
        # What it could write it has written soon, and far more than that without a bound.
        while unchanged < 20 and written < 100:
            await asyncio.sleep(0.02)
            unchanged = unchanged + 1 if written == draft.written > 0 else 0
            written = draft.written
        assert written < 40
    finally:
        await link.close()
        await server.stop(None)
