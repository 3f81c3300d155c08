"""Loops by which a calibration learns from committed tokens; plain Python where numba is missing.

Shapes: T buckets, n parents, K children of a parent, B bins of the estimate.
"""

from typing import Any

import numpy as np

from outrider.kernels.compiled import compiled


@compiled
def count_trial(bucket: int, came_true: int, estimate: float, arrays: Any) -> None:
    """Count a child of a parent on the committed path.

    Args:
        came_true: 1 if it was committed, else 0.
        estimate: given out for it.
        arrays: `LearnedBuckets.arrays`; written.
    """
    learned, tried, counts, predicted, edges, per_rule, strength, decay = arrays
    place = bucket // per_rule * (len(edges) + 1)
    for edge in edges:
        if edge < estimate:
            place += 1
    counts[0, place] += 1
    counts[1, place] += came_true
    predicted[place] += estimate
    tried[1, bucket] = tried[1, bucket] * decay + came_true
    tried[2, bucket] = tried[2, bucket] * decay + 1
    learned[bucket] = (tried[0, bucket] + tried[1, bucket]) / (strength + tried[2, bucket])


@compiled
def observe_parents(seen: Any, arrays: Any) -> None:
    """Count the children of parents on a committed path, one parent after the other.

    Args:
        seen: int64 [n, 2 + K] which child was committed (negative if none was), how many there are, their buckets.
        arrays: `LearnedBuckets.arrays`; written.
    """
    learned = arrays[0]
    for parent in range(len(seen)):
        total, count = 0.0, seen[parent, 1]
        estimates = np.empty(count, np.float64)
        for rank in range(count):
            estimates[rank] = learned[seen[parent, 2 + rank]]
            total += estimates[rank]
        for rank in range(count):
            # As estimates are given out.
            estimate = estimates[rank] / total if total > 1 else estimates[rank]
            count_trial(seen[parent, 2 + rank], 1 if rank == seen[parent, 0] else 0, estimate, arrays)
