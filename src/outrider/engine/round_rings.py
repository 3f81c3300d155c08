"""The host's ends of the rings between host and rounds: records go in, early words and reports come out.

    host                                   device (outrider.kernels.pool.rings)
    Inbox.put      records, then head  ->  take_records    begins a round
    Rounds.poll    early words         <-  publish_early   after select: the host may launch the next round
    Rounds.poll    report, tail        <-  publish_report  ends the round

Host and device share a `RingMemory` and never wait for each other. The rules that make this safe:

- A record is written before the head that covers it. The device reads head once a round.
- The device's tail is known from reports. The host overwrites a record only once a report's tail has passed it.
- OPEN, LIMITS, PREEMPT and CLOSE are *urgent*: they overtake the queue and use places of the ring that nothing else may
  use. Of each kind a row has one at most between reported tail and head, so four places a row do. All other records
  keep their order. What waits for a session that is closed comes behind its CLOSE, and the device drops it.
- A row and its slots are free once a report's tail has passed its CLOSE; after a PREEMPT its slots are.
- Round r + 1 is launched once the early words of round r have been read. The device writes these after report r - 1,
  and `Rounds.poll` reads in the device's order: one buffer of early words and two of reports are enough.
- Ahead of a report, a round is launched only if a row can run; once all rounds are reported, also if records have come.

On a CPU a round is a function; the host reads all there is before it launches the next one.
"""

from __future__ import annotations

import platform
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.kernels.pool.records import WORDS, RecordKind
from outrider.kernels.pool.rings import EARLY_HEADER, REPORT_HEADER

_URGENT = (RecordKind.OPEN, RecordKind.LIMITS, RecordKind.PREEMPT, RecordKind.CLOSE)
_IS_URGENT = np.zeros(256, np.bool_)
_IS_URGENT[list(_URGENT)] = True


@dataclass(frozen=True, kw_only=True, eq=False)
class RingMemory:
    """Memory that host and device share.

    A buffer's first word is the number of its round, counted from 1, and valid last.
    """

    ring: torch.Tensor  # [R, 8] int32, records; record i stands at i mod R
    head: torch.Tensor  # [1] int64, records ever written
    early: torch.Tensor  # [A, 1 + E] int64, early words behind the number of the round
    reports: torch.Tensor  # [B, 2 + N] int64, reports behind the number of the round and the tail

    @classmethod
    def allocate(cls, *, records: int, early_words: int, report_words: int, pinned: bool, ahead: int = 2) -> RingMemory:
        """Return empty rings.

        Args:
            records: R, a power of two.
            early_words: E.
            report_words: N.
            pinned: whether the device is a GPU.
            ahead: B, most rounds that are launched, and not read; A = B - 1.

        Raises:
            RuntimeError: pinned memory on a processor that does not keep its stores in order. Such a host would need
                a barrier between records and head, and one between the number of a round and its words.
        """
        if pinned and platform.machine() not in {"x86_64", "AMD64"}:
            raise RuntimeError(f"rings beside a GPU need an x86 host: stores of {platform.machine()} are not in order")
        return cls(
            ring=torch.zeros(records, WORDS, dtype=torch.int32, pin_memory=pinned),
            head=torch.zeros(1, dtype=torch.int64, pin_memory=pinned),
            early=torch.zeros(ahead - 1, EARLY_HEADER + early_words, dtype=torch.int64, pin_memory=pinned),
            reports=torch.zeros(ahead, REPORT_HEADER + report_words, dtype=torch.int64, pin_memory=pinned),
        )


@dataclass(frozen=True, kw_only=True)
class Release:
    """The device has closed or preempted a row: its slots are free, and the row too if it was closed."""

    row: int
    generation: int
    closed: bool


@dataclass(kw_only=True, eq=False, slots=True)
class _Session:
    row: int
    generation: int
    # Urgent kinds between reported tail and head.
    in_ring: set[int] = field(default_factory=set)
    # The newest LIMITS, while an older one is in the ring.
    limits: npt.NDArray[np.int32] | None = None


class Inbox:
    """Rows, the ring, and a queue of records that it has no room for. For the thread of `Rounds`.

    Args:
        rows: S, rows of the pool.
    """

    def __init__(self, memory: RingMemory, *, rows: int) -> None:
        self._ring: Any = memory.ring.numpy()
        self._head_word: Any = memory.head.numpy()
        self._size = memory.ring.shape[0]
        self._reserve = len(_URGENT) * rows
        assert self._size > self._reserve, "urgent records of all rows could fill the ring"
        self._head = self._tail = 0
        self._free = deque(range(rows))
        self._generations = [0] * rows
        self._sessions: list[_Session | None] = [None] * rows
        self._queue: deque[npt.NDArray[np.int32]] = deque()
        # (head behind the record, kind, session) of urgent records that the tail has not passed.
        self._urgent: deque[tuple[int, int, _Session]] = deque()

    def take_row(self) -> tuple[int, int] | None:
        """Hand out a free row with the generation of its next opening, or None if there is none.

        No launched round uses the row. It is given back by a CLOSE, whether or not an OPEN was sent.
        """
        if not self._free:
            return None
        row = self._free.popleft()
        generation = self._generations[row] = (self._generations[row] + 1) % 2**32
        self._sessions[row] = _Session(row=row, generation=generation)
        return row, generation

    def put(self, records: npt.NDArray[np.int32]) -> None:
        """Take records. Urgent ones are in the ring on return, the others as far as there is room.

        A LIMITS record waits while an older one of its session is in the ring, and a newer one replaces it. Records of
        closed sessions are dropped, here or by the device.

        Args:
            records: [n, 8] int32, in the order of each session; kept, not copied.
        """
        begin = 0
        for place in np.flatnonzero(_IS_URGENT[records[:, 0] & 0xFF]).tolist():
            self._queue.append(records[begin:place])
            self._put_urgent(records[place : place + 1])
            begin = place + 1
        self._queue.append(records[begin:])
        self._move_queued()

    def reported(self, tail: int) -> list[Release]:
        """Learn how far the device has read: free places of the ring and rows, and return what is released."""
        released = []
        self._tail = tail
        while self._urgent and self._urgent[0][0] <= tail:
            _, kind, session = self._urgent.popleft()
            session.in_ring.remove(kind)
            if session.limits is not None and kind == RecordKind.LIMITS:
                record, session.limits = session.limits, None
                self._put_urgent(record)
            if kind in {RecordKind.PREEMPT, RecordKind.CLOSE}:
                closed = kind == RecordKind.CLOSE
                released.append(Release(row=session.row, generation=session.generation, closed=closed))
                if closed:
                    self._free.append(session.row)
        self._move_queued()
        return released

    @property
    def has_records(self) -> bool:
        """True if there are records that no reported round has taken."""
        return self._head != self._tail

    def is_queued(self, row: int) -> bool:
        """True if records of a row wait for room in the ring."""
        return any((records[:, 1] == row).any() for records in self._queue)

    def _put_urgent(self, record: npt.NDArray[np.int32]) -> None:
        kind, row, generation = int(record[0, 0]) & 0xFF, int(record[0, 1]), int(record[0, 2]) % 2**32
        session = self._sessions[row]
        if session is None or session.generation != generation:
            return
        if kind in session.in_ring:
            assert kind == RecordKind.LIMITS, f"row {row}: {RecordKind(kind).name} before the last was reported"
            session.limits = record
            return
        if kind == RecordKind.CLOSE:
            session.limits = self._sessions[row] = None
        assert self._head - self._tail < self._size, "no room for an urgent record"
        self._write(record)
        session.in_ring.add(kind)
        self._urgent.append((self._head, kind, session))

    def _move_queued(self) -> None:
        """Move queued records to the ring as room allows."""
        while self._queue and (room := self._size - self._reserve - (self._head - self._tail)) > 0:
            records = self._queue.popleft()
            self._write(records[:room])
            if room < len(records):
                self._queue.appendleft(records[room:])

    def _write(self, records: npt.NDArray[np.int32]) -> None:
        start = self._head % self._size
        ahead = min(len(records), self._size - start)
        self._ring[start : start + ahead] = records[:ahead]
        self._ring[: len(records) - ahead] = records[ahead:]
        self._head += len(records)
        # After the records: an x86 processor keeps the order of its stores.
        self._head_word[0] = self._head


@dataclass(frozen=True, kw_only=True, eq=False)
class Early:
    """A round's early words, [E] int64."""

    round: int
    words: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """A round's report, [N] int64, and what is free now that it has been read."""

    round: int
    words: npt.NDArray[np.int64]
    released: list[Release]


class Rounds:
    """Schedule of launched rounds and reader of their outputs. For the launching thread only.

    while serving:
        while (event := rounds.poll()) is not None:
            can_run, bucket = ...           # from an Early: of its round; from a Report: after its round
        if rounds.may_launch(can_run):
            launch(bucket)
            rounds.launched()
    """

    def __init__(self, memory: RingMemory, inbox: Inbox) -> None:
        self._early: Any = memory.early.numpy()
        self._reports: Any = memory.reports.numpy()
        self._inbox = inbox
        self._launched = 0
        # Early words and reports read, in the device's order: early 0, report 0, early 1, ..
        self._read = 0

    def poll(self) -> Early | Report | None:
        """Return what the device wrote next, as a copy, or None if it has not yet done so."""
        round_, is_report = divmod(self._read, 2)
        buffers, header = (self._reports, REPORT_HEADER) if is_report else (self._early, EARLY_HEADER)
        buffer = round_ % buffers.shape[0]
        number = int(buffers[buffer, 0])
        assert number <= round_ + 1, f"round {number - 1} has overwritten what round {round_} wrote"
        if number != round_ + 1:
            return None
        words = buffers[buffer, header:].copy()
        self._read += 1
        if not is_report:
            return Early(round=round_, words=words)
        released = self._inbox.reported(int(buffers[buffer, 1]))
        return Report(round=round_, words=words, released=released)

    def may_launch(self, can_run: bool) -> bool:
        """Return whether to launch a round now.

        Args:
            can_run: whether a row can run: took part in the round of the last `Early`, can run after that of the last
                `Report`, whichever was read last, or has a prefill chunk ready.
        """
        unread = 2 * self._launched - self._read
        if unread == 0:
            return can_run or self._inbox.has_records
        return unread == 1 and can_run

    def launched(self) -> int:
        """Count a launched round; return its number, from 0."""
        self._launched += 1
        return self._launched - 1

    @property
    def under_way(self) -> int:
        """Rounds launched, their reports not yet read."""
        return self._launched - self._read // 2
