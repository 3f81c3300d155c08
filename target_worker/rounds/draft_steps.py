"""The number of growth steps of a resident drafter that pay before a round.

It is the number with the most expected tokens in the time of steps and round:

    (sessions + gained) / (time of the round + times of the steps)
    gained = hit rate x sum of the values that the steps expand

    value      of what a step expands: 1 for a root, else the chance that verification reaches the node; learned for
               the first, second, .. step of a round, for each session
    hit rate   share of the places with children at which the target's choice was one of them: a property of drafter and
               text, whatever the load. Verified or not, so that it says what more rows would bring
    times      by bucket, of rounds and of steps: so that what is learned under one load serves under another

A step that catches up, with a prompt or after rounds without steps, says nothing of those that follow. A part of the
time goes to one step more than pays, so that a drafter that has become better is noticed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Steps before a round: at most, and before anything was measured.
MOST_STEPS, _FIRST_STEPS = 8, 4
# Share of the newest step in its value.
_STEP_SHARE = 0.1
# Places that are remembered, and the most of them that one round makes forget.
_MOST_TRIALS, _MOST_FORGOTTEN = 128, 0.2
# What a step expands beyond the one before it, and the hit rate, before anything was measured.
_PRIOR_DECAY, _PRIOR_HITS = 0.8, 0.6
# Part of the rounds' time for steps that are not known to pay; no more is saved up than several steps take.
_EXPLORED, _MOST_SAVED_STEPS = 0.01, 4

Floats = npt.NDArray[np.float64]
RoundRates = Callable[[Floats, float, Floats], Floats]
"""Expected tokens a nanosecond: given accepted nodes, hit rate and time of the steps, for each number of steps."""


class DraftSteps:
    """What steps and rounds have brought, and the number of steps that follows from it.

    Args:
        most: steps before a round.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self._values = _PRIOR_DECAY ** np.arange(most)
        self._hits, self._trials = _PRIOR_HITS * _MOST_TRIALS / 4, _MOST_TRIALS / 4
        self._saved_ns = 0.0

    def choose(self, sessions: int, times_ns: Sequence[float], rates: RoundRates) -> int:
        """Return how many steps to run before the next round.

        Args:
            sessions: that are drafted, and may run.
            times_ns: of the first, second, .. step; none before anything was measured.
            rates: of rounds.
        """
        if not sessions:
            return 0
        if not times_ns:
            return min(_FIRST_STEPS, self._most)
        hit_rate, own_ns = self._hits / self._trials, np.array(times_ns[: self._most])
        gained, drafted_ns = _sums(sessions * hit_rate * self._values), _sums(own_ns)
        count = int(rates(gained, hit_rate, drafted_ns).argmax())
        self._saved_ns = min(self._saved_ns, _MOST_SAVED_STEPS * float(own_ns.max()))
        if count < self._most and self._saved_ns >= own_ns[count]:
            self._saved_ns -= own_ns[count]
            count += 1
        return count

    def note_step(self, number: int, *, expanded: float, sessions: int) -> None:
        """Learn from a step.

        Args:
            number: of the steps before it in its round.
            expanded: sum of the values that it has expanded.
            sessions: as `choose` was given.
        """
        self._values[number] += _STEP_SHARE * (expanded / sessions - self._values[number])

    def note_catching_up(self, step_ns: float) -> None:
        """Take note of a step that has computed committed tokens for the most part: what it is worth comes later."""
        self._saved_ns = max(self._saved_ns - step_ns, -_MOST_SAVED_STEPS * step_ns)

    def note_round(self, *, hits: int, misses: int, time_ns: float) -> None:
        """Learn from a round with verified rows.

        Args:
            hits: places with children at which the target's choice was one of them.
            misses: places with children at which it was none.
            time_ns: of the round and the steps before it.
        """
        trials = hits + misses
        kept = 1 - min(trials / _MOST_TRIALS, _MOST_FORGOTTEN)
        self._hits, self._trials = kept * self._hits + hits, kept * self._trials + trials
        self._saved_ns += _EXPLORED * time_ns


def _sums(values: Any) -> Floats:
    """Sums of the first 0, 1, .. values."""
    return np.concatenate(([0.0], np.cumsum(values)))
