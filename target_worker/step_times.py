"""How long steps usually take: what the step thread may wait for, and what it lets others expect."""

import time
from collections.abc import Sequence

from outrider.target_worker.step_jobs import Flight

# So long before a step is expected to end, the thread does nothing but wait for it: a batch that comes now is begun
# after it.
_EXPECTED_EARLY_S = 0.0003


class StepTimes:
    """Of one target.

    Attributes:
        usual_s: by size of the step (`Flight.size`).
    """

    def __init__(self) -> None:
        self.usual_s: dict[int, float] = {}
        self._finished_s = 0.0

    def left_s(self, flight: Flight) -> float:
        """How long a step may be left to itself, in case a batch comes that could be begun beside it."""
        if flight.pending is None or not flight.may_overlap or flight.pending.forward.is_done:
            return 0.0
        usual_s = self.usual_s.get(flight.size, 0.0)
        return flight.begin_s + usual_s - _EXPECTED_EARLY_S - time.perf_counter()

    def expected_s(self, flight: Flight, *, may_compile: bool) -> float | None:
        """How long a step that has begun should take; None where nobody knows."""
        # What the device does by itself is compiled by now; where the host goes on launching, a kernel may be new.
        if may_compile and not flight.may_overlap:
            return None
        return self.usual_s.get(flight.size)

    def learn(self, flights: Sequence[Flight]) -> None:
        """The first of the steps under way is over."""
        first, size, now_s = flights[0], flights[0].size, time.perf_counter()
        # A step that began while another ran began with that one's end.
        taken_s = now_s - max(first.begin_s, self._finished_s)
        self._finished_s = now_s
        # A step that compiled something is soon forgotten.
        self.usual_s[size] = min(0.8 * self.usual_s.get(size, taken_s) + 0.2 * taken_s, 2 * taken_s)
        if len(flights) > 1:
            flights[1].begin_s = now_s
