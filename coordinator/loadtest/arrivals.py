"""Arrival times of requests in an open loop, independent of responses.

Between two arrivals passes

    gamma    dt ~ Gamma(shape = b, scale = 1 / (rate * b))    mean 1 / rate, coefficient of variation 1 / sqrt(b)
    fixed    dt = 1 / rate
    inf      dt = 0

b is the burstiness as in vLLM's `bench serve`: 1 is a Poisson process, below 1 comes in bursts, above 1 is steadier.
While the rate ramps up, the arrival of rank i among n (or at t of a run of T seconds) is drawn at

    linear         rate = start + (end - start) p        p = i / (n - 1), or t / T
    exponential    rate = start (end / start)^p

Times are not stretched afterwards to meet the rate exactly (vLLM does that): n arrivals of a Poisson process take
n / rate seconds on average, give or take sqrt(n) / rate.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Shape = Literal["gamma", "fixed"]
Ramp = Literal["none", "linear", "exponential"]


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """A process of arrivals; the same seed gives the same times.

    Attributes:
        rate: arrivals a second; math.inf is all at once.
        burstiness: of shape gamma.
        ramp: how the rate grows from ramp_start to ramp_end; `rate` is then without effect.
        count: arrivals; None is no bound.
        duration_s: no arrival comes later; None is no bound.

    Raises:
        ValueError: a value out of range, with the value.
    """

    rate: float = math.inf
    shape: Shape = "gamma"
    burstiness: float = 1.0
    ramp: Ramp = "none"
    ramp_start: float = 1.0
    ramp_end: float = 1.0
    count: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"request_rate: {self.rate} given, more than 0 needed (inf sends everything at once)")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"burstiness: {self.burstiness} given, more than 0 needed")
        for name, value in (("ramp_up_start_rps", self.ramp_start), ("ramp_up_end_rps", self.ramp_end)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: {value} given, more than 0 needed")
        if self.count is None and self.duration_s is None:
            raise ValueError("num_prompts: a number of requests or a duration is needed")

    @property
    def is_all_at_once(self) -> bool:
        """True if all requests arrive at once."""
        return self.ramp == "none" and math.isinf(self.rate)

    def times(self) -> Iterator[float]:
        """Seconds from the beginning, in order; the first arrival is at 0."""
        draw = random.Random(f"arrivals {self.seed}")
        at_s, number = 0.0, 0
        while (self.count is None or number < self.count) and (self.duration_s is None or at_s < self.duration_s):
            yield at_s
            number += 1
            at_s += self._gap_s(draw, number, at_s)

    def rate_at(self, number: int, at_s: float) -> float:
        """Arrivals a second when the arrival of this rank, from 0, is drawn."""
        if self.ramp == "none":
            return self.rate
        share = number / max(self.count - 1, 1) if self.count is not None else at_s / (self.duration_s or 1.0)
        progress = min(1.0, share)
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
        return self.ramp_start * (self.ramp_end / self.ramp_start) ** progress

    def _gap_s(self, draw: random.Random, number: int, at_s: float) -> float:
        rate = self.rate_at(number, at_s)
        if math.isinf(rate):
            return 0.0
        if self.shape == "fixed":
            return 1 / rate
        return draw.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
