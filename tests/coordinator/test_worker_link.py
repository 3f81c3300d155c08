"""A link to a worker: a message is written at once where nothing is being written, and always in its order."""

import asyncio
import gc

import grpc.aio
import pytest

from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.trees import Submissions, Trees
from outrider.errors import WorkerUnavailable
from outrider.v1 import draft_pb2, draft_pb2_grpc


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
    def __init__(self, gate: Gate) -> None:
        self.lost: list[str] = []
        self._gate = gate
        super().__init__("127.0.0.1:1", incarnation=1, on_lost=self.lost.append)

    def _start(self, call) -> None:
        call.cancel()
        super()._start(self._gate)  # pyright: ignore[reportArgumentType]


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
