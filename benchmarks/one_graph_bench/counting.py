"""What rounds ask of CUDA, counted by torch's profiler."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchmarks.one_graph_bench.drive import Sessions
from benchmarks.target_bench.trace import count_calls
from torch.profiler import ProfilerActivity, profile

from outrider.target_worker.verifier import Verifier

# The profiler waits for the device itself, once, when it ends.
_OF_THE_PROFILER = "cudaDeviceSynchronize"


@dataclass(frozen=True, kw_only=True)
class RoundCalls:
    """A round's calls of CUDA, from its begin to its result, which is waited for by looking.

    Attributes:
        rounds: counted over.
        graph_launches: a round.
        waits: calls that wait for the device, a round, but for the profiler's own.
        kernels: on the device, a round; copies and fills included.
        host_ms: of the host, from the begin of a round until all is launched.
        calls: by name, a round.
    """

    rounds: int
    graph_launches: float
    waits: float
    kernels: float
    host_ms: float
    calls: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def count_rounds(verifier: Verifier, sessions: Sessions, *, rounds: int) -> RoundCalls:
    """Counts over rounds of sessions that are warm."""
    calls: Counter[str] = Counter()
    kernels, host_s = 0, 0.0
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            requests = sessions.requests()
            began = time.perf_counter()
            pending = verifier.begin(requests)
            host_s += time.perf_counter() - began
            while not pending.forward.is_done:
                time.sleep(0)
            sessions.take(verifier.finish(pending).results)
    calls, kernels = count_calls(trace.events() or ())
    waits = sum(count for name, count in calls.items() if "Synchronize" in name and name != _OF_THE_PROFILER)
    return RoundCalls(
        rounds=rounds,
        graph_launches=sum(count for name, count in calls.items() if "GraphLaunch" in name) / rounds,
        waits=waits / rounds,
        kernels=kernels / rounds,
        host_ms=1e3 * host_s / rounds,
        calls={name: count / rounds for name, count in calls.most_common()},
    )
