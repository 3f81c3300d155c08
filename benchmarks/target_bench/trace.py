"""What the host asks of CUDA in a steady loop of steps, counted by the profiler: waits and allocations above all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.target_bench.points import Point
from benchmarks.target_bench.worker import (
    SessionGroup,
    Worker,
    open_with_context,
)
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from outrider.target_worker.verifier import Verifier

_WARM_UPS = 12


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """A loop that begins each step before it finishes the one before, two groups of sessions in turns.

    Attributes:
        sessions, rows, context: of each group; rows of each tree.
        steps: counted over.
        calls: of CUDA's runtime by name, a step.
        kernels: on the device, a step; copies and fills included.
        allocations: asked of torch's allocator for the device, a step.
    """

    sessions: int
    rows: int
    context: int
    steps: int
    calls: Mapping[str, float]
    kernels: float
    allocations: float


def measure_trace(worker: Worker, *, point: Point, steps: int) -> TraceResult:
    """The loop of two groups, each as large as `point`."""
    verifier = worker.verifier()
    groups = [open_with_context(worker, verifier, point, seed=seed) for seed in (1, 2)]
    for _ in range(2):
        _in_turns(verifier, groups, _WARM_UPS)
        worker.capture_missing()
    allocated = _allocations()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        _in_turns(verifier, groups, steps)
    allocations = _allocations() - allocated
    for key, epoch in (close for group in groups for close in group.closes):
        verifier.close(key, epoch)
    calls, kernels = count_calls(trace.events() or ())
    return TraceResult(
        sessions=point.sessions,
        rows=point.rows,
        context=point.context,
        steps=steps,
        calls={name: count / steps for name, count in calls.most_common()},
        kernels=kernels / steps,
        allocations=allocations / steps,
    )


def count_calls(events: Iterable[Any]) -> tuple[Counter[str], int]:
    """Calls of CUDA's runtime or driver by name, and what ran on the device."""
    calls: Counter[str] = Counter()
    on_device = 0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            on_device += 1
        elif event.name.startswith("cu"):
            calls[event.name] += 1
    return calls, on_device


def _in_turns(verifier: Verifier, groups: list[SessionGroup], steps: int) -> None:
    """So many steps, each begun while the one before is on the device."""
    group = groups[0]
    pending = verifier.begin(group.trees())
    for number in range(1, steps + 1):
        other = groups[number % 2]
        following = verifier.begin(other.trees()) if number < steps else None
        group.take(verifier.finish(pending).results)
        if following is not None:
            group, pending = other, following


def _allocations() -> int:
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
