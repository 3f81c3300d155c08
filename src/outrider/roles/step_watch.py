"""Detection of what hangs: a step of a model, a silent peer (torch-free).

A step may take 10 times what steps of its size usually take, and 5 s at least. One of a size that has not run before
may be compiling, for minutes: until it is done the worker says so in its heartbeats (`WorkerLoad.preparing`), and
coordinators wait. A hung step does not stop heartbeats, and nothing can end it but the end of its process.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from outrider.errors import WorkerHung

LEAST_PATIENCE_S = 5.0
PATIENCE_STEPS = 10.0
# The longest that compiling a step is given.
_PREPARING_S = 600.0
_LOOK_S = 0.5


class Stopwatch:
    """Time that something has lasted, sampled at regular intervals.

    Where this whole process was stopped (a frozen container, a machine that slept), nobody else is to blame: between
    two looks at most twice their distance counts.

    Args:
        look_s: time between looks.
        now: the clock; the event loop's, where one looks.
    """

    def __init__(self, look_s: float, now: Callable[[], float]) -> None:
        self._look_s, self._now = look_s, now
        self._looked_s = now()
        self._what: Hashable = None
        self._lasted_s = 0.0

    def look(self, what: Hashable) -> float:
        """Seconds since `what` was seen first without anything else in between; None lasts no time."""
        now_s = self._now()
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * self._look_s), now_s
        self._lasted_s = self._lasted_s + passed_s if what is not None and what == self._what else 0.0
        self._what = what
        return self._lasted_s


def patience_s(usual_s: float, *, least_s: float) -> float:
    """Return the most time that a step with this usual time may take, in seconds."""
    return max(least_s, PATIENCE_STEPS * usual_s)


class _Running(NamedTuple):
    number: int
    since_s: float
    usual_s: float | None


class StepWatch:
    """Activity of a computing thread, set by the thread and watched by the event loop's thread."""

    def __init__(self) -> None:
        self._number = 0
        self._running: _Running | None = None

    def begin(self, usual_s: float | None) -> None:
        """Note that the next part of the work begins: a step, a capture. None: nobody knows how long it may take."""
        self._number += 1
        self._running = _Running(self._number, time.monotonic(), usual_s)

    def idle(self) -> None:
        """Note that there is nothing to do."""
        self._running = None

    @property
    def age_s(self) -> float:
        """Age of the running step in seconds; 0 if none runs."""
        running = self._running
        return 0.0 if running is None else time.monotonic() - running.since_s

    @property
    def is_preparing(self) -> bool:
        """True if the running step may be compiling."""
        running = self._running
        return running is not None and running.usual_s is None

    async def watch(self) -> None:
        """Look until cancelled; raise WorkerHung once a step has run longer than it may."""
        stopwatch = Stopwatch(_LOOK_S, asyncio.get_running_loop().time)
        while True:
            await asyncio.sleep(_LOOK_S)
            running = self._running
            lasted_s = stopwatch.look(running)
            if running is None:
                continue
            limit_s = _PREPARING_S if running.usual_s is None else patience_s(running.usual_s, least_s=LEAST_PATIENCE_S)
            if lasted_s > limit_s:
                raise WorkerHung(f"a step has been running for {lasted_s:.1f} s, {limit_s:.1f} s is the most it may")
