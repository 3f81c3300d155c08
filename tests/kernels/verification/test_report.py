"""Reports of random rounds: what the host reads, and the kernel against its reference."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.pack import Packed
from outrider.kernels.pool.rings import REPORT_HEADER
from outrider.kernels.pool.select import Selection
from outrider.kernels.verification.report import (
    ReportColumn,
    RoundCounts,
    RoundTime,
    mark_time,
    report_round,
    report_round_reference,
    round_words,
)
from outrider.kernels.verification.walk import Walks

_ROWS, _SESSIONS, _MOST, _PLACES = 6, 5, 4, 2


@dataclass
class Round:
    """The arguments of a report, on one device."""

    pool: Pool
    selection: Selection
    packed: Packed
    walks: Walks
    num_chunks: torch.Tensor
    times: torch.Tensor
    reports: torch.Tensor
    rounds: torch.Tensor

    def arguments(self):
        return (
            self.pool, self.selection, self.packed, self.walks, self.num_chunks, self.times, self.reports, self.rounds,
        )  # fmt: skip

    def words(self) -> np.ndarray:
        return self.reports.numpy()[int(self.rounds) % 2, REPORT_HEADER:]


def random_round(seed: int, device: torch.device) -> Round:
    chance = np.random.default_rng(seed)
    pool = Pool.allocate(sessions=_ROWS, max_len=40, capacity=8, places=_PLACES, trail=4, device=device)
    bucket = (12, _SESSIONS, _MOST, 12)
    selection = Selection.allocate(pool, [bucket])
    packed = Packed.allocate(pool, bucket, scrap_slot=99, extra_rows=6)
    walks = Walks.allocate(pool, sessions=_SESSIONS, most=_MOST)

    def fill(column: torch.Tensor, values: np.ndarray) -> None:
        column.copy_(torch.from_numpy(np.asarray(values)).to(column.dtype).view(column.shape))

    verified = int(chance.integers(0, 4))
    chunks = int(chance.integers(0, 3)) if verified < 4 else 0
    fill(pool.state, chance.integers(0, 5, _ROWS))
    fill(pool.generation, chance.integers(-(2**31), 2**31, _ROWS))
    for column in (pool.length, pool.cached, pool.table_len):
        fill(column, chance.integers(1, 9, _ROWS))
    for column in (pool.end, pool.allow):
        fill(column, chance.integers(4, 12, _ROWS))
    fill(pool.lost, chance.integers(0, 2, (_ROWS, _PLACES)))
    rows = chance.permutation(_ROWS)[: verified + chunks]
    fill(packed.pool_rows, np.concatenate((rows, np.full(_SESSIONS - len(rows), -1))))
    sizes = np.where(np.arange(_SESSIONS) < len(rows), chance.integers(1, 4, _SESSIONS), 0)
    fill(packed.query_start, np.concatenate(([0], np.cumsum(sizes))))
    fill(selection.totals, np.array([sizes[:verified].sum(), verified]))
    fill(walks.tokens, chance.integers(0, 50, (_ROWS, _MOST)))
    fill(walks.num_tokens, chance.integers(0, _MOST + 1, _ROWS))
    fill(walks.accepted, chance.integers(0, 1 << 20, (_SESSIONS, _MOST)))
    fill(walks.num_accepted, chance.integers(0, _MOST + 1, _SESSIONS))
    fill(walks.finish, chance.integers(0, 4, _SESSIONS))
    fill(walks.selected, chance.integers(0, 1 << 30, _SESSIONS))
    fill(walks.tree_ends, chance.integers(0, 4, _ROWS))
    pinned = device.type == "cuda"
    return Round(
        pool,
        selection,
        packed,
        walks,
        torch.tensor([chunks], dtype=torch.int32, device=device),
        torch.arange(10, 10 + len(RoundTime), device=device),
        torch.full((2, REPORT_HEADER + round_words(_SESSIONS, _MOST)), -1, dtype=torch.int64, pin_memory=pinned),
        torch.tensor([seed], device=device),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_report_says_what_the_round_has_left(seed):
    one = random_round(seed, torch.device("cpu"))
    report_round_reference(*one.arguments())
    words, pool, walks = one.words(), one.pool, one.walks
    verified, chunks = int(one.selection.totals[1]), int(one.num_chunks)
    assert words[: RoundTime.ENDED].tolist() == [10, 11, 12, 13]
    assert words[RoundTime.ENDED] > 14
    assert [words[count] for count in (RoundCounts.ROWS, RoundCounts.SESSIONS, RoundCounts.CHUNKS)] == [
        int(one.selection.totals[0]), verified, chunks,
    ]  # fmt: skip
    runnable = [
        row
        for row in range(_ROWS)
        if pool.state[row] == RowState.RUNNING
        and pool.length[row] < min(pool.end[row], pool.allow[row])
        and pool.table_len[row] >= pool.length[row]
    ]
    assert words[RoundCounts.RUNNABLE] == len(runnable)
    columns = words[max(RoundCounts) + 1 :].view(np.int32)
    narrow = columns[: len(ReportColumn) * _SESSIONS].reshape(len(ReportColumn), _SESSIONS)
    for number in range(verified + chunks):
        row, is_verified = int(one.packed.pool_rows[number]), number < verified
        num_tokens = int(walks.num_tokens[row]) if is_verified else 0
        expected = {
            ReportColumn.POOL_ROW: row,
            ReportColumn.GENERATION: int(pool.generation[row]),
            ReportColumn.TOKENS: num_tokens,
            ReportColumn.ACCEPTED: int(walks.num_accepted[number]) if is_verified else 0,
            ReportColumn.ROWS: int(one.packed.query_start[number + 1] - one.packed.query_start[number]),
            ReportColumn.FINISH: int(walks.finish[number]) if is_verified else 0,
            ReportColumn.STATE: int(pool.state[row]),
            ReportColumn.LENGTH: int(pool.length[row]),
            ReportColumn.CACHED: int(pool.cached[row]),
            ReportColumn.LOST: sum(int(pool.lost[row, place]) << place for place in range(_PLACES)),
            ReportColumn.SELECTED: int(walks.selected[number]) if is_verified else 0,
            ReportColumn.TREE_END: int(walks.tree_ends[row]) if is_verified else 0,
        }
        assert {column: narrow[column, number] for column in expected} == expected
        wide = columns[len(ReportColumn) * _SESSIONS :]
        tokens = wide[: _SESSIONS * _MOST].reshape(_SESSIONS, _MOST)[number, :num_tokens]
        assert tokens.tolist() == walks.tokens[row, :num_tokens].tolist()
        accepted = wide[_SESSIONS * _MOST : 2 * _SESSIONS * _MOST].reshape(_SESSIONS, _MOST)
        count = expected[ReportColumn.ACCEPTED]
        assert accepted[number, :count].tolist() == walks.accepted[number, :count].tolist()


def test_the_kernel_writes_the_same_report(triton_device):
    for seed in range(6 if triton_device.type == "cpu" else 100):
        mine, its = random_round(seed, torch.device("cpu")), random_round(seed, triton_device)
        report_round_reference(*mine.arguments())
        report_round(*its.arguments())
        if triton_device.type == "cuda":
            torch.cuda.synchronize()
        ours, other = mine.words().copy(), its.words().copy()
        ours[RoundTime.ENDED] = other[RoundTime.ENDED] = 0
        begin = max(RoundCounts) + 1
        assert ours[:begin].tolist() == other[:begin].tolist()
        # Tokens and nodes past a session's own are not written.
        ours, other = ours[begin:].view(np.int32), other[begin:].view(np.int32)
        assert np.array_equal(ours[: len(ReportColumn) * _SESSIONS], other[: len(ReportColumn) * _SESSIONS])
        written = other != -1
        assert written.sum() > 0 or not int(mine.selection.totals[1]) + int(mine.num_chunks)
        assert np.array_equal(ours[written], other[written])


def test_moments_follow_one_another():
    times = torch.zeros(len(RoundTime), dtype=torch.int64)
    for moment in random.Random(1).sample(list(RoundTime), len(RoundTime)):
        mark_time(times, moment)
    assert (times > 0).all()
