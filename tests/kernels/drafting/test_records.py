"""Records between a target's pool and a drafter's beside it: references against plain Python, kernels against them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.kernels.sampling.random_step import MOST_ROWS, SESSIONS, RandomStep

from outrider.kernels.drafting.records import (
    follow_records,
    follow_records_reference,
    growth_records,
    growth_records_reference,
)
from outrider.kernels.pool.records import WORDS, RecordKind, Records
from outrider.kernels.sampling.rows import SampledRows, sample_rows_reference

_CPU = torch.device("cpu")
_PLACE, _DRAFTER = 4, 1


def followed(records: np.ndarray, is_drafted: list[int]) -> np.ndarray:
    out = torch.full((len(records) + 3, WORDS), -9, dtype=torch.int32)
    padded = torch.cat((torch.from_numpy(records), torch.full((3, WORDS), 7, dtype=torch.int32)))
    count = torch.tensor([len(records)], dtype=torch.int32)
    drafted = torch.tensor(is_drafted, dtype=torch.int32)
    follow_records(padded, count, drafted, out, place=_PLACE, longest=50)
    assert (out[len(records) :] == -9).all()
    return out[: len(records)].numpy()


def test_rows_open_and_close_as_the_targets_and_nothing_else_comes_through():
    given, wanted = Records(), Records()
    given.open(1, 7, length=20, cached=19, end=90, allow=60)
    wanted.open(1, 7, length=20, cached=0, end=50, allow=60)
    given.limits(1, 7, end=40, allow=0)
    wanted.limits(1, 7, end=40, allow=0)
    given.limits(1, 7, end=99, allow=98)
    wanted.limits(1, 7, end=50, allow=98)
    given.forget(1, 7, place=_PLACE)
    wanted.forget(1, 7, place=0)
    given.close(1, 7)
    wanted.close(1, 7)
    passed = len(given)
    # Of a session that is not drafted, of other places, or of no use to a drafter.
    given.open(0, 3, length=20, cached=19, end=90, allow=60)
    given.open(2, 3, length=20, cached=19, end=90, allow=60)
    given.open(-1, 3, length=20, cached=19, end=90, allow=60)
    given.forget(1, 7, place=0)
    given.resent(1, 7, place=_PLACE)
    given.slots(1, 7, start=3, slots=[5, 6])
    given.prefill(1, 7, start=3, size=9)
    given.growth(1, 7, place=0, node_id=3, parent_id=0, as_of=20, token=4, acceptance=0.5)
    found = followed(given.array(), [0, 1])
    assert found[:passed].tolist() == wanted.array().tolist()
    assert (found[passed:, 0] & 0xFF == RecordKind.NOTHING).all()


def test_the_kernel_translates_records_to_the_same_words(triton_device: torch.device):
    chance = np.random.default_rng(4)
    words = chance.integers(-3, 40, (700, WORDS)).astype(np.int32)
    words[:, 0] = chance.integers(0, 12, 700) | chance.integers(0, 8, 700) << 8 | chance.integers(0, 256, 700) << 16
    drafted = torch.from_numpy(chance.integers(0, 2, 30).astype(np.int32))
    for used in (0, 1, 255, 256, 699):
        outs = []
        for device, follow in ((_CPU, follow_records_reference), (triton_device, follow_records)):
            records = torch.from_numpy(words).to(device)
            out = torch.full_like(records, -9)
            count = torch.tensor([used], dtype=torch.int32, device=device)
            follow(records, count, drafted.to(device), out, place=_PLACE, longest=20)
            outs.append(out.cpu())
        assert torch.equal(*outs)


def made_children(seed: int, branching: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tokens, acceptances, ids of what was made of them (of half of them nothing), and parent ids."""
    chance = np.random.default_rng(seed)
    made = np.where(chance.random((MOST_ROWS, branching)) < 0.5, 0, chance.integers(1, 99, (MOST_ROWS, branching)))
    columns = (
        chance.integers(-1, 60, made.shape).astype(np.int32),
        chance.random(made.shape).astype(np.float32),
        made.astype(np.int32),
        chance.integers(-1, 99, MOST_ROWS).astype(np.int32),
    )
    return tuple(torch.from_numpy(column).to(device) for column in columns)


def records_of(step: RandomStep, rows: SampledRows, branching: int, seed: int, *, reference: bool) -> torch.Tensor:
    device = step.pool.device
    step.pool.generation.copy_(torch.arange(SESSIONS) + 100)
    tokens, acceptances, made, parent_ids = made_children(seed, branching, device)
    records = torch.full((len(rows.rows) * branching + 1, WORDS), -9, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    columns = tokens, acceptances, made, parent_ids
    if reference:
        head = RecordKind.GROWTH | _PLACE << 8 | 1 << _DRAFTER + 16
        growth_records_reference(step.pool, rows, columns, records, count, head)
    else:
        growth_records(step.pool, rows, columns, records, count, place=_PLACE, drafter=_DRAFTER)
    used = int(count)
    assert (records[used:] == -9).all()
    return records[:used].cpu()


@pytest.mark.parametrize("branching", [1, 3])
def test_every_node_that_was_made_is_a_record_of_growth(branching: int):
    step, rows = RandomStep(2, _CPU), SampledRows.allocate(40, _CPU)
    sample_rows_reference(step.packed, step.parameters, rows)
    found = records_of(step, rows, branching, 5, reference=False)
    tokens, acceptances, made, parent_ids = (column.tolist() for column in made_children(5, branching, _CPU))
    wanted = Records()
    for line in range(int(rows.count)):
        row, pool_row = int(rows.rows[line]), int(rows.pool_rows[line])
        for child in range(branching):
            if made[row][child]:
                wanted.growth(
                    pool_row, 100 + pool_row, place=_PLACE, node_id=made[row][child], parent_id=parent_ids[row],
                    as_of=int(step.pool.length[pool_row]), token=tokens[row][child],
                    acceptance=acceptances[row][child], drafter=_DRAFTER,
                )  # fmt: skip
    assert len(wanted) > 5
    assert found.tolist() == wanted.array().tolist()


@pytest.mark.parametrize(("branching", "lines"), [(1, 40), (3, 40), (4, 6)])
def test_the_kernel_writes_the_same_growth(triton_device: torch.device, branching: int, lines: int):
    for seed in range(3 if triton_device.type == "cpu" else 40):
        found = []
        for device, is_reference in ((_CPU, True), (triton_device, False)):
            step, mine = RandomStep(seed, _CPU), SampledRows.allocate(lines, _CPU)
            sample_rows_reference(step.packed, step.parameters, mine)
            step, rows = RandomStep(seed, device), SampledRows.allocate(lines, device)
            for name in rows.__dataclass_fields__:
                getattr(rows, name).copy_(getattr(mine, name))
            found.append(records_of(step, rows, branching, seed, reference=is_reference))
        assert torch.equal(*found)
