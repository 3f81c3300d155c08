"""When a session's next commit comes and what it will mean, by those of late: whether a step may be in its way.

A step that is begun behind another one is in the way of a commit that comes before it has begun: what the commit asks
for waits for both. Whether that matters hangs on whether the committed tokens are in the tree. Where they are, it has
gone on from there already; where they are not, nothing is known until the new root has been computed.
"""

from bisect import bisect_right, insort
from collections import deque

# Times between commits that are remembered: a target's rounds change slowly, its sessions come and go.
_REMEMBERED = 16
# How much of what is known of missed roots the last commit takes on.
_MISS_RATE = 0.1


class CommitForecast:
    """One session's commits.

    Attributes:
        miss: the chance that a commit's root has to be computed first.
    """

    def __init__(self) -> None:
        self.miss = 0.0
        self._last_ns = 0
        self._times: deque[int] = deque(maxlen=_REMEMBERED)
        # The same in ascending order.
        self._sorted: list[int] = []

    def note(self, now_ns: int, *, is_missed: bool) -> None:
        """A commit."""
        if self._last_ns:
            if len(self._times) == _REMEMBERED:
                self._sorted.remove(self._times[0])
            self._times.append(now_ns - self._last_ns)
            insort(self._sorted, now_ns - self._last_ns)
        self._last_ns = now_ns
        self.miss += _MISS_RATE * (is_missed - self.miss)

    def chance(self, now_ns: int, until_ns: int) -> float:
        """That the next commit, which has not come by now, comes until then; 0 where all earlier ones came sooner."""
        times, last = self._sorted, self._last_ns
        if not times or until_ns - last < times[0]:
            return 0.0
        over = bisect_right(times, now_ns - last)
        left = len(times) - over
        return (bisect_right(times, until_ns - last) - over) / left if left else 0.0
