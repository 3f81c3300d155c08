"""Load generator health: event loop lag and CPU use.

What a busy client adds to a latency it would put down to the server.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_INTERVAL_S = 0.02
# Above this share of a core, what waits to be read waits for long now and then.
_BUSY_SHARE = 0.85
# Of the median time to first token: more is not the server's.
_LAG_SHARE, _LEAST_LAG_MS = 0.1, 10.0


@dataclass(kw_only=True)
class ClientLoad:
    """One client process.

    Attributes:
        loop_lag_s: by how much it woke later than it wanted to, every 20 ms.
        cpu_share: of a core, that the thread of the event loop used.
    """

    loop_lag_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0


class LagMeter:
    """Measures this event loop while the `async with` block runs."""

    def __init__(self) -> None:
        self.load = ClientLoad()

    async def __aenter__(self) -> ClientLoad:
        self._began_s, self._began_cpu_s = time.monotonic(), time.thread_time()
        self._task = asyncio.create_task(self._watch())
        return self.load

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        wall_s = time.monotonic() - self._began_s
        self.load.cpu_share = (time.thread_time() - self._began_cpu_s) / wall_s if wall_s > 0 else 0.0

    async def _watch(self) -> None:
        while True:
            due_s = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self.load.loop_lag_s.append(max(0.0, time.monotonic() - due_s))


def client_figures(loads: Sequence[ClientLoad], start_lags_s: Sequence[float], median_ttft_ms: float) -> dict[str, Any]:
    """Return the load generator's lag and CPU figures.

    Args:
        start_lags_s: of each request, by how much the client was late with it of itself.
    """
    lags_ms = np.asarray([lag for load in loads for lag in load.loop_lag_s] or [0.0]) * 1e3
    starts_ms = np.asarray(list(start_lags_s) or [0.0]) * 1e3
    cpu_share = max((load.cpu_share for load in loads), default=0.0)
    p99_lag_ms, p99_start_ms = float(np.percentile(lags_ms, 99)), float(np.percentile(starts_ms, 99))
    bearable_ms = max(_LEAST_LAG_MS, _LAG_SHARE * median_ttft_ms)
    return {
        "client_processes": len(loads),
        "client_cpu_share": cpu_share,
        "client_p99_loop_lag_ms": p99_lag_ms,
        "client_max_loop_lag_ms": float(lags_ms.max()),
        "client_p99_start_lag_ms": p99_start_ms,
        "client_is_bottleneck": cpu_share > _BUSY_SHARE or max(p99_lag_ms, p99_start_ms) > bearable_ms,
    }
