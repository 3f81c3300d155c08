"""What committed tokens teach a calibration, as one loop over all parents of a commit.

For where numba is there; without it `AcceptanceCalibration.observe` does the same, parent by parent.

Shapes: T buckets, n parents, K children of a parent.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled


@compiled
def observe_parents(  # noqa: PLR0917
    seen: Any, learned: Any, trials: Any, counts: Any, predicted: Any, edges: Any, per_rule: int, decay: float,
    strength: float,
) -> None:  # fmt: skip
    """Counts the children of parents on a committed path, one parent after the other.

    Args:
        seen: int64 [n, 2 + K] which child was committed (negative if none was), how many there are, their buckets.
        learned: float32 [T] the estimates, written.
        trials: float64 [3, T] hits that the prior is worth; hits and trials so far, written.
        counts: int64 [2, B] children, and those that were committed, by bins of the estimate, written.
        predicted: float64 [B] sum of the estimates, written.
        edges: float64 what parts the bins.
        per_rule: buckets of a rule.
        decay: what one trial leaves of the bucket's earlier ones.
        strength: trials that the prior is worth.
    """
    for parent in range(len(seen)):
        total, count = 0.0, seen[parent, 1]
        estimates = np.empty(count, np.float64)
        for rank in range(count):
            estimates[rank] = learned[seen[parent, 2 + rank]]
            total += estimates[rank]
        for rank in range(count):
            bucket, came_true = seen[parent, 2 + rank], 1 if rank == seen[parent, 0] else 0
            # As estimates are given out.
            estimate = estimates[rank] / total if total > 1 else estimates[rank]
            place = 0
            while place < len(edges) and edges[place] < estimate:
                place += 1
            place += bucket // per_rule * (len(edges) + 1)
            counts[0, place] += 1
            counts[1, place] += came_true
            predicted[place] += estimate
            trials[1, bucket] = trials[1, bucket] * decay + came_true
            trials[2, bucket] = trials[2, bucket] * decay + 1
            learned[bucket] = (trials[0, bucket] + trials[1, bucket]) / (strength + trials[2, bucket])
