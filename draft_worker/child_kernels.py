"""Where the calibration files ranked children and what it estimates of them, as one loop.

For where numba is there; without it `AcceptanceCalibration.buckets` and `estimate` say the same with numpy.

Shapes: R parents, k children of each that are ranked, b of them that may become nodes.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled

MOST_BRANCHING = 7
"""From eight numbers on numpy sums in another order, and estimates would differ in their last bit."""

# Of tokens that may not be chosen: scores are not below.
_LEAST_SCORE = np.float32(-1e30)


@compiled
def estimate_children(  # noqa: PLR0917
    log_q: Any, scores: Any, temperature: Any, is_learned: Any, edges: Any, prior: Any, learned: Any, branching: int
) -> Any:
    """The calibration buckets and estimates of ranked children, [R, b] each, int64 and float32.

    Args:
        log_q: float32 [R, k].
        scores: float32 [R, k] log q + G.
        temperature: float32 [R].
        is_learned: bool [R]: where the calibration answers from what it has learned.
        edges: float32 [2, bins - 1] as of `AcceptanceCalibration`; so are `prior` and `learned`, [T].
        prior: see there.
        learned: see there.
        branching: b.
    """
    rows, last = log_q.shape
    per_rule = len(prior) // 3
    bins = edges.shape[1] + 1
    buckets = np.empty((rows, branching), np.int64)
    estimates = np.empty((rows, branching), np.float32)
    for row in range(rows):
        heat = temperature[row]
        table = learned if is_learned[row] else prior
        best = max(scores[row, 0], _LEAST_SCORE)
        total = np.float32(0)
        for rank in range(branching):
            if heat > 0:
                # The best child's gap is the second's.
                other = scores[row, 1 if rank == 0 and last > 1 else rank]
                bucket = per_rule + rank * bins + _place(edges[1], (best - max(other, _LEAST_SCORE)) * heat)
            else:
                bucket = rank * bins + _place(edges[0], -log_q[row, rank])
            buckets[row, rank] = bucket
            estimates[row, rank] = table[bucket]
            total += table[bucket]
        if total > 1:
            for rank in range(branching):
                estimates[row, rank] /= total
    return buckets, estimates


@compiled
def _place(edges: Any, value: float) -> int:
    """How many of the edges, which ascend, are below; what is no number is above all."""
    place = 0
    while place < len(edges) and not edges[place] >= value:
        place += 1
    return place


def warm_up() -> None:
    """Compiles the loop, or loads what was compiled, before anybody waits for it."""
    rows, table = np.zeros((0, 1), np.float32), np.zeros(1, np.float32)
    estimate_children(rows, rows, table[:0], np.zeros(0, np.bool_), np.zeros((2, 1), np.float32), table, table, 1)
