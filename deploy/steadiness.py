"""Damping of the autoscaler's advice: quick upwards, slow downwards. Pure.

Up to what was advised at every look of the last `up_s` at least; down, one at a time, where no look of the last
`down_s` advised as many. A count that had to be raised again soon after it was lowered is lowered later the next time.
"""

from collections import deque

# Between two workers that are ended.
_PAUSE_S = 5.0
# How many times `down_s` the wait may become.
_MOST_CAUTION = 8
# Looks are about a second apart: so much may lack at the far end of a span that counts as covered.
_SLACK_S = 0.5


class Steadiness:
    """Recent advice."""

    def __init__(self, *, up_s: float, down_s: float) -> None:
        self._up_s, self._down_s = up_s, down_s
        self._wait_s = down_s
        self._advised: deque[tuple[float, int]] = deque()
        self._raised_s = self._lowered_s = -float("inf")

    def forget(self) -> None:
        """Forget earlier advice: signals were lost."""
        self._advised.clear()

    def count(self, advised: int, now: int, now_s: float) -> int:
        """Return the count to have."""
        held = self._advised
        held.append((now_s, advised))
        while now_s - held[0][0] > self._wait_s + _SLACK_S:
            held.popleft()
        covered_s = now_s - held[0][0] + _SLACK_S
        least = min(count for at_s, count in held if now_s - at_s <= self._up_s)
        if least > now and covered_s >= self._up_s:
            return least
        most = max(count for _, count in held)
        if most < now and covered_s >= self._wait_s and now_s - self._lowered_s >= _PAUSE_S:
            return now - 1
        return now

    def note_change(self, change: int, now_s: float) -> None:
        """Note by how many the count has changed."""
        if change < 0:
            if now_s - self._raised_s > 2 * self._wait_s:
                self._wait_s = self._down_s
            self._lowered_s = now_s
        else:
            if now_s - self._lowered_s < 2 * self._wait_s:
                self._wait_s = min(2 * self._wait_s, _MOST_CAUTION * self._down_s)
            self._raised_s = now_s
