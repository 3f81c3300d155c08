"""Watches a target's steps: one that does not come back costs the target its sessions, not the clients their answers.

Heartbeats do not tell: they go on while a GPU hangs, or while the stream of results alone is cut. What may be compiling
is waited for: the worker says so (`WorkerLoad.preparing`; see `outrider.step_watch`), and meanwhile no time counts.
"""

import asyncio
from collections.abc import Callable

from outrider.coordinator.lane import TargetLane
from outrider.step_watch import Stopwatch, patience_s

_LOOK_S = 0.25
_NS = 1e9


async def watch_steps(lane: TargetLane, *, least_s: float, on_hang: Callable[[str], None]) -> None:
    """Looks on until a step is overdue; then calls `on_hang` with the reason, and ends.

    Args:
        lane: of the target.
        least_s: no step is overdue before.
        on_hang: called once.
    """
    stopwatch = Stopwatch(_LOOK_S, asyncio.get_running_loop().time)
    while True:
        await asyncio.sleep(_LOOK_S)
        flight = lane.flights[0] if lane.flights else None
        counts = flight is not None and not flight.result.done() and not lane.is_preparing
        lasted_s = stopwatch.look(flight.submitted_ns if flight is not None and counts else None)
        if flight is None:
            continue
        limit_s = patience_s(lane.cost.predict_ns(flight.rows) / _NS, least_s=least_s)
        if lasted_s > limit_s:
            on_hang(f"its step of {flight.rows} rows has not come back for {lasted_s:.1f} s")
            return
