"""Step costs against made-up machines: prefill beside a verification keeps to its share of time."""

import math
import random
from collections.abc import Callable

import pytest

from outrider.target_worker.rounds.step_cost import PrefillAllowance, StepCost, StepShape, prefill_pairs

Machine = Callable[[StepShape], float]


def gpu(shape: StepShape) -> float:
    """Weights are read in 4 ms, which 128 rows hide behind; a 32k context is felt."""
    rows = shape.verify_rows + shape.prefill_rows
    return 1e6 * (4 + 1e-6 * shape.keys + 0.025 * max(0, rows - 128) + 4.5e-8 * shape.pairs)


def wide_gpu(shape: StepShape) -> float:
    """300 rows are free."""
    return 1e6 * (4 + 0.025 * max(0, shape.verify_rows + shape.prefill_rows - 300))


def cpu(shape: StepShape) -> float:
    """Every row costs the same, and longer contexts more."""
    return 1e6 * (0.5 + 0.05 * (shape.verify_rows + shape.prefill_rows) + 1e-8 * shape.pairs)


def prefill_beside(machine: Machine, *, prompt: int, warm: int) -> tuple[list[float], int]:
    """Return how much longer each step of the prefill takes than its verification, and how many go without prefill."""
    noise, cost = random.Random(0), StepCost(slowdown=0.4, prior_rows=256)

    def run(shape: StepShape) -> float:
        step_ns = machine(shape) * noise.uniform(0.97, 1.03)
        cost.observe(shape, step_ns)
        return step_ns

    for _ in range(warm):
        run(StepShape(verify_rows=48, keys=32_000))
    done, ratios, rests = 0, [], 0
    while done < prompt:
        rows = min(cost.beside(48, 32_000, most=4096).rows(done), prompt - done)
        shape = StepShape(verify_rows=48, keys=32_000, prefill_rows=rows, pairs=prefill_pairs(rows, done))
        ratios.append(run(shape) / machine(StepShape(verify_rows=48, keys=32_000)))
        done, rests = done + rows, rests + (rows == 0)
    return ratios, rests


@pytest.mark.parametrize("warm", [30, 0])
@pytest.mark.parametrize("machine", [gpu, wide_gpu, cpu])
def test_prefill_takes_its_share_and_no_more(machine: Machine, warm: int) -> None:
    ratios, rests = prefill_beside(machine, prompt=32_768, warm=warm)
    tail = sorted(ratios[50:])
    # The least that always moves costs this CPU more than the share: 32 of its rows take half a verification.
    most = 1.65 if machine is cpu else 1.5
    assert tail[int(0.99 * len(tail))] < most
    assert sum(tail) / len(tail) > 1.3, "prefill could have gone faster"
    assert rests <= 4 + len(ratios) // 60
    # What is found out at first: before anything is known, and where free rows end.
    assert max(ratios) < (2.0 if machine is not cpu else 6.0)


def test_one_slow_step_is_forgotten() -> None:
    cost = StepCost(slowdown=0.4, prior_rows=256)
    for _ in range(10):
        cost.observe(StepShape(verify_rows=48), 4e6)
        cost.observe(StepShape(verify_rows=48, prefill_rows=100), 5e6)
    before = cost.beside(48, 0, most=4096).rows(0)
    cost.observe(StepShape(verify_rows=48), 1e9)
    cost.observe(StepShape(verify_rows=48, prefill_rows=100), 1e9)
    for _ in range(60):
        cost.observe(StepShape(verify_rows=48), 4e6)
        cost.observe(StepShape(verify_rows=48, prefill_rows=100), 5e6)
    assert before == 160
    assert 0.8 * before < cost.beside(48, 0, most=4096).rows(0) < 1.2 * before


def test_an_allowance_is_spent() -> None:
    allowance = PrefillAllowance(most=500, least=8, time_ns=1000.0, row_ns=2.0, pair_ns=0.01)
    # 2 n + 0.01 (100 n + n^2 / 2) = 1000
    rows = allowance.rows(100)
    assert rows == int((math.sqrt(9 + 4 * 0.005 * 1000) - 3) / 0.01)
    allowance.spend(rows, 100)
    assert allowance.rows(100) == 0
    assert PrefillAllowance(most=500, least=8, time_ns=-5.0).rows(0) == 8
    assert PrefillAllowance(most=500).rows(10**6) == 500
