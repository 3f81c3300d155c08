"""Whether a request may wait, decided when it arrives: the queue is bounded in number and in time.

With P places that are all taken, and runs of r seconds on average, a place becomes free every r / P seconds (Little's
law). So the k-th of the queue waits

    wait(k) = k r / P

whatever the mix of lengths, with no model of the target. A queue half as long as the places are many makes a request
wait half as long as it runs. By default that is the most: steps take longer, too, where all places are taken, and so
what a request takes under overload stays within twice of what it takes else. A bound in seconds can be set beside it,
for those who wait for the first token.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from outrider.coordinator.sessions import clock
from outrider.errors import Overloaded

# Runs over which the average run reaches back.
_REMEMBERED_RUNS = 32
# A request of the most choices finds room in an empty queue.
_LEAST_QUEUE = 16
# Clients that were refused together come back apart: each is told this many times as long, by chance.
_SPREAD = (1.0, 1.5)
_LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How full the coordinator is.

    Attributes:
        places: choices that may run at a time.
        free: places that nobody has.
        waiting: choices in the queue.
    """

    places: int
    free: int
    waiting: int


class Admission:
    """Times runs, and refuses what would wait too long.

    Args:
        max_queue: choices that may wait; None is half as many as there are places.
        max_wait_s: longest that a choice may expect to wait; None is no bound.
        retry_after_s: least that a refused client is told to wait.
        spread: of what refused clients are told, as a factor of it.
    """

    def __init__(
        self,
        *,
        max_queue: int | None,
        max_wait_s: float | None,
        retry_after_s: float,
        spread: Callable[[], float] = lambda: random.uniform(*_SPREAD),
    ) -> None:
        self._max_queue, self._max_wait_s = max_queue, max_wait_s
        self._retry_after_s, self._spread = retry_after_s, spread
        self._started_ns: dict[int, int] = {}
        self._sum_started_ns = 0
        self._ended_runs = 0
        self._mean_run_ns = 0.0

    def note_start(self, session_id: int) -> None:
        """A choice has been given a place."""
        self._forget(session_id)
        now_ns = self._started_ns[session_id] = clock.now_ns()
        self._sum_started_ns += now_ns

    def note_end(self, session_id: int) -> None:
        """A choice has left, with its place if it had one."""
        started_ns = self._forget(session_id)
        if started_ns is None:
            return
        self._ended_runs += 1
        weight = 1 / min(self._ended_runs, _REMEMBERED_RUNS)
        self._mean_run_ns += weight * (clock.now_ns() - started_ns - self._mean_run_ns)

    def _forget(self, session_id: int) -> int | None:
        started_ns = self._started_ns.pop(session_id, None)
        self._sum_started_ns -= started_ns or 0
        return started_ns

    @property
    def run_s(self) -> float:
        """What a run takes on average: of those that have ended, or of those that go on where that is longer by now."""
        running = len(self._started_ns)
        age_ns = clock.now_ns() - self._sum_started_ns / running if running else 0.0
        return max(self._mean_run_ns, age_ns) / 1e9

    def expected_wait_s(self, rank: int, places: int) -> float:
        """How long the choice of this rank in the queue waits, from 1; 0 for one that need not wait."""
        return max(0, rank) * self.run_s / max(1, places)

    def check(self, choices: int, occupancy: Occupancy) -> None:
        """Whether a request of so many choices may come in.

        Raises:
            Overloaded: it would find the queue full, or wait too long for its first choice.
        """
        places, rank = occupancy.places, occupancy.waiting - occupancy.free
        most = max(places // 2, _LEAST_QUEUE) if self._max_queue is None else self._max_queue
        wait_s = self.expected_wait_s(rank + 1, places)
        if rank + choices > most:
            raise self._refusal(f"the queue of {most} requests is full", wait_s)
        if self._max_wait_s is not None and wait_s > self._max_wait_s:
            raise self._refusal(f"it would wait {wait_s:.3g} s, at most {self._max_wait_s:g} s are allowed", wait_s)

    def _refusal(self, reason: str, wait_s: float) -> Overloaded:
        """Clients come back when what is in the queue now has begun, each at a time of its own."""
        retry_s = max(self._retry_after_s, min(wait_s, _LONGEST_RETRY_S)) * self._spread()
        return Overloaded(f"{reason}; try again in {math.ceil(retry_s)} s", retry_after_s=retry_s)
