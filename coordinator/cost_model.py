"""What a step of a target costs, learned from the times that the target reports: T(n) for n rows.

Rows are counted over the whole step: tree nodes, roots and prefill tokens. A target on a GPU fills a step up to the
next of a ladder of sizes, so its T is a staircase; on a CPU it is nearly a line. Both are the same model here: each
rung of the ladder has a level of its own, and within the rungs T rises by one common slope, which is near 0 for a
staircase and that of the line for a line.

    T(n) = level(rung of n) + rise * (n - middle of the rung)

A rung that was measured lately is believed. Any other is hoped to go on in the line of those below it, as far as the
next one above that is known: so a size that once had bad luck is not avoided for ever, and prompts, which are hundreds
of rows, say nothing of what a few more would cost. That line, where too few sizes have been seen to tell, rises by as
little as a memory-bound step's does. Below all sizes that were measured the line goes on down, as far as half of what
the smallest of them took. Such hopes are corrected by the first step that follows them, while a fear would never be:
steps of such sizes would not come.

T never falls with n, because a larger step never costs less, and noise would otherwise make the scheduler chase it.
Where rungs' levels fall, they are pooled by what each is worth, so that a slow first step of a few rows does not make
all larger ones look as slow.
"""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED
from outrider.coordinator.choice_kernels import hoped_levels, predict_steps, rising

# The rungs of engine/buckets.py, and beyond the largest captured one as many more.
EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192)
# What one step leaves of the weight of every rung that it does not fall into: half is gone after some 140 steps.
_FORGET = 0.995
# Weight of the newest measurement of a rung, once it has more than 1 / _NEWEST of them.
_NEWEST = 0.1
# Measurements that the line is worth beside a rung's own.
_LINE_WEIGHT = 2.0
# The prior's slope is worth this much spread of sizes (rows squared, summed over steps).
_PRIOR_SPREAD = 64.0
# Sizes up to which so many of all steps are: prompts are no usual ones.
_USUAL = 0.9
# A rung that was measured less than this, by now, counts as unknown.
_KNOWN_WEIGHT = 0.5
# Of a size that was hardly seen, how many times what was expected a step counts at most.
_MOST_UNEXPECTED = 4.0
# Of what the smallest steps measured took, smaller ones are hoped to take this share at least.
_LEAST_BELOW = 0.5
# Of what a rung's steps took, its middle takes this share at least, whatever the rise says.
_LEAST_OWN = 0.2
# Beside noise, and what else than its rows a step's time follows from.
_MOST_OF_LARGER = 1.5
# What a rung without measurements is worth beside those that have some.
_LEAST_WEIGHT = 0.01

Floats = npt.NDArray[np.float64]


class StepCost:
    """T(n) in nanoseconds.

    Args:
        base_ns: a step of one row, before anything was measured.
        row_ns: each further row, before anything was measured.
    """

    def __init__(self, *, base_ns: float = 5e6, row_ns: float = 1e4) -> None:
        self._prior = (base_ns, row_ns)
        count = len(EDGES)
        self._high = np.array(EDGES, dtype=np.float64)
        self._low = np.concatenate(([1.0], self._high[:-1] + 1))
        self._middle = (self._low + self._high) / 2
        self._rows, self._step_ns, self._weight = np.zeros(count), np.zeros(count), np.zeros(count)
        # Within rungs: spread of rows, and how the time goes with it.
        self._inner_spread = self._inner_covariance = 0.0
        self._slope = row_ns
        # First and last size of every rung, and what steps of these take.
        ends = (self._low, self._high, base_ns + row_ns * (self._low - 1), base_ns + row_ns * (self._high - 1))
        self._rungs = np.stack(ends)

    def observe(self, rows: int, step_ns: float) -> None:
        """One measured step."""
        if rows < 1 or step_ns <= 0:
            return
        own_ns = step_ns
        self._weight *= _FORGET
        place = self._place(rows)
        weight = float(self._weight[place])
        # A step of several times what is expected met something else (a page fault, a neighbour, a kernel that was
        # compiled): it counts, but bounded.
        if weight > 2:
            step_ns = min(step_ns, 2 * float(self._step_ns[place]))
        elif self._weight.sum() > 2:
            step_ns = min(step_ns, _MOST_UNEXPECTED * self.predict_ns(rows))
        rows_off, ns_off = rows - float(self._rows[place]), step_ns - float(self._step_ns[place])
        share = max(_NEWEST, 1 / (weight + 1))
        self._inner_spread *= _FORGET
        self._inner_covariance *= _FORGET
        if weight > _KNOWN_WEIGHT:
            self._inner_spread += (1 - share) * rows_off * rows_off
            self._inner_covariance += (1 - share) * rows_off * ns_off
        self._rows[place] += share * rows_off
        self._step_ns[place] += share * ns_off
        self._weight[place] = weight + 1
        # No smaller step costs more than this one did; a single time that cannot be halves what is known at most.
        smaller = self._step_ns[:place]
        np.minimum(smaller, np.maximum(_MOST_OF_LARGER * own_ns, smaller / 2), out=smaller)
        self._fit()

    @staticmethod
    def _place(rows: int) -> int:
        return min(bisect_left(EDGES, rows), len(EDGES) - 1)

    def _fit(self) -> None:
        weight = self._weight
        base_ns, row_ns = self._prior
        self._slope = self._line_slope(len(weight))
        usual = self._line_slope(1 + int(np.searchsorted(weight.cumsum(), _USUAL * weight.sum())))
        # What the rungs' own steps say of the rise within them; until they do, it is that of the usual sizes.
        inner = (self._inner_covariance + _PRIOR_SPREAD * usual) / (self._inner_spread + _PRIOR_SPREAD)
        rise = min(max(inner, 0.0), 2 * usual)
        own = weight / (weight + _LINE_WEIGHT)
        measured = self._middle, self._rows, self._step_ns, weight
        line_ns = hoped_levels(*measured, _KNOWN_WEIGHT, row_ns / base_ns, _PRIOR_SPREAD, usual, _LEAST_BELOW)
        own_ns = np.maximum(self._step_ns + rise * (self._middle - self._rows), _LEAST_OWN * self._step_ns)
        level = rising(line_ns + own * (own_ns - line_ns), weight + _LEAST_WEIGHT)
        half = rise * (self._high - self._low) / 2
        # Low and high end of every rung in turn, none below the one before.
        ends = np.maximum.accumulate(np.stack((level - half, level + half), axis=1).ravel())
        self._rungs[2], self._rungs[3] = ends[0::2], ends[1::2]

    def _line_slope(self, rungs: int) -> float:
        """Nanoseconds a row, of a line through the first rungs."""
        weight, rows, step_ns = self._weight[:rungs], self._rows[:rungs], self._step_ns[:rungs]
        total = float(weight.sum())
        mean_rows, mean_ns = float(weight @ rows) / total, float(weight @ step_ns) / total
        off = rows - mean_rows
        base_ns, row_ns = self._prior
        spread = float(weight @ (off * off)) + _PRIOR_SPREAD
        covariance = float(weight @ (off * (step_ns - mean_ns))) + _PRIOR_SPREAD * mean_ns * row_ns / base_ns
        return max(covariance / spread, 0.0)

    def predict_ns(self, rows: int) -> float:
        """Expected time of a step of `rows` rows."""
        return float(self.predict_many_ns(np.array([rows]))[0])

    def predict_many_ns(self, rows: npt.NDArray[np.int64]) -> Floats:
        """[m] the same of numbers of rows [m]."""
        if IS_COMPILED:
            return predict_steps(self._rungs, self._slope, rows)
        place = np.minimum(np.searchsorted(self._high, rows), len(EDGES) - 1)
        low, high, at_low, at_high = self._rungs[:, place]
        share = np.clip((rows - low) / np.maximum(high - low, 1.0), 0.0, 1.0)
        inside = at_low + share * (at_high - at_low)
        return inside + np.maximum(rows - self._high[-1], 0) * self._slope

    def is_known(self, rows: int) -> bool:
        """Whether steps of about this size were measured lately."""
        return bool(self._weight[self._place(rows)] >= _KNOWN_WEIGHT)
