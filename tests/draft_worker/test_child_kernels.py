"""The loop over ranked children says what the calibration says with numpy, to the last bit."""

from typing import Any

import numpy as np
import pytest

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.compiled import IS_COMPILED
from outrider.draft_worker import child_kernels
from outrider.draft_worker.child_kernels import MOST_BRANCHING, estimate_children

_ROWS = 400


def experienced(branching: int, chance: np.random.Generator) -> AcceptanceCalibration:
    calibration = AcceptanceCalibration(branching=branching)
    for _ in range(500):
        buckets = chance.integers(0, len(calibration.learned), 2)
        calibration.observe(buckets, int(chance.integers(-1, 2)))
    return calibration


@pytest.mark.parametrize("branching", [1, 2, 4, MOST_BRANCHING])
def test_children_are_filed_and_estimated_as_the_calibration_does(branching: int):
    chance = np.random.default_rng(branching)
    ranked = max(branching, 2)
    calibration = experienced(ranked, chance)
    scores = -np.sort(-3 * chance.gumbel(size=(_ROWS, ranked)), axis=1).astype(np.float32)
    log_q = (-2 * chance.exponential(size=(_ROWS, ranked))).astype(np.float32)
    # What may not be chosen, and what a broken model gives.
    scores[chance.random(scores.shape) < 0.05] = -np.inf
    log_q[chance.random(log_q.shape) < 0.05] = -np.inf
    log_q[chance.random(log_q.shape) < 0.02] = np.nan
    temperature = chance.choice([0, 0.3, 1, 2.5, 3e38], _ROWS).astype(np.float32)
    learned = chance.random(_ROWS) < 0.5
    with np.errstate(all="ignore"):
        expected = calibration.buckets(log_q, scores, temperature)[:, :branching]
    estimates = calibration.estimate(expected, learned)
    tables = (calibration.edges, calibration.prior, calibration.learned)
    buckets, acceptance = estimate_children(log_q, scores, temperature, learned, *tables, branching)
    np.testing.assert_array_equal(buckets, expected)
    np.testing.assert_array_equal(acceptance.view(np.int32), estimates.view(np.int32))
    assert len(set(buckets.ravel().tolist())) > 20 * branching


@pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled without numba")
def test_no_step_waits_for_the_compiler():
    child_kernels.warm_up()
    kernel: Any = estimate_children
    before = list(kernel.signatures)
    test_children_are_filed_and_estimated_as_the_calibration_does(2)
    # Other tests have compiled what steps need: one signature says that the warm-up's is the same.
    assert kernel.signatures == before
    assert len(before) == 1
