"""What a step of a target costs, learned from the times that the target reports: T(n) for n rows.

Rows are counted over the whole step: tree nodes, roots and prefill tokens. Sizes are kept in buckets, each with an
average that forgets; beside them a straight line is fitted through all buckets. A bucket that was measured lately is
believed, one that was not falls back to the line, so that a size that once had bad luck is not avoided for ever. The
curve is read by interpolation and never falls, because a larger step never costs less and noise would otherwise make
the scheduler chase it.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
# What one step leaves of the weight of every bucket that it does not fall into: half is gone after some 140 steps.
_FORGET = 0.995
# Weight of the newest measurement of a bucket, once it has more than 1 / _NEWEST of them.
_NEWEST = 0.1
# Measurements that the line is worth beside a bucket's own.
_LINE_WEIGHT = 4.0


@dataclass
class _Bucket:
    rows: float = 0.0
    step_ns: float = 0.0
    weight: float = 0.0


class StepCost:
    """T(n) in nanoseconds.

    Args:
        base_ns: a step of one row, before anything was measured.
        row_ns: each further row, before anything was measured.
    """

    def __init__(self, *, base_ns: float = 5e6, row_ns: float = 1e5) -> None:
        self._prior = (base_ns, row_ns)
        self._buckets: dict[int, _Bucket] = {}
        self._curve: list[tuple[float, float]] = []
        self._slope = 0.0

    def observe(self, rows: int, step_ns: float) -> None:
        """One measured step."""
        if rows < 1 or step_ns <= 0:
            return
        for bucket in self._buckets.values():
            bucket.weight *= _FORGET
        bucket = self._buckets.setdefault(min(bisect_left(_EDGES, rows), len(_EDGES) - 1), _Bucket())
        # A step of several times the mean met something else (a page fault, a neighbour): it counts, but bounded.
        if bucket.weight > 2:
            step_ns = min(step_ns, 2 * bucket.step_ns)
        share = max(_NEWEST, 1 / (bucket.weight + 1))
        bucket.rows += share * (rows - bucket.rows)
        bucket.step_ns += share * (step_ns - bucket.step_ns)
        bucket.weight += 1
        self._fit()

    def _fit(self) -> None:
        buckets = [bucket for _, bucket in sorted(self._buckets.items())]
        total = sum(bucket.weight for bucket in buckets)
        mean_rows = sum(bucket.weight * bucket.rows for bucket in buckets) / total
        mean_ns = sum(bucket.weight * bucket.step_ns for bucket in buckets) / total
        spread = sum(bucket.weight * (bucket.rows - mean_rows) ** 2 for bucket in buckets)
        covariance = sum(bucket.weight * (bucket.rows - mean_rows) * (bucket.step_ns - mean_ns) for bucket in buckets)
        # One size alone has no slope: the prior's, in proportion to its base.
        base_ns, row_ns = self._prior
        self._slope = max(covariance / spread, 0.0) if spread > 1 else mean_ns * row_ns / base_ns
        highest, self._curve = 0.0, []
        for bucket in buckets:
            line_ns = mean_ns + self._slope * (bucket.rows - mean_rows)
            own = bucket.weight / (bucket.weight + _LINE_WEIGHT)
            highest = max(highest, line_ns + own * (bucket.step_ns - line_ns))
            self._curve.append((bucket.rows, highest))

    def predict_ns(self, rows: int) -> float:
        """Expected time of a step of `rows` rows."""
        if not self._curve:
            base_ns, row_ns = self._prior
            return base_ns + row_ns * (rows - 1)
        first_rows, first_ns = self._curve[0]
        if rows <= first_rows:
            return max(first_ns - self._slope * (first_rows - rows), 0.3 * first_ns)
        for (low_rows, low_ns), (high_rows, high_ns) in pairwise(self._curve):
            if rows <= high_rows:
                return low_ns + (high_ns - low_ns) * (rows - low_rows) / (high_rows - low_rows)
        last_rows, last_ns = self._curve[-1]
        return last_ns + self._slope * (rows - last_rows)
