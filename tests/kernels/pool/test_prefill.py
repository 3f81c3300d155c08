"""Prefill chunks of a target's pool: which are used, their rows beside verified ones, and what the rows attend to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.tensors import assert_same_columns

from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import COMMITTED, PADDING, ROOT, Packed, pack
from outrider.kernels.pool.prefill import (
    Chunks,
    pack_chunks,
    pack_chunks_reference,
    take_chunks,
    take_chunks_reference,
)
from outrider.kernels.pool.records import Records, Verdict
from outrider.kernels.pool.select import Selection, select

PREFILL, RUNNING, HELD = RowState.PREFILL, RowState.RUNNING, RowState.HELD
MAX_LEN, SCRAP_SLOT = 40, 9_999
BUCKET = (9, 3, 4, 8)
"""Verified rows, sessions, most rows of a session, most entries."""
MOST_CHUNKS, MOST_ROWS = 2, 8


class Rig:
    """Rounds of a target's pool. Token i of row r is 100 r + i, its slot 1000 r + i; rows are of generation 1."""

    def __init__(self, *, sessions: int = 3) -> None:
        self.pool = Pool.allocate(sessions=sessions, max_len=MAX_LEN, capacity=8, places=1, trail=4)
        self.selection = Selection.allocate(self.pool, [BUCKET])
        self.chunks = Chunks.allocate(self.pool, chunks=MOST_CHUNKS, rows=MOST_ROWS)
        self.packed = Packed.allocate(self.pool, BUCKET, scrap_slot=SCRAP_SLOT, extra_rows=MOST_ROWS)
        rows, indices = torch.arange(sessions)[:, None], torch.arange(MAX_LEN)
        self.pool.history.copy_(100 * rows + indices)
        self.pool.table.copy_(1000 * rows + indices)

    def open(
        self, row: int, length: int, *, cached: int = 0, table_len: int | None = None, allow: int = MAX_LEN
    ) -> None:
        records = Records()
        records.open(row, 1, length=length, cached=cached, end=MAX_LEN, allow=allow)
        records.slots(row, 1, start=length if table_len is None else table_len, slots=[])
        self.graft(records)

    def graft(self, records: Records) -> list[int]:
        """Graft records and use their chunks; returns the verdicts."""
        # Records behind the count are another round's.
        words = torch.from_numpy(records.array()).repeat(2, 1)
        count = torch.tensor([len(records)], dtype=torch.int32)
        verdicts = torch.zeros(len(words), dtype=torch.int32)
        commits, num_commits = torch.zeros(self.pool.sessions, 4, dtype=torch.int32), torch.zeros_like(self.pool.count)
        graft(self.pool, words, count, verdicts, commits, num_commits)
        take_chunks(self.pool, words, count, self.chunks, self.selection.reserved_sessions)
        return verdicts[: len(records)].tolist()

    def round(self, records: Records | None = None) -> list[tuple[int, int, int]]:
        """Run a round with prefill; its chunks as (row, start, size)."""
        self.graft(records or Records())
        select(self.pool, self.selection, 0)
        pack(self.pool, self.selection, self.packed)
        pack_chunks(self.pool, self.selection, self.chunks, self.packed)
        return self.taken()

    def taken(self) -> list[tuple[int, int, int]]:
        chunks = self.chunks
        columns = [column.tolist() for column in (chunks.pool_rows, chunks.starts, chunks.sizes)]
        count = int(chunks.count)
        taken = list(zip(*columns, strict=True))
        sums = [sum(size for _, _, size in taken[:number]) for number in range(MOST_CHUNKS)]
        assert chunks.first.tolist() == sums and int(chunks.total) == sum(size for _, _, size in taken)
        assert taken[count:] == [(-1, 0, 0)] * (MOST_CHUNKS - count)
        return taken[:count]

    def verified(self) -> list[int]:
        """The pool's rows that take part beside the chunks."""
        return self.packed.pool_rows[: int(self.selection.totals[1])].tolist()

    def state(self, row: int) -> tuple[RowState, int]:
        return RowState(int(self.pool.state[row])), int(self.pool.cached[row])


def _chunk(row: int, start: int, size: int, *, generation: int = 1) -> Records:
    records = Records()
    records.prefill(row, generation, start=start, size=size)
    return records


# Which are used.


def test_a_prompt_in_chunks_runs_in_the_round_of_the_last_one() -> None:
    rig = Rig()
    rig.open(1, 12)
    assert rig.state(1) == (PREFILL, 0)
    assert rig.round(_chunk(1, 0, 5)) == [(1, 0, 5)]
    assert rig.state(1) == (PREFILL, 5) and rig.verified() == []
    assert rig.round(_chunk(1, 5, 6)) == [(1, 5, 6)]
    assert rig.state(1) == (RUNNING, 11) and rig.verified() == [1]
    assert rig.round() == [] and rig.verified() == [1]


@pytest.mark.parametrize(
    ("start", "size", "generation", "table_len"),
    [
        (0, 3, 1, 10),
        (1, 3, 1, 10),
        (3, 3, 1, 10),
        (-1, 3, 1, 10),
        (2**31 - 1, 3, 1, 10),
        (2, -1, 1, 10),
        (2, 0, 1, 10),
        (2, 8, 1, 10),
        (2, 2**31 - 1, 1, 10),
        (2, 3, 0, 10),
        (2, 3, 2, 10),
        (2, 3, 1, 4),
        (2, 7, 1, 9),
    ],
)
def test_a_record_that_does_not_hold_changes_nothing(start: int, size: int, generation: int, table_len: int) -> None:
    rig = Rig()
    rig.open(1, 10, cached=2, table_len=table_len)
    assert rig.round(_chunk(1, start, size, generation=generation)) == []
    assert rig.state(1) == (PREFILL, 2) and rig.verified() == []


@pytest.mark.parametrize("row", [-1, 3])
def test_a_record_of_a_row_that_is_not_there_changes_nothing(row: int) -> None:
    rig = Rig()
    rig.open(2, 10)
    assert rig.round(_chunk(row, 0, 1)) == []
    assert rig.pool.cached.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("size", "table_len"), [(1, 3), (3, 5), (6, 8), (7, 10)])
def test_a_chunk_needs_slots_for_itself_and_the_last_one_for_the_root(size: int, table_len: int) -> None:
    rig = Rig()
    rig.open(1, 10, cached=2, table_len=table_len)
    assert rig.round(_chunk(1, 2, size)) == [(1, 2, size)]
    assert rig.state(1) == (RUNNING if size == 7 else PREFILL, 2 + size)


@pytest.mark.parametrize("state", [RowState.EMPTY, RUNNING, HELD, RowState.FINISHED])
def test_a_row_that_is_not_in_prefill_has_no_chunks(state: RowState) -> None:
    rig = Rig()
    rig.open(1, 10, cached=9)
    assert rig.state(1) == (RUNNING, 9)
    rig.pool.state[1], rig.pool.cached[1] = state, 4
    assert rig.round(_chunk(1, 4, 5)) == []
    assert rig.state(1) == (state, 4)


def test_a_row_has_one_chunk_a_round() -> None:
    rig = Rig()
    rig.open(1, 12)
    records = _chunk(1, 3, 2)
    for start in (0, 2):
        records.prefill(1, 1, start=start, size=2)
    assert rig.round(records) == [(1, 0, 2)]
    assert rig.state(1) == (PREFILL, 2)


def test_what_fits_is_used_in_order() -> None:
    rig = Rig(sessions=5)
    for row in range(5):
        rig.open(row, 12)
    records = Records()
    # The second is one row too long; the last one is a chunk too many.
    for row, size in ((3, 5), (0, 4), (4, 2), (1, 1)):
        records.prefill(row, 1, start=0, size=size)
    assert rig.round(records) == [(3, 0, 5), (4, 0, 2)]
    assert rig.pool.cached.tolist() == [0, 0, 0, 5, 2]
    records = Records()
    for row, size in ((1, 3), (0, 6), (0, 5)):
        records.prefill(row, 1, start=0, size=size)
    assert rig.round(records) == [(1, 0, 3), (0, 0, 5)]


@pytest.mark.parametrize(("allow", "state"), [(10, HELD), (0, HELD), (11, RUNNING)])
def test_a_prompt_that_is_done_runs_as_far_as_it_may(allow: int, state: RowState) -> None:
    rig = Rig()
    rig.open(0, 10, cached=2, allow=allow)
    rig.open(1, 10, cached=9, allow=allow)
    rig.open(2, 1, allow=allow and allow - 9)
    assert rig.round(_chunk(0, 2, 7)) == [(0, 2, 7)]
    assert [rig.state(row) for row in range(3)] == [(state, 9), (state, 9), (state, 0)]
    assert rig.verified() == ([0, 1, 2] if state == RUNNING else [])[: BUCKET[1] - 1]


# Beside other records.


def test_limits_leave_a_row_in_prefill_and_hold_what_is_done() -> None:
    rig, records = Rig(), Records()
    rig.open(1, 10)
    records.limits(1, 1, end=MAX_LEN, allow=0)
    records.prefill(1, 1, start=0, size=4)
    assert rig.round(records) == [(1, 0, 4)] and rig.state(1) == (PREFILL, 4)
    records = Records()
    records.limits(1, 1, end=MAX_LEN, allow=MAX_LEN)
    assert rig.round(records) == [] and rig.state(1) == (PREFILL, 4)
    records = _chunk(1, 4, 5)
    records.limits(1, 1, end=MAX_LEN, allow=7)
    assert rig.round(records) == [(1, 4, 5)] and rig.state(1) == (HELD, 9)


def test_a_chunk_in_front_of_a_close_is_void() -> None:
    rig, records = Rig(), _chunk(1, 0, 4)
    rig.open(1, 10)
    records.close(1, 1)
    assert rig.round(records) == []
    # The row's next opening is another generation.
    records = Records()
    records.open(1, 2, length=10, cached=0, end=MAX_LEN, allow=MAX_LEN)
    records.slots(1, 2, start=10, slots=[])
    records.prefill(1, 1, start=0, size=4)
    assert rig.round(records) == []
    assert rig.round(_chunk(1, 0, 4, generation=2)) == [(1, 0, 4)]


def test_a_target_opens_a_row_with_kv_of_all_but_the_root_at_most() -> None:
    rig, records = Rig(), Records()
    for row, (length, cached) in enumerate([(5, 4), (5, 5), (1, 1)]):
        records.open(row, 1, length=length, cached=cached, end=MAX_LEN, allow=MAX_LEN)
    assert rig.graft(records) == [Verdict.EDITED, Verdict.INVALID, Verdict.INVALID]


def test_a_drafter_has_no_chunks() -> None:
    pool = Pool.allocate(sessions=1, max_len=MAX_LEN, capacity=8, places=1, trail=4, node_slots=64)
    records = Records()
    records.open(0, 1, length=4, cached=0, end=MAX_LEN, allow=MAX_LEN)
    records.prefill(0, 1, start=0, size=2)
    verdicts, commits = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    count, num_commits = torch.tensor([2], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    graft(pool, torch.from_numpy(records.array()), count, verdicts, commits, num_commits)
    assert verdicts.tolist() == [Verdict.EDITED, Verdict.INVALID]
    with pytest.raises(ValueError, match="pool: that of a drafter given, a target's needed"):
        Chunks.allocate(pool, chunks=1, rows=1)


# Their rows.


def test_chunks_stand_behind_the_verified_rows() -> None:
    rig, records = Rig(), Records()
    rig.open(2, 6, cached=3)
    rig.open(0, 9)
    records.growth(2, 1, place=0, node_id=1, parent_id=0, as_of=6, token=7, acceptance=0.5)
    records.slots(2, 1, start=7, slots=[])
    records.prefill(2, 1, start=3, size=2)
    records.prefill(0, 1, start=0, size=3)
    assert rig.round(records) == [(2, 3, 2), (0, 0, 3)]
    packed, none = rig.packed, BUCKET[0] + MOST_ROWS - 7
    assert packed.tokens.tolist() == [205, 7, 203, 204, 0, 1, 2, *[0] * none]
    assert packed.positions.tolist() == [5, 6, 3, 4, 0, 1, 2, *[0] * none]
    assert packed.slots.tolist() == [2005, 2006, 2003, 2004, 0, 1, 2, *[SCRAP_SLOT] * none]
    assert packed.entries.tolist() == [ROOT, 0, *[COMMITTED] * 5, *[PADDING] * none]
    assert packed.parents.tolist() == [-1, 0, -1, 2, -1, 4, 5, *[-1] * none]
    assert packed.sessions.tolist() == [0, 0, 1, 1, 2, 2, 2, *[-1] * none]
    assert packed.prefix_len.tolist() == [5, 5, 4, 5, 1, 2, 3, *[0] * none]
    assert packed.tree_mask[:, 0].tolist() == [1, 3, *[0] * 5, *[0] * none]
    assert packed.pool_rows.tolist() == [2, 2, 0]
    assert packed.query_start.tolist() == [0, 2, 4, 7]
    assert packed.tree_start.tolist() == [5, 5, 3]
    assert packed.key_len.tolist() == [7, 5, 3]
    # Sessions that are not there begin behind the last row.
    assert rig.round(_chunk(0, 3, 1)) == [(0, 3, 1)]
    assert packed.pool_rows.tolist() == [2, 0, -1] and packed.query_start.tolist() == [0, 2, 3, 3]
    assert (packed.tree_start.tolist(), packed.key_len.tolist()) == ([5, 4, 0], [7, 4, 0])
    assert packed.entries.tolist() == [ROOT, 0, COMMITTED, *[PADDING] * (none + 4)]


def test_chunks_take_sessions_of_the_bucket_and_only_in_their_round() -> None:
    rig = Rig(sessions=4)
    for row in (0, 1, 2):
        rig.open(row, 5, cached=4)
    rig.open(3, 20)
    assert rig.round() == [] and rig.verified() == [0, 1, 2]
    assert rig.round(_chunk(3, 0, 4)) == [(3, 0, 4)]
    assert rig.verified() == [0, 1] and rig.packed.pool_rows.tolist() == [0, 1, 3]
    # A graph without prefill has no `take_chunks`.
    select(rig.pool, rig.selection, 0)
    pack(rig.pool, rig.selection, rig.packed)
    assert rig.verified() == [0, 1, 2]


def test_rows_have_room_for_all_chunks() -> None:
    rig = Rig()
    packed = Packed.allocate(rig.pool, BUCKET, scrap_slot=SCRAP_SLOT, extra_rows=MOST_ROWS - 1)
    with pytest.raises(ValueError, match="extra_rows of packed: 7 given, at least 8 needed"):
        pack_chunks(rig.pool, rig.selection, rig.chunks, packed)
    packed = Packed.allocate(rig.pool, (9, 1, 4, 8), scrap_slot=SCRAP_SLOT, extra_rows=MOST_ROWS)
    with pytest.raises(ValueError, match="sessions of packed: 1 given, at least 2 needed"):
        pack_chunks(rig.pool, rig.selection, rig.chunks, packed)


class Host:
    """Prompts that come with a cached prefix, are prefilled in chunks planned a round ahead, and closed at any time.

    `kv` is what the slots hold. Every row of a round has to find the tokens before it in the slots that it attends to.
    """

    def __init__(self, seed: int) -> None:
        self.rig, self.rng = Rig(sessions=4), random.Random(seed)
        self.kv: dict[int, tuple[int, int]] = {}
        self.generations = [0] * 4
        self.length, self.planned = [0] * 4, [0] * 4
        self.slots = 0
        self.used, self.unused, self.done = 0, 0, 0

    def tick(self) -> None:
        rig, rng, records = self.rig, self.rng, Records()
        reported = [rig.state(row) for row in range(4)]
        if rng.random() < 0.5:
            # The report of the last round comes before this one is planned.
            for row, (state, cached) in enumerate(reported):
                if state == PREFILL:
                    self.unused += self.planned[row] > cached
                    self.planned[row] = cached
        for row, (state, _) in enumerate(reported):
            if state in {RowState.EMPTY, RUNNING} and rng.random() < 0.4:
                self.done += state == RUNNING
                self._open(row, records)
            elif rng.random() < 0.05:
                records.close(row, self.generations[row])
            if rng.random() < 0.8 and self.planned[row] < self.length[row] - 1:
                size = min(rng.randint(1, MOST_ROWS), self.length[row] - 1 - self.planned[row])
                records.prefill(row, self.generations[row], start=self.planned[row], size=size)
                self.planned[row] += size
        self.used += len(rig.round(records))
        self._forward()

    def _open(self, row: int, records: Records) -> None:
        self.generations[row] += 1
        self.length[row] = self.rng.randint(1, 25)
        tokens = [self.rng.randrange(100) for _ in range(self.length[row])]
        self.rig.pool.history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        cached = self.planned[row] = self.rng.choice([0, 0, self.rng.randrange(len(tokens))])
        records.open(row, self.generations[row], length=len(tokens), cached=cached, end=MAX_LEN, allow=MAX_LEN)
        # New slots; those of the prefix hold it already.
        slots = [self.slots + number for number in range(len(tokens))]
        self.slots += len(slots)
        records.slots(row, self.generations[row], start=0, slots=slots)
        self.kv |= {slots[index]: (tokens[index], index) for index in range(cached)}

    def _forward(self) -> None:
        packed, pool = self.rig.packed, self.rig.pool
        rows = int(packed.query_start[-1])
        tokens, positions = packed.tokens.tolist(), packed.positions.tolist()
        for row, slot in enumerate(packed.slots[:rows].tolist()):
            self.kv[slot] = (tokens[row], positions[row])
        for row in range(rows):
            session = int(packed.sessions[row])
            assert int(packed.query_start[session]) <= row < int(packed.query_start[session + 1])
            of_pool = int(packed.pool_rows[session])
            mask, start = int(packed.tree_mask[row, 0]), int(packed.tree_start[session])
            keys = [*range(int(packed.prefix_len[row])), *(start + bit for bit in range(64) if mask >> bit & 1)]
            assert keys == list(range(positions[row] + 1)) and keys[-1] < int(packed.key_len[session])
            attended = [self.kv[int(pool.table[of_pool, key])] for key in keys]
            history = pool.history[of_pool, : len(keys)].tolist()
            assert attended == list(zip(history, keys, strict=True))


def test_every_row_finds_the_tokens_before_it() -> None:
    used, unused, done = 0, 0, 0
    for seed in range(12):
        host = Host(seed)
        for _ in range(40):
            host.tick()
        used, unused, done = used + host.used, unused + host.unused, done + host.done
    # Chunks that were not used were planned again.
    assert used > 200 and unused > 50 and done > 100


# Kernels.


def _random_records(rng: random.Random, pool: Pool, count: int) -> torch.Tensor:
    """Chunks for rows in all states, most of which hold, between records of other kinds."""
    records = Records()
    for _ in range(count):
        row = rng.randrange(pool.sessions)
        generation, cached, length = int(pool.generation[row]), int(pool.cached[row]), int(pool.length[row])
        chance = rng.random()
        if chance < 0.55:
            # At times behind a chunk of the same round.
            start = rng.choice([*[cached] * 12, cached - 1, cached + 1, cached + 2, cached + 3, 2**31 - 1])
            left = length - 1 - start
            size = rng.choice([0, 1, 1, 2, 2, 3, 3, left, left, left - 1, left + 1, -1, 2**31 - 1])
            records.prefill(row, generation - (rng.random() < 0.05), start=start, size=max(size, -5))
        elif chance < 0.6:
            records.prefill(rng.choice([-1, pool.sessions, 10**6]), generation, start=0, size=1)
        else:
            records.slots(row, generation, start=3, slots=[4])
    return torch.from_numpy(records.array())


# (rounds, records of a round, sessions, chunks, rows of chunks, bucket)
_SHORT = [(20, 14, 4, 3, 7, (6, 3, 4, 9)), (3, 1300, 40, 12, 150, (50, 31, 4, 9))]
_LONG = [(200, 14, 4, 3, 7, (6, 3, 4, 9)), (30, 3000, 256, 64, 900, (300, 200, 70, 90))]


def _check_kernels(device: torch.device, seed: int, size: tuple[int, int, int, int, int, Any]) -> int:
    """Compare rounds of loops and kernels; returns how many chunks they had."""
    rounds, records, sessions, chunks, rows, bucket = size
    rng, seen = random.Random(seed), 0
    torch.manual_seed(seed)
    pools = [
        Pool.allocate(sessions=sessions, max_len=MAX_LEN, capacity=8, places=1, trail=4, device=where)
        for where in ("cpu", device)
    ]
    selections = [Selection.allocate(pool, [bucket]) for pool in pools]
    taken = [Chunks.allocate(pool, chunks=chunks, rows=rows) for pool in pools]
    packs = [Packed.allocate(pool, bucket, scrap_slot=SCRAP_SLOT, extra_rows=rows) for pool in pools]
    for _ in range(rounds):
        length = torch.randint(1, 30, (sessions,), dtype=torch.int32)
        columns = {
            "state": torch.tensor([rng.choice([PREFILL, PREFILL, PREFILL, *RowState]) for _ in range(sessions)]),
            "length": length,
            "cached": (torch.rand(sessions) * length).int(),
            "table_len": length + torch.randint(-4, 9, (sessions,)).clamp(min=-1),
            "allow": length + torch.randint(-1, 9, (sessions,)),
            "end": length + 9,
            "generation": torch.randint(-3, 3, (sessions,)),
            "history": torch.randint(0, 500, (sessions, MAX_LEN)),
            "table": torch.randint(0, 500, (sessions, MAX_LEN)),
        }
        for pool in pools:
            for name, column in columns.items():
                getattr(pool, name).copy_(column)
        words = _random_records(rng, pools[0], records)
        count = torch.tensor([len(words) + rng.choice([0, -2, 9])], dtype=torch.int32)
        take_chunks_reference(pools[0], words, count, taken[0], selections[0].reserved_sessions)
        take_chunks(pools[1], words.to(device), count.to(device), taken[1], selections[1].reserved_sessions)
        assert_same_columns(pools[0], pools[1])
        assert_same_columns(taken[0], taken[1])
        assert int(selections[0].reserved_sessions) == int(taken[0].count)
        for pool, selection, packed in zip(pools, selections, packs, strict=True):
            select(pool, selection, 0)
            pack(pool, selection, packed)
        pack_chunks_reference(pools[0], selections[0], taken[0], packs[0])
        pack_chunks(pools[1], selections[1], taken[1], packs[1])
        assert_same_columns(packs[0], packs[1])
        assert_same_columns(selections[0], selections[1])
        assert int(selections[0].reserved_sessions) == 0
        seen += int(taken[0].count)
    return seen


@pytest.mark.parametrize("size", _SHORT, ids=["small", "wide"])
def test_kernels_leave_the_same_bits_short(triton_device: torch.device, size: Any) -> None:
    assert _check_kernels(triton_device, 1, size) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("size", _LONG, ids=["small", "wide"])
def test_kernels_leave_the_same_bits_long(triton_device: torch.device, size: Any) -> None:
    if triton_device.type != "cuda":
        pytest.skip("too much for the interpreter")
    assert sum(_check_kernels(triton_device, seed, size) for seed in range(4)) > 100
