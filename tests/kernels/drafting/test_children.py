"""Children of a step and its report: references against plain numpy, kernels against references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.sampling.random_step import MOST_ROWS, RandomStep

from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.kernels.drafting.children import (
    REPORT_COUNTS,
    estimate_children,
    estimate_children_reference,
    report_children,
    report_children_reference,
    report_words,
)
from outrider.kernels.pool.rings import REPORT_HEADER
from outrider.kernels.sampling.rows import SampledRows, sample_rows, sample_rows_reference

_CPU = torch.device("cpu")


def ranked_children(seed: int, lines: int, ranked: int, device: torch.device) -> list[torch.Tensor]:
    """Tokens, log q and scores, with what may not be chosen and what a broken model gives."""
    chance = np.random.default_rng(seed)
    scores = -np.sort(-3 * chance.gumbel(size=(lines, ranked)), axis=1)
    log_q = -2 * chance.exponential(size=(lines, ranked))
    scores[chance.random(scores.shape) < 0.05] = -np.inf
    log_q[chance.random(log_q.shape) < 0.05] = -np.inf
    log_q[chance.random(log_q.shape) < 0.02] = np.nan
    tokens = np.where(chance.random(scores.shape) < 0.1, -1, chance.integers(0, 50, scores.shape))
    columns = (tokens, log_q.astype(np.float32), scores.astype(np.float32))
    return [torch.from_numpy(column).to(device) for column in columns]


def experienced(branching: int) -> AcceptanceCalibration:
    """One that has learned at random."""
    chance, calibration = np.random.default_rng(branching), AcceptanceCalibration(branching=branching)
    for _ in range(500):
        buckets = chance.integers(0, len(calibration.learned), 2)
        calibration.observe_parents(np.array([[chance.integers(-1, 2), 2, *buckets]]))
    return calibration


def tables_of(calibration: AcceptanceCalibration, device: torch.device) -> Any:
    return tuple(torch.from_numpy(t).to(device) for t in (calibration.edges, calibration.prior, calibration.learned))


def outputs_for(lines: int, rows: int, branching: int, device: torch.device) -> Any:
    ints = [torch.full((size, branching), -7, dtype=torch.int32, device=device) for size in (lines, lines, rows)]
    return *ints, torch.full((rows, branching), -7.0, device=device)


@pytest.mark.parametrize("branching", [1, 2, 4, 7])
def test_children_are_filed_and_estimated_as_the_calibration_does(branching: int):
    lines, ranked, chance = 400, max(branching, 2), np.random.default_rng(branching)
    calibration = experienced(ranked)
    tokens, log_q, scores = ranked_children(branching, lines, ranked, _CPU)
    temperature = chance.choice([0, 0.3, 1, 2.5, 3e38], lines).astype(np.float32)
    fixed, places = chance.random(lines) < 0.5, chance.permutation(lines + 9)[:lines]
    rows = SampledRows.allocate(lines, _CPU)
    for column, values in ((rows.temperature, temperature), (rows.fixed, fixed), (rows.rows, places)):
        column.copy_(torch.from_numpy(values))
    outputs = outputs_for(lines, lines + 9, branching, _CPU)
    estimate_children_reference(tokens, log_q, scores, rows, tables_of(calibration, _CPU), 0.1, outputs)
    found, buckets, nodes, acceptances = (column.numpy() for column in outputs)
    with np.errstate(all="ignore"):
        expected = calibration.buckets(log_q.numpy(), scores.numpy(), temperature)[:, :branching]
    estimates = calibration.estimate(expected, ~fixed)
    np.testing.assert_array_equal(buckets, expected)
    np.testing.assert_array_equal(acceptances[places].view(np.int32), estimates.view(np.int32))
    np.testing.assert_array_equal(found, tokens.numpy()[:, :branching])
    np.testing.assert_array_equal(nodes[places], np.where(estimates >= np.float32(0.1), found, -1))
    assert len(set(buckets.ravel().tolist())) > 20 * branching
    assert (nodes[places] < 0).any() and (nodes[places] >= 0).any()


def report_of(step: RandomStep, rows: SampledRows, outputs: Any, *, reference: bool = False) -> Any:
    """Write a report of numbers that can be told apart; return its buffer."""
    tokens, buckets, _, acceptances = outputs
    device, (size, branching) = tokens.device, acceptances.shape
    made = torch.arange(size * branching, dtype=torch.int32, device=device).view(size, branching) + 1000
    parent_ids = torch.arange(size, dtype=torch.int32, device=device) + 500
    reports = torch.full((2, REPORT_HEADER + report_words(len(tokens), branching)), -9, dtype=torch.int64)
    reports = reports.pin_memory() if device.type == "cuda" else reports
    write = report_children_reference if reference else report_children
    write(
        step.pool, torch.tensor([step.used, 4], dtype=torch.int32, device=device), rows,
        (tokens, buckets, acceptances, made, parent_ids),
        (torch.tensor([3], dtype=torch.int32, device=device), torch.tensor([2**40], device=device)), reports,
        torch.tensor([3], device=device), len(tokens),
    )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert (reports[0] == -9).all() and (reports[1, :REPORT_HEADER] == -9).all()
    return reports[1, REPORT_HEADER:].numpy()


def test_a_report_holds_the_steps_counts_and_columns():
    lines, branching = 40, 3
    step, rows = RandomStep(2, _CPU), SampledRows.allocate(lines, _CPU)
    sample_rows_reference(step.packed, step.parameters, rows)
    count, outputs = int(rows.count), outputs_for(lines, MOST_ROWS, branching, _CPU)
    for number, column in enumerate(outputs):
        column.copy_(torch.arange(column.numel()).view(column.shape) + 10_000 * number)
    report = report_of(step, rows, outputs, reference=True)
    assert report[[0, 1, 2, 3, 4, 6]].tolist() == [step.used, 4, count, 2**33 - 17, 2**40, 3]
    words, places = report[REPORT_COUNTS:].view(np.int32), rows.rows[:count].numpy()
    pool_rows, lengths, parents = (words[begin * lines :][:count] for begin in range(3))
    assert pool_rows.tolist() == rows.pool_rows[:count].tolist()
    assert lengths.tolist() == step.pool.length[rows.pool_rows[:count].long()].tolist()
    assert parents.tolist() == (places + 500).tolist()
    wide = [words[(3 + n * branching) * lines :][: count * branching].reshape(count, branching) for n in range(4)]
    assert (wide[0] == outputs[0].numpy()[:count]).all() and (wide[1] == outputs[1].numpy()[:count]).all()
    assert (wide[2] == 1000 + places[:, None] * branching + np.arange(branching)).all()
    assert (wide[3].view(np.float32) == outputs[3].numpy()[places]).all()


@pytest.mark.parametrize(("branching", "lines"), [(1, 40), (3, 40), (4, 6)])
def test_kernels_write_the_same_bits(triton_device: torch.device, branching: int, lines: int):
    ranked = max(branching, 2)
    calibration = experienced(ranked)
    for seed in range(3 if triton_device.type == "cpu" else 40):
        steps = [RandomStep(seed, device) for device in (_CPU, triton_device)]
        mine, theirs = (SampledRows.allocate(lines, step.pool.device) for step in steps)
        sample_rows_reference(steps[0].packed, steps[0].parameters, mine)
        sample_rows(steps[1].pool, steps[1].packed, steps[1].parameters, theirs)
        count = int(mine.count)
        found = []
        for step, rows, is_reference in ((steps[0], mine, True), (steps[1], theirs, False)):
            device = step.pool.device
            outputs = outputs_for(lines, MOST_ROWS, branching, device)
            children = ranked_children(seed, lines, ranked, device)
            # The reference is given the rows in use alone.
            tokens, log_q, scores = [column[:count] for column in children] if is_reference else children
            used = rows.first(count) if is_reference else rows
            estimate = estimate_children_reference if is_reference else estimate_children
            estimate(tokens, log_q, scores, used, tables_of(calibration, device), 0.1, outputs)
            found.append([*outputs, torch.from_numpy(report_of(step, rows, outputs, reference=is_reference))])
        (tokens, buckets, nodes, acceptances, report), other = found[0], [column.cpu() for column in found[1]]
        assert torch.equal(tokens[:count], other[0][:count]) and torch.equal(buckets[:count], other[1][:count])
        assert torch.equal(nodes, other[2])
        assert torch.equal(acceptances.view(torch.int32), other[3].view(torch.int32))
        # All but the time of its end.
        report[5] = other[4][5] = 0
        assert torch.equal(report, other[4])
