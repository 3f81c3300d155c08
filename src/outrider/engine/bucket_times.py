"""Times of empty steps of captured buckets."""

from collections.abc import Callable

import torch

# Passes over all buckets. Other work on the device lengthens one of them, seldom all.
_PASSES = 3


def time_buckets(count: int, launch: Callable[[int], None], stream: torch.cuda.Stream) -> list[float]:
    """Return nanoseconds of each bucket, the least of several passes over all of them."""
    least_ns = [float("inf")] * count
    with torch.cuda.stream(stream):
        for _ in range(_PASSES):
            for bucket in range(count):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # While the first step runs, the second is launched.
                launch(bucket)
                began.record()
                launch(bucket)
                ended.record()
                ended.synchronize()
                least_ns[bucket] = min(least_ns[bucket], 1e6 * began.elapsed_time(ended))
    return least_ns
