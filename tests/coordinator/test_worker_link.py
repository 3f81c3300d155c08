"""A link to a worker: a message is written at once where nothing is being written, and always in its order."""

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import numpy as np
import pytest
from tests.coordinator.running import service_running
from tests.coordinator.streams import LinkToStream, Stream, settle
from tests.polling import until

from outrider.coordinator.sessions.messages import FaultKind, Outcome, RoundResults, SessionFault
from outrider.coordinator.workers.links import DraftLink
from outrider.coordinator.workers.target_peer import WITHOUT_BOUND
from outrider.drafting.draft_distribution import DraftDistribution, pack_distributions, unpack_distributions
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from outrider.wire import floats_from_bytes, floats_to_bytes, uints_from_bytes, uints_to_bytes

TAKEN, RESENT = target_pb2.PLACE_CHANGE_TAKEN, target_pb2.PLACE_CHANGE_RESENT
PLACES = {TAKEN: "place", RESENT: "resent"}


class Gate(Stream):
    """A stream whose writes wait until it is open, or fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.begun = 0
        self._error = error

    async def write(self, commands: target_pb2.RoundCommands) -> None:
        self.begun += 1
        if self._error is not None:
            raise self._error
        await self.opened.wait()
        await super().write(commands)


def opening(session_id: int, epoch: int = 1) -> common_pb2.SessionOpen:
    return common_pb2.SessionOpen(session_id=session_id, epoch=epoch)


def growth(session_id: int, as_of: int = 2) -> target_pb2.RelayedGrowth:
    return target_pb2.RelayedGrowth(
        session_ids=[session_id], epochs=[1], places=[0], as_of=[as_of], node_counts=[1], node_ids=uints_to_bytes([1]),
        parents=uints_to_bytes([0]), tokens=uints_to_bytes([5]), acceptance=floats_to_bytes([0.5]),
    )  # fmt: skip


def parts(message: target_pb2.RoundCommands) -> list[str]:
    """In words, in the order in which they take effect."""
    changes, bounds = message.places, message.bounds
    return [
        *(f"open {opening.session_id}.{opening.epoch}" for opening in message.opens),
        *(f"{PLACES[change]} {own}" for own, change in zip(changes.session_ids, changes.changes, strict=True)),
        *(f"grow {own}" for own in message.growth.session_ids),
        *(f"bound {own}" for own in bounds.session_ids),
        *(f"close {own}.{epoch}" for own, epoch in zip(message.close_session_ids, message.close_epochs, strict=True)),
    ]


def effects(messages: Sequence[target_pb2.RoundCommands]) -> list[str]:
    """Return the effects of all messages at a target, in order."""
    return [part for message in messages for part in parts(message)]


async def test_messages_keep_their_order_whoever_writes_them():
    gate = Gate()
    link = LinkToStream(gate)
    await settle()
    link.grow(growth(1))
    # In this very turn.
    assert gate.begun == 1
    link.close_session(7, 1)
    link.grow(growth(2))
    await settle()
    link.close_session(8, 1)
    link.grow(growth(3))
    await settle()
    assert gate.begun == 1
    gate.opened.set()
    await settle()
    link.grow(growth(4))
    await settle()
    assert effects(gate.written) == ["grow 1", "close 7.1", "grow 2", "close 8.1", "grow 3", "grow 4"]
    assert {message.incarnation for message in gate.written} == {1}
    await link.close()


@pytest.mark.parametrize("error", [asyncio.InvalidStateError("it is over"), ValueError("not a message")], ids=type)
async def test_an_error_that_comes_at_once_loses_the_link(error):
    link = LinkToStream(Gate(error))
    await settle()
    link.grow(growth(1))
    await settle()
    (reason,) = link.lost
    assert str(error) in reason
    await link.close()


async def test_a_link_is_closed_while_it_writes(caplog):
    link = LinkToStream(Gate())
    await settle()
    link.grow(growth(1))
    await link.close()
    assert not link.lost
    del link
    gc.collect()
    assert not caplog.records


# -------------------------------------------------------------------------------------------- order within a message

ORDERS = {
    "what the order of fields allows is one message": (
        ["open 1.1", "place 1", "grow 1", "bound 1", "close 1.1"],
        [["open 1.1", "place 1", "grow 1", "bound 1", "close 1.1"]],
    ),
    "many of a kind are one message": (
        ["open 1.1", "open 2.1", "place 1", "place 2", "place 1", "close 8.1", "close 9.1"],
        [["open 1.1", "open 2.1", "place 1", "place 2", "place 1", "close 8.1", "close 9.1"]],
    ),
    "a place that is taken does not overtake growth of who had it": (["grow 1", "place 1"], [["grow 1"], ["place 1"]]),
    "nor does growth overtake the place that it is of": (["place 1", "grow 1"], [["place 1", "grow 1"]]),
    "growth that waits is one message": (["grow 1", "grow 2", "grow 1"], [["grow 1", "grow 2", "grow 1"]]),
    "a tree that comes again is announced before it": (
        ["grow 1", "resent 1", "grow 1"],
        [["grow 1"], ["resent 1", "grow 1"]],
    ),
    "a session is opened anew behind its close": (["close 1.1", "open 1.2"], [["close 1.1"], ["open 1.2"]]),
    "and it is not closed by growth's sake before that": (["grow 1", "close 1.1"], [["grow 1", "close 1.1"]]),
    "a bound is of the session that is open": (
        ["bound 1", "open 1.2", "bound 1"],
        [["bound 1"], ["open 1.2", "bound 1"]],
    ),
    "growth is not held back by bounds, nor put before them": (["bound 1", "grow 1"], [["bound 1"], ["grow 1"]]),
    "a place is not changed in a session that was closed first": (
        ["close 1.1", "place 2"],
        [["close 1.1"], ["place 2"]],
    ),
}


@pytest.mark.parametrize(("told", "expected"), ORDERS.values(), ids=ORDERS)
async def test_parts_of_a_message_take_effect_in_the_order_in_which_they_were_told(told, expected):
    gate = Gate()
    link = LinkToStream(gate)
    await settle()
    # Something is being written: what comes is gathered.
    link.grow(growth(99))
    for part in told:
        what, _, name = part.partition(" ")
        session_id, _, epoch = name.partition(".")
        match what:
            case "open":
                link.open_session(opening(int(session_id), int(epoch)))
            case "place" | "resent":
                link.change_place(int(session_id), 1, 0, TAKEN if what == "place" else RESENT)
            case "grow":
                link.grow(growth(int(session_id)))
            case "bound":
                link.bound(int(session_id), 1, WITHOUT_BOUND, alone=False)
            case "close":
                link.close_session(int(session_id), int(epoch))
    gate.opened.set()
    await settle()
    assert list(map(parts, gate.written[1:])) == expected
    await link.close()


def columns(growths: Sequence[target_pb2.RelayedGrowth]) -> dict[str, list[Any]]:
    """Columns of growth, one behind the other; what is left out where it says nothing is filled in."""
    found: dict[str, list[Any]] = {
        name: [value for growth in growths for value in getattr(growth, name)]
        for name in ("session_ids", "epochs", "places", "as_of", "node_counts")
    }
    for name in ("node_ids", "parents", "tokens"):
        found[name] = [value for growth in growths for value in uints_from_bytes(getattr(growth, name)).tolist()]
    found["acceptance"] = [value for growth in growths for value in floats_from_bytes(growth.acceptance).tolist()]
    found |= {"complete": [], "sources": [], "distributions": []}
    for growth in growths:
        nodes = sum(growth.node_counts)
        found["complete"] += growth.complete or [False] * len(growth.session_ids)
        found["sources"] += growth.sources or [common_pb2.GROWTH_SOURCE_MODEL] * nodes
        drawn = unpack_distributions(growth.distributions, nodes)
        found["distributions"] += [None if one is None else (*one.token_ids, *one.weights) for one in drawn]
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_growth_that_is_joined_says_what_its_parts_said(seed):
    rng = random.Random(seed)
    gate = Gate()
    link = LinkToStream(gate)
    await settle()
    link.grow(growth(99))
    told = [grown_at_random(rng) for _ in range(rng.randint(2, 4))]
    before = columns(told)
    for part in told:
        link.grow(part)
    gate.opened.set()
    await settle()
    (joined,) = gate.written[1:]
    assert columns([joined.growth]) == before
    await link.close()


def grown_at_random(rng: random.Random) -> target_pb2.RelayedGrowth:
    """Growth of some sessions, with some of the columns that may be empty."""
    sessions = rng.randint(1, 3)
    counts = [rng.randint(0, 2) for _ in range(sessions)]
    nodes = range(sum(counts))
    weights = [[1 << 23, 1 << 23], [1 << 24]]
    drawn = [
        DraftDistribution(np.arange(len(own), dtype=np.uint32), np.array(own, np.uint32))
        if rng.random() < 0.7
        else None
        for own in (rng.choice(weights) for _ in nodes)
    ]
    return target_pb2.RelayedGrowth(
        session_ids=[rng.randint(1, 9) for _ in counts],
        epochs=[rng.randint(1, 3) for _ in counts],
        places=[rng.randint(0, 3) for _ in counts],
        as_of=[rng.randint(1, 99) for _ in counts],
        node_counts=counts,
        node_ids=uints_to_bytes([rng.randint(1, 999) for _ in nodes]),
        parents=uints_to_bytes([rng.randint(0, 999) for _ in nodes]),
        tokens=uints_to_bytes([rng.randint(0, 255) for _ in nodes]),
        acceptance=floats_to_bytes([rng.random() for _ in nodes]),
        sources=[common_pb2.GROWTH_SOURCE_NGRAM for _ in nodes] if rng.random() < 0.5 else (),
        complete=[rng.random() < 0.5 for _ in counts] if rng.random() < 0.5 else (),
        distributions=pack_distributions(drawn) if rng.random() < 0.5 else None,
    )


# ------------------------------------------------------------------------------------------------------ what is read


async def results_of(message: target_pb2.RoundResults) -> tuple[list[RoundResults], list[str]]:
    """Return the results that a link reads from a message, and the reasons for which it is lost."""
    got: list[RoundResults] = []
    link = LinkToStream(Stream(), on_results=got.append)
    link.stream.results.put_nowait(message)
    await settle()
    await link.close()
    return got, link.lost


async def test_a_rounds_results_are_told_by_session():
    message = target_pb2.RoundResults(
        session_ids=[7, 9, 11],
        epochs=[1, 2, 1],
        token_counts=[3, 0, 1],
        tokens=[5, 6, 7, 8],
        accepted_counts=[2, 0, 0],
        selected_counts=[3, 0, 4],
        accepted_sources=[2, 6],
        finishes=[target_pb2.FINISH_UNSPECIFIED] * 2 + [target_pb2.FINISH_STOP],
        cached_tokens=[1, 0, 0],
        lost=[0, 5, 0],
        selected_by_source=[2, 2, 0, 0, 0, 0, 4, 0, 0],
        grown_by_source=[5, 0, 0, 0, 0, 0, 0, 0, 6],
        tree_ends=[target_pb2.TREE_END_MISSED, target_pb2.TREE_END_UNSPECIFIED, target_pb2.TREE_END_COVERED],
        logprobs=[
            target_pb2.Logprobs(
                row=2, token_logprobs=floats_to_bytes([-0.5]), top_count=2, top_token_ids=[8, 3],
                top_logprobs=floats_to_bytes([-0.5, -1.5]),
            )
        ],
        errors=[common_pb2.SessionError(session_id=12, epoch=3, code=8, message="full")],
        report=common_pb2.StepReport(step_ns=50, forward_ns=40, plain_ns=45),
    )  # fmt: skip
    ((results,), lost) = await results_of(message)
    assert not lost
    first, second, third = results.outcomes
    assert first == Outcome(
        7, 1, [5, 6, 7], accepted=2, selected=3, selected_by_source=(2, 2, 0), grown_by_source=(5, 0, 0),
        sources=[2, 6], cached_tokens=1, tree_end=target_pb2.TREE_END_MISSED,
    )  # fmt: skip
    assert second == Outcome(9, 2, [], selected_by_source=(0, 0, 0), sources=[], lost=5)
    assert (third.selected_by_source, third.grown_by_source) == ((4, 0, 0), (0, 0, 6))
    assert third.tree_end == target_pb2.TREE_END_COVERED
    assert third.logprobs is not None
    assert (third.token_ids, third.is_over, third.logprobs.top_token_ids) == ([8], True, [[8, 3]])
    assert (results.message, results.report, results.number) == (message, message.report, 1)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, FaultKind.NO_ROOM),
        (grpc.StatusCode.INVALID_ARGUMENT, FaultKind.REFUSED),
        (grpc.StatusCode.OUT_OF_RANGE, FaultKind.REFUSED),
        (grpc.StatusCode.ABORTED, FaultKind.REPLACED),
        (grpc.StatusCode.NOT_FOUND, FaultKind.LOST),
        (grpc.StatusCode.INTERNAL, FaultKind.LOST),
    ],
)
def test_a_sessions_error_says_what_it_calls_for(code, kind):
    error = common_pb2.SessionError(session_id=1, epoch=1, code=code.value[0], message="why")
    assert SessionFault.of(error) == (kind, "why")


async def test_a_target_that_says_what_no_target_does_is_lost():
    got, (reason,) = await results_of(target_pb2.RoundResults(session_ids=[1], epochs=[1]))
    assert not got
    assert "cannot be used: token_counts" in reason


# -------------------------------------------------------------------------------------------------------------- drafts


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


@contextlib.asynccontextmanager
async def draft_link(servicer: Any, *, kind: type[DraftLink] = DraftLink, **told: Any) -> AsyncIterator[DraftLink]:
    """A link to a draft of which only what is `told` is heard."""
    ignored: dict[str, Any] = dict.fromkeys(("on_growth", "on_fault", "on_lost"), lambda *_: None)
    async with service_running(draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer) as address:
        link = kind(address, incarnation=1, vocab_size=9, **ignored | told)
        try:
            yield link
        finally:
            await link.close()


async def test_a_session_that_takes_anothers_room_is_opened_after_it_is_closed():
    """Within a message a draft opens before it closes."""
    ignored = dict.fromkeys(("on_growth", "on_fault", "on_lost"), lambda *_: None)
    link = BusyLink("127.0.0.1:1", incarnation=1, vocab_size=9, **ignored)
    await settle()
    link.close_session(1, 1)
    link.open_session(opening(2))
    link.close_session(3, 1)
    messages = link._take_outgoing()
    assert [([own.session_id for own in message.opens], [*message.close_session_ids]) for message in messages] == [
        ([], [1]),
        ([2], [3]),
    ]
    await link.close()


class FullDraft(draft_pb2_grpc.DraftServiceServicer):
    """Has no room for a session, and refuses another."""

    async def Speculate(self, request_iterator, context):  # noqa: N802 - the name is the protocol's
        codes = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        errors = [
            common_pb2.SessionError(session_id=number, epoch=3, code=code.value[0], message="why")
            for number, code in enumerate(codes, start=1)
        ]
        await context.write(draft_pb2.DraftGrowth(errors=errors))
        await asyncio.Event().wait()


async def test_a_drafts_error_says_what_it_calls_for():
    faults = list[tuple[int, int, SessionFault]]()
    async with draft_link(FullDraft(), on_fault=lambda *fault: faults.append(fault)):
        await until(lambda: faults)
    assert faults == [
        (1, 3, SessionFault(kind=FaultKind.NO_ROOM, message="why")),
        (2, 3, SessionFault(kind=FaultKind.REFUSED, message="why")),
    ]


async def test_a_draft_cannot_be_far_ahead_of_a_coordinator_that_does_not_read():
    draft = EagerDraft()
    async with draft_link(draft, kind=BusyLink):
        written, unchanged = 0, 0
        # What it could write it has written soon, and far more than that without a bound.
        while unchanged < 20 and written < 100:
            await asyncio.sleep(0.02)
            unchanged = unchanged + 1 if written == draft.written > 0 else 0
            written = draft.written
        assert written < 40


class WaitingDraft(draft_pb2_grpc.DraftServiceServicer):
    """Says once that it is there, and then waits for the end of the stream."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    async def Speculate(self, request_iterator, context):  # noqa: N802 - the name is the protocol's
        try:
            await context.write(draft_pb2.DraftGrowth(session_ids=[]))
            await asyncio.Event().wait()
        finally:
            self.has_ended.set()


async def test_the_stream_ends_with_its_link_also_where_a_write_has_failed():
    draft, lost = WaitingDraft(), list[str]()
    async with draft_link(draft, on_lost=lost.append) as link:
        await link.ready(timeout_s=60)
        # What grpc.aio does where its core refuses a write: the call is done for Python, and goes on.
        link._call._cython_call.set_internal_error("refused")  # pyright: ignore[reportAttributeAccessIssue]
        link.open_session(opening(1))
        await until(lambda: lost)
        await link.close()
        await asyncio.wait_for(draft.has_ended.wait(), 60)
        await until(lambda: not any("_handle_status" in repr(task) for task in asyncio.all_tasks()))
