"""What a step of a target costs, learned from the times that the target reports: T(n) for n rows.

Rows are counted over the whole step: tree nodes, roots and prefill tokens. Times are kept in buckets of n, each an
exponential average, and read between the buckets by linear interpolation; the curve is made non-decreasing, because
a larger step never costs less and noise would otherwise make the scheduler chase it.
"""

from bisect import bisect_left
from itertools import pairwise

_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)


class StepCost:
    """T(n) in nanoseconds.

    Args:
        base_ns: a step of one row, before anything was measured.
        row_ns: each further row, before anything was measured.
        decay: weight of the newest measurement, once a bucket has more than 1 / decay of them.
    """

    def __init__(self, *, base_ns: float = 5e6, row_ns: float = 1e5, decay: float = 0.1) -> None:
        self._prior = (base_ns, row_ns)
        self._decay = decay
        self._buckets: dict[int, tuple[float, float, int]] = {}
        self._curve: list[tuple[float, float]] = []

    def observe(self, rows: int, step_ns: float) -> None:
        """One measured step."""
        if rows < 1 or step_ns <= 0:
            return
        bucket = min(bisect_left(_EDGES, rows), len(_EDGES) - 1)
        mean_rows, mean_ns, count = self._buckets.get(bucket, (0.0, 0.0, 0))
        weight = max(self._decay, 1 / (count + 1))
        # A step of several times the mean met something else (a page fault, a neighbour): its weight is bounded.
        seen_ns = min(step_ns, 3 * mean_ns) if count > 2 else step_ns
        mean_rows += weight * (rows - mean_rows)
        mean_ns += weight * (seen_ns - mean_ns)
        self._buckets[bucket] = (mean_rows, mean_ns, count + 1)
        self._curve = self._fit()

    def _fit(self) -> list[tuple[float, float]]:
        points = [(rows, ns) for _, (rows, ns, _) in sorted(self._buckets.items())]
        highest, curve = 0.0, []
        for rows, ns in points:
            highest = max(highest, ns)
            curve.append((rows, highest))
        return curve

    def predict_ns(self, rows: int) -> float:
        """Expected time of a step of `rows` rows."""
        base_ns, row_ns = self._prior
        curve = self._curve
        if not curve:
            return base_ns + row_ns * (rows - 1)
        first_rows, first_ns = curve[0]
        # Unmeasured sizes: slope from the ends of the curve, or the prior's slope in proportion to its base.
        slope = first_ns * row_ns / base_ns
        if len(curve) > 1:
            (low_rows, low_ns), (high_rows, high_ns) = curve[0], curve[-1]
            slope = (high_ns - low_ns) / (high_rows - low_rows)
        if rows <= first_rows:
            return max(first_ns - slope * (first_rows - rows), 0.3 * first_ns)
        for (low_rows, low_ns), (high_rows, high_ns) in pairwise(curve):
            if rows <= high_rows:
                return low_ns + (high_ns - low_ns) * (rows - low_rows) / (high_rows - low_rows)
        last_rows, last_ns = curve[-1]
        return last_ns + slope * (rows - last_rows)
