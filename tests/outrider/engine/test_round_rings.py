"""The rings between host and rounds: every schedule of a small size, and a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.outrider.engine.ring_schedules import Scenario, first_fault, greenlet

from outrider.engine.round_rings import Early, Inbox, Release, Report, RingMemory, Rounds
from outrider.kernels.pool.records import SLOTS_PER_RECORD, WORDS, RecordKind, Records
from outrider.kernels.pool.rings import publish_early, publish_report, take_records

_NEEDS_GREENLET = pytest.mark.skipif(greenlet is None, reason="needs greenlet")

OPEN, CLOSE, PREEMPT, LIMITS = RecordKind.OPEN, RecordKind.CLOSE, RecordKind.PREEMPT, RecordKind.LIMITS
GROWTH = RecordKind.GROWTH

REUSE = Scenario(messages=("open 1", "close 1", "open 2", "grow 1", "close 2"))
FULL = Scenario(messages=("open 1", "grow 1 7", "hold 1", "settle 1", "close 1"), most=4)
HOLD = Scenario(messages=("open 1", "hold 1", "resume 1", "settle 1", "close 1"), tokens=2)
TWO = Scenario(messages=("open 1", "open 2", "settle 1", "close 1", "close 2"), rows=2, ring=16, most=3)
EVERY = Scenario(messages=("open 1", "grow 1 6", "settle 1", "close 1"), most=3, every_access=True)


@_NEEDS_GREENLET
@pytest.mark.parametrize(
    "scenario", [REUSE, FULL, HOLD, TWO, EVERY], ids=["reuse", "full", "hold", "two", "every access"]
)
def test_no_schedule_leads_to_a_fault(scenario: Scenario) -> None:
    fault, followed = first_fault(scenario)
    if fault is not None:
        raise fault
    assert followed > 100


def _records(kind: RecordKind, session: tuple[int, int], *numbers: int) -> npt.NDArray[np.int32]:
    """A record for each number, which all its words but the first three hold."""
    return np.array([(kind, *session, *[number] * (WORDS - 3)) for number in numbers], np.int32)


class Device:
    """Rounds on a CPU: a round takes records, keeps them, and reports how many there were."""

    def __init__(self, memory: RingMemory, *, most: int) -> None:
        self._memory = memory
        self._records = torch.zeros(most, WORDS, dtype=torch.int32)
        self._count = torch.zeros(1, dtype=torch.int32)
        self._tail, self._rounds, self._began = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
        self.taken: list[list[int]] = []

    def run(self) -> None:
        take_records(self._memory.ring, self._memory.head, self._records, self._count, self._tail, self._began)
        count = int(self._count)
        self.taken += self._records[:count].tolist()
        publish_early(self._memory.early, torch.tensor([count]), self._rounds)
        publish_report(self._memory.reports, torch.tensor([count]), self._tail, self._rounds)


class Rig:
    """Inbox, rounds and a CPU."""

    def __init__(self, *, rows: int = 1, ring: int = 64, most: int = 64) -> None:
        memory = RingMemory.allocate(records=ring, early_words=1, report_words=1, pinned=False)
        self.inbox = Inbox(memory, rows=rows)
        self.rounds, self.device = Rounds(memory, self.inbox), Device(memory, most=most)

    def open(self) -> tuple[int, int]:
        session = self.inbox.take_row()
        assert session is not None
        self.inbox.put(_records(OPEN, session, 0))
        return session

    def run(self) -> Report:
        """Run a round, and read what it wrote."""
        assert self.rounds.may_launch(can_run=True)
        self.rounds.launched()
        self.device.run()
        early, report = self.rounds.poll(), self.rounds.poll()
        assert isinstance(early, Early) and isinstance(report, Report)
        assert self.rounds.poll() is None
        return report

    def take(self) -> list[tuple[int, int]]:
        """Run rounds until they have taken everything: (kind, number) of each record."""
        self.device.taken.clear()
        while self.inbox.has_records:
            self.run()
        return [(record[0], record[3]) for record in self.device.taken]


def test_records_come_as_they_were_built() -> None:
    rig, records = Rig(), Records()
    row, generation = rig.inbox.take_row() or (-1, -1)
    records.open(row, generation, length=5, cached=0, end=50, allow=9)
    records.slots(row, generation, start=0, slots=list(range(SLOTS_PER_RECORD + 2)))
    records.growth(row, generation, place=1, node_id=7, parent_id=0, as_of=5, token=3, acceptance=0.5)
    rig.inbox.put(records.array())
    assert rig.run().words.tolist() == [4]
    assert rig.device.taken == records.array().tolist()


def test_records_keep_their_order_where_the_ring_is_full() -> None:
    rig = Rig(rows=2, ring=128)
    first, second = rig.open(), rig.open()
    both = np.concatenate([_records(GROWTH, session, number) for number in range(9) for session in (first, second)])
    rig.inbox.put(_records(GROWTH, first, *range(500)))
    rig.inbox.put(both)
    assert rig.inbox.is_queued(first[0]) and rig.inbox.is_queued(second[0])
    rig.take()
    taken = [tuple(record[1:4]) for record in rig.device.taken if record[0] == GROWTH]
    sent = [(*first, number) for number in range(500)]
    assert taken == [*sent, *(tuple(record[1:4]) for record in both.tolist())]
    assert not rig.inbox.is_queued(first[0])


def test_urgent_records_find_room_and_overtake_growth() -> None:
    rig = Rig(rows=2, ring=16)
    first = rig.open()
    rig.inbox.put(_records(GROWTH, first, *range(30)))
    second = rig.open()
    for kind in (LIMITS, PREEMPT, CLOSE):
        rig.inbox.put(_records(kind, second, 1))
    rig.inbox.put(_records(LIMITS, first, 1))
    rig.run()
    kinds = [record[0] for record in rig.device.taken]
    assert kinds == [OPEN, *[GROWTH] * 7, OPEN, LIMITS, PREEMPT, CLOSE, LIMITS]


def test_a_row_is_handed_out_again_when_its_close_has_been_reported() -> None:
    rig = Rig(ring=8)
    session = rig.open()
    rig.inbox.put(_records(GROWTH, session, *range(9)))
    rig.inbox.put(_records(CLOSE, session, 1))
    # It is closed: without effect.
    rig.inbox.put(_records(CLOSE, session, 2))
    assert rig.inbox.take_row() is None
    assert rig.run().released == [Release(row=session[0], generation=session[1], closed=True)]
    assert [record[0] for record in rig.device.taken] == [OPEN, *[GROWTH] * 3, CLOSE]
    following = rig.open()
    assert following == (session[0], session[1] + 1)
    # What waited comes late, in the name of the session that was closed.
    assert rig.take() == [*((GROWTH, number) for number in range(3, 7)), (OPEN, 0), (GROWTH, 7), (GROWTH, 8)]
    assert {tuple(record[1:3]) for record in rig.device.taken if record[0] == GROWTH} == {session}


def test_a_row_that_was_never_opened_is_given_back() -> None:
    rig = Rig()
    session = rig.inbox.take_row()
    assert session is not None
    rig.inbox.put(_records(CLOSE, session, 0))
    assert rig.run().released == [Release(row=session[0], generation=session[1], closed=True)]
    assert rig.inbox.take_row() is not None


def test_a_row_is_preempted_once_at_a_time() -> None:
    rig = Rig(ring=8)
    session = rig.open()
    rig.inbox.put(_records(PREEMPT, session, 6))
    assert rig.run().released == [Release(row=session[0], generation=session[1], closed=False)]
    assert rig.inbox.take_row() is None, "only a close gives a row back"
    rig.inbox.put(_records(PREEMPT, session, 9))
    assert rig.take() == [(PREEMPT, 9)]


def test_the_newest_limits_stand() -> None:
    rig = Rig()
    session = rig.open()
    for number in range(1, 5):
        rig.inbox.put(_records(LIMITS, session, number))
    assert rig.take() == [(OPEN, 0), (LIMITS, 1), (LIMITS, 4)]
    rig.inbox.put(_records(LIMITS, session, 5))
    rig.inbox.put(_records(LIMITS, session, 6))
    rig.inbox.put(_records(CLOSE, session, 7))
    assert rig.take() == [(LIMITS, 5), (CLOSE, 7)]


def test_reports_are_copies() -> None:
    rig = Rig(most=2)
    session = rig.open()
    report = rig.run()
    rig.inbox.put(_records(GROWTH, session, *range(4)))
    later = [rig.run(), rig.run()]
    assert report.words.tolist() == [1]
    assert [(report.round, report.words.tolist()) for report in later] == [(1, [2]), (2, [2])]


def test_hosts_whose_stores_are_not_in_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="need an x86 host"):
        RingMemory.allocate(records=8, early_words=1, report_words=1, pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rounds_run_ahead_on_a_gpu_while_the_host_writes() -> None:
    device, total, most, words = torch.device("cuda"), 60_000, 64, 3000
    memory = RingMemory.allocate(records=256, early_words=2, report_words=words, pinned=True)
    inbox = Inbox(memory, rows=1)
    rounds = Rounds(memory, inbox)
    records = torch.zeros(most, WORDS, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    tail, done, began = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
    # What each place of the ring's order held when it was taken; the last row is for padding.
    log = torch.full((total + 1, WORDS), -1, dtype=torch.int32, device=device)
    # Stands for the forward pass, so that there is time to go ahead in.
    work = torch.zeros(2**24, device=device)
    place, lane = torch.arange(most, device=device), torch.arange(words, device=device)
    nowhere = torch.full((1,), total, device=device)

    def first_half() -> None:
        take_records(memory.ring, memory.head, records, count, tail, began)
        seen = torch.where(place < count, tail - count + place, nowhere)
        log.index_put_((seen,), records)
        publish_early(memory.early, torch.cat((count.long(), 7 * done)), done)
        work.sin_()

    def second_half() -> None:
        publish_report(memory.reports, torch.where(lane == 0, tail, 10_000 * done + lane), tail, done)

    # Compiles; and what it wrote is undone.
    first_half()
    second_half()
    torch.cuda.synchronize()
    for tensor in (tail, done, memory.early, memory.reports):
        tensor.zero_()
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for graph, half in zip(graphs, (first_half, second_half), strict=True):
        with torch.cuda.graph(graph):
            half()
    torch.cuda.synchronize()

    session = inbox.take_row()
    assert session is not None
    inbox.put(_records(OPEN, session, 0))
    written = 1
    expected = np.arange(words)
    most_under_way = launched = taken = 0
    while taken < total or launched < 5000 or rounds.under_way:
        if written < total:
            inbox.put(_records(GROWTH, session, *range(written, min(written + 40, total))))
            written += 40
        while (event := rounds.poll()) is not None:
            if isinstance(event, Early):
                assert 0 <= event.words[0] <= most
                assert event.words[1] == 7 * event.round
            else:
                taken = int(event.words[0])
                assert np.array_equal(event.words[1:], 10_000 * event.round + expected[1:])
        if rounds.may_launch(can_run=taken < total or launched < 5000):
            for graph in graphs:
                graph.replay()
            launched = rounds.launched() + 1
            most_under_way = max(most_under_way, rounds.under_way)
    torch.cuda.synchronize()
    assert most_under_way == 2
    row, generation = int(log[0, 1]), int(log[0, 2])
    sent = np.concatenate([
        _records(OPEN, (row, generation), 0), _records(GROWTH, (row, generation), *range(1, total))
    ])  # fmt: skip
    assert torch.equal(log[:total].cpu(), torch.from_numpy(sent))
