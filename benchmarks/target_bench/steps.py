"""The time of a step at many sizes: Outrider's against the floor and against transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.target_bench.models import BenchModel
from benchmarks.target_bench.points import Point, kv_bytes
from benchmarks.target_bench.transformers_steps import TransformersStep, free_memory, load_transformers, time_ms
from benchmarks.target_bench.worker import LaunchClock, Worker, open_with_context

_WARM_UPS = 4
# Of the device's memory, what models, graphs and the work of a step take beside contexts.
_NOT_FOR_CONTEXTS = 0.25

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians of one measurement, in milliseconds.

    Attributes:
        device_ms: from the first work of a step on the device to its last.
        wall_ms: from the plan of a step to its committed tokens, on the host, nothing overlapped.
    """

    device_ms: float
    wall_ms: float


@dataclass(kw_only=True)
class StepRow:
    """One point.

    Attributes:
        point: what a step computes.
        ours: two measurements; empty where it could not be measured.
        eager_ms, compiled_ms: transformers', two measurements each; empty where left out.
        failures: why something could not be measured.
    """

    point: Point
    ours: list[StepTimes] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)
    compiled_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def points_that_fit(model: BenchModel, points: Iterable[Point], device: torch.device) -> list[Point]:
    """Those whose contexts leave room for the model; `device` is a CUDA device."""
    room = torch.cuda.get_device_properties(device).total_memory * (1 - _NOT_FOR_CONTEXTS)
    weights = 2 * (model.sizes.layer_weights + 2 * model.sizes.head_weights)
    return [point for point in points if kv_bytes(model.sizes, point) + weights <= room]


def steps_config(points: Sequence[Point], *, repeats: int) -> dict[str, int]:
    """What a worker's configuration must allow at least, by the name of its field."""
    tokens = 4 * (_WARM_UPS + repeats)
    return {
        "max_num_seqs": max(point.sessions for point in points),
        "max_model_len": max(point.context for point in points) + tokens,
        "max_tree_nodes": max(point.rows for point in points),
        "max_step_tokens": max(point.tokens for point in points),
        "num_slots": max(point.sessions * (point.context + point.rows + tokens) for point in points),
    }


def measure_ours(worker: Worker, rows: Sequence[StepRow], say: Progress, *, repeats: int) -> None:
    """Fills in what Outrider takes, the whole measured twice."""
    worker.fill_caches()
    clock = LaunchClock(worker.runner)

    def measure(row: StepRow) -> None:
        row.ours.append(_measure_point(worker, clock, row.point, repeats))
        say(f"{row.point}: {row.ours[-1].device_ms:.3f} ms, {row.ours[-1].wall_ms:.3f} with the host")

    try:
        for row in (*rows, *rows):
            _attempt(row, say, lambda row=row: measure(row))
    finally:
        clock.stop()


def _measure_point(worker: Worker, clock: LaunchClock, point: Point, repeats: int) -> StepTimes:
    verifier = worker.verifier()
    group = open_with_context(worker, verifier, point, seed=point.tokens)
    walls = []
    try:
        for number in range(_WARM_UPS + repeats):
            if number == _WARM_UPS - 1:
                worker.capture_missing()
            if number == _WARM_UPS:
                clock.clear()
            trees = group.trees()
            began = time.perf_counter()
            step = verifier.finish(verifier.begin(trees))
            walls.append(1e3 * (time.perf_counter() - began))
            if group.take(step.results) < point.sessions:
                raise RuntimeError("sessions had to wait: too few slots or rows")
        return StepTimes(device_ms=statistics.median(clock.step_ms()), wall_ms=statistics.median(walls[_WARM_UPS:]))
    finally:
        for key, epoch in group.closes:
            verifier.close(key, epoch)


@torch.inference_mode()
def measure_transformers(
    model: BenchModel,
    rows: Sequence[StepRow],
    device: torch.device,
    say: Progress,
    *,
    repeats: int,
    compiled: Callable[[Point], bool],
) -> None:
    """Fills in what transformers takes, each figure measured twice."""
    theirs = load_transformers(model, device)
    for row in rows:
        _attempt(row, say, lambda row=row: _measure_eager(theirs, row, say, repeats))
    for row in filter(lambda row: compiled(row.point), rows):
        _attempt(row, say, lambda row=row: _measure_compiled(theirs, row, say, repeats))


def _measure_eager(theirs: Any, row: StepRow, say: Progress, repeats: int) -> None:
    step = TransformersStep(theirs, row.point)
    run = step.eager()
    row.eager_ms += [time_ms(step, run, repeats=repeats) for _ in range(2)]
    say(f"{row.point}: transformers, eager, {row.eager_ms[0]:.3f} ms")


def _measure_compiled(theirs: Any, row: StepRow, say: Progress, repeats: int) -> None:
    began = time.perf_counter()
    step = TransformersStep(theirs, row.point)
    run = step.compiled()
    seconds = time.perf_counter() - began
    row.compiled_ms += [time_ms(step, run, repeats=repeats) for _ in range(2)]
    say(f"{row.point}: transformers, compiled in {seconds:.0f} s, {row.compiled_ms[0]:.3f} ms")


def _attempt(row: StepRow, say: Progress, measure: Callable[[], None]) -> None:
    """One point that fails must not hide the others."""
    try:
        measure()
    except Exception as error:  # noqa: BLE001 it is told with the point
        row.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
        say(f"{row.point}: {row.failures[-1]}")
    free_memory()


def ratio(left: float | None, right: float | None) -> float | None:
    """None where either is missing."""
    return None if left is None or right is None else left / right


def first(values: Sequence[float]) -> float | None:
    """None where there is none."""
    return values[0] if values else None
