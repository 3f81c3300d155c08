"""Histograms that cost a bisection: whole numbers go in, nothing is formatted before somebody reads."""

from bisect import bisect_left
from collections.abc import Sequence

_NS = 1_000_000_000


class Histogram:
    """Counts of values between bounds.

    Args:
        bounds: ascending; a value belongs to the first that is not below it.
        unit: values per unit that is shown; nanoseconds that are shown as seconds have 1e9.

    Attributes:
        counts: one more than the bounds: the last is of what is above all of them.
    """

    __slots__ = ("bounds", "counts", "total", "unit")

    def __init__(self, bounds: Sequence[int], *, unit: int = 1) -> None:
        self.bounds = tuple(bounds)
        self.unit = unit
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0

    def observe(self, value: int, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative buckets (upper bound, count) up to +Inf, and the sum, in the shown unit."""
        counts, so_far = list(self.counts), 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*self.bounds, None], counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound is None else repr(bound / self.unit), float(so_far)))
        return buckets, self.total / self.unit


def seconds(*bounds: float) -> Histogram:
    """Return a histogram over nanoseconds, shown in seconds; `bounds` in seconds."""
    return Histogram([round(bound * _NS) for bound in bounds], unit=_NS)


def step_seconds() -> Histogram:
    """Return a histogram of model step times, 0.2 ms to 2 s."""
    return seconds(
        0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0
    )  # fmt: skip


def request_seconds() -> Histogram:
    """Return a histogram of request times, 1 ms to 10 minutes."""
    return seconds(
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 600.0,
    )  # fmt: skip


def token_seconds() -> Histogram:
    """Return a histogram of times per token, 0.1 ms to 5 s."""
    return seconds(
        0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
        1.0, 2.5, 5.0,
    )  # fmt: skip
