"""Admission of requests to the queue, decided when it arrives: the queue is bounded in number, in memory and in time.

With P places that are all taken, and runs of r seconds on average, a place becomes free every r / P seconds (Little's
law). So the k-th choice of the queue waits

    wait(k) = k r / P

whatever the mix of lengths, with no model of the target. By default as many requests may wait as begin within a
minute, and never fewer than a thousand, or four for each place: a client would rather wait than be sent away. A bound
in seconds can be set beside it, for those who wait for the first token.

Whoever is refused is told when to come back, each later than the one before by the time that a request takes to leave
the queue: so each finds room, unless others come in between.
"""

import math
from dataclasses import dataclass

from outrider.coordinator.sessions import clock
from outrider.errors import Overloaded

# Runs over which the average run reaches back.
_REMEMBERED_RUNS = 32
# Requests that may wait by default: what begins in so many seconds, at least so many, or so many for each place.
_GOAL_S, _LEAST_QUEUE, _QUEUE_OF_PLACE = 60.0, 1000, 4
# Of their prompts, tokens: 40 bytes each.
_MOST_TOKENS = 16 << 20
_LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Occupancy of the coordinator.

    Attributes:
        places: choices that may run at a time.
        free: places that nobody has.
        waiting: choices in the queue.
        entries: requests that these are of.
        tokens: of their prompts.
    """

    places: int
    free: int
    waiting: int
    entries: int
    tokens: int = 0


class Admission:
    """Times runs, and refuses what would wait too long.

    Args:
        max_queue: requests that may wait; None is as many as the module says.
        max_wait_s: longest that a request may expect to wait; None is no bound.
    """

    def __init__(self, *, max_queue: int | None, max_wait_s: float | None, retry_after_s: float) -> None:
        self._max_queue, self._max_wait_s = max_queue, max_wait_s
        self._retry_after_s = retry_after_s
        self._started_ns: dict[int, int] = {}
        self._sum_started_ns = 0
        self._ended_runs = 0
        self._mean_run_ns = 0.0
        # When the last client that was refused comes back.
        self._last_return_ns = 0

    def note_start(self, session_id: int) -> None:
        """Note that a choice has been given a place."""
        self._forget(session_id)
        now_ns = self._started_ns[session_id] = clock.now_ns()
        self._sum_started_ns += now_ns

    def note_end(self, session_id: int) -> None:
        """Note that a choice has left, with its place if it had one."""
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
        """Mean run time in seconds, of ended choices or of running ones if that is longer."""
        running = len(self._started_ns)
        age_ns = clock.now_ns() - self._sum_started_ns / running if running else 0.0
        return max(self._mean_run_ns, age_ns) / 1e9

    def expected_wait_s(self, rank: int, places: int) -> float:
        """Return the expected wait of the choice at this rank of the queue, from 1, in seconds."""
        return max(0, rank) * self.run_s / max(1, places)

    def check(self, choices: int, occupancy: Occupancy) -> None:
        """Look whether a request of so many choices may come in.

        Raises:
            Overloaded: it would find the queue full, or wait too long for its first choice.
        """
        rank = occupancy.waiting - occupancy.free
        if rank + choices <= 0:
            return
        most = self._most(occupancy.places) if self._max_queue is None else self._max_queue
        wait_s = self.expected_wait_s(rank + 1, occupancy.places)
        if occupancy.entries >= most:
            raise self._refusal(f"the queue of {most} requests is full", occupancy)
        if occupancy.tokens >= _MOST_TOKENS:
            raise self._refusal(f"the queue is full: prompts of {occupancy.tokens} tokens wait", occupancy)
        if self._max_wait_s is not None and wait_s > self._max_wait_s:
            too_long_s = wait_s - self._max_wait_s
            reason = f"it would wait {wait_s:.3g} s, at most {self._max_wait_s:g} s are allowed"
            raise self._refusal(reason, occupancy, least_s=too_long_s)

    def _most(self, places: int) -> int:
        begin = int(_GOAL_S * places / self.run_s) if self.run_s else 0
        return max(_LEAST_QUEUE, _QUEUE_OF_PLACE * places, begin)

    def _refusal(self, reason: str, occupancy: Occupancy, *, least_s: float = 0.0) -> Overloaded:
        """Send a client away until a request has left the queue for it, and for each that was sent away before it."""
        choices = occupancy.waiting / occupancy.entries if occupancy.entries else 1.0
        leaving_ns = round(1e9 * choices * self.run_s / max(1, occupancy.places))
        now_ns = clock.now_ns()
        earliest_ns = now_ns + round(1e9 * max(self._retry_after_s, least_s))
        # Some do not wait for their turn, or never come back.
        longest_s = max(_LONGEST_RETRY_S, self.expected_wait_s(occupancy.waiting, occupancy.places))
        latest_ns = earliest_ns + round(1e9 * longest_s)
        self._last_return_ns = min(latest_ns, max(earliest_ns, self._last_return_ns + leaving_ns))
        retry_s = (self._last_return_ns - now_ns) / 1e9
        return Overloaded(f"{reason}; try again in {math.ceil(retry_s)} s", retry_after_s=retry_s)
