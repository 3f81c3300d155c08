"""Time of an operator: what it adds to a CUDA graph whose L2 cache is cold.

Two graphs are replayed in turns: one restores what the operator changes, if it changes something, and reads a buffer
larger than the L2 cache, n times; the other does so too and runs the operator after each read. The difference, divided
by n, is one run: launch included, the host's work and the cost of the clock left out. The buffer is read, not written:
what is left in the cache is clean, so that no write-back of the benchmark's own data competes with the operator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from benchmarks.kernel_bench.case import Machine, Run

_PRODUCT = 8192
_COPY_BYTES = 1 << 30


class GraphTimer:
    """Times operators on one device.

    Attributes:
        device: a CUDA device.
        replays: pairs of replays, of which the median is taken.
    """

    def __init__(self, device: torch.device, *, replays: int) -> None:
        self.device, self.replays = device, replays
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        # Two and a half times the cache; int32, of which a sum reads every byte once.
        self._other_data = torch.zeros(l2_bytes * 5 // 8, dtype=torch.int32, device=device)
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    def time_us(self, run: Run, restore: Run | None = None) -> float:
        """Median time of one run in microseconds, L2 cold."""
        return statistics.median(self._times_us(run, restore))

    def fastest_us(self, run: Run) -> float:
        """The least of the times: of a rate that others are held against, what the device can do at its full clock."""
        return min(self._times_us(run))

    def _times_us(self, run: Run, restore: Run | None = None) -> list[float]:
        copies = self._copies(run)
        alone, together = (self._capture(copies, restore, part) for part in (None, run))
        differences = []
        for _ in range(self.replays):
            without = _elapsed_us(alone.replay)
            differences.append((_elapsed_us(together.replay) - without) / copies)
        return differences

    def _copies(self, run: Run) -> int:
        """Enough runs of the operator for some milliseconds; warms it up on the way."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        return min(max(int(4000 / max(_elapsed_us(run), 1.0)), 4), 40)

    def _capture(self, copies: int, restore: Run | None, run: Run | None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(copies):
                if restore is not None:
                    restore()
                torch.sum(self._other_data, dim=0, dtype=torch.int64, out=self._total)
                if run is not None:
                    run()
        for _ in range(2):
            graph.replay()
        return graph


def time_eagerly_us(run: Run, *, repeats: int) -> float:
    """Median time of one run in microseconds on the host's clock, waiting included: for references, not for kernels."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    # The first run allocates and loads libraries.
    return statistics.median(times[1:])


def measure_machine(timer: GraphTimer) -> Machine:
    """Measure how fast this device copies and multiplies, and the time of its smallest kernel."""
    device = timer.device
    # By a kernel: a copy of this size from one tensor to another is a memcpy node in a graph, which reached 2.8 TB/s
    # where kernels reach 4.2.
    source, target = torch.ones(2, _COPY_BYTES // 4, device=device)
    copy_us = timer.fastest_us(lambda: torch.neg(source, out=target))
    left, right = torch.randn(2, _PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    product_us = timer.fastest_us(lambda: torch.mm(left, right, out=product))
    small = torch.zeros(1, device=device)
    return Machine(
        name=torch.cuda.get_device_name(device),
        copy_bytes_per_s=2 * _COPY_BYTES / copy_us * 1e6,
        flops_per_s=2 * _PRODUCT**3 / product_us * 1e6,
        launch_us=timer.time_us(lambda: small.add_(1)),
    )


def _elapsed_us(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)
