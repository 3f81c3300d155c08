"""The prior's numbers, by maximum likelihood: how often children of each rank and bin are accepted.

Fitted on prompts that figures are not reported on, on held-out text and on the target's own output alike, greedy at
temperature 0 and coupled at 0.6 and 1 (in units of the logits one table serves every temperature).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from benchmarks.calibration_bench.estimates import buckets_of
from benchmarks.calibration_bench.positions import CHILDREN, Positions
from scipy.optimize import minimize

from outrider.drafting import acceptance_prior
from outrider.drafting.acceptance_calibration import BINS, GAP_EDGES, RULES, SURPRISE_EDGES, AcceptanceCalibration

FloatArray = npt.NDArray[np.float64]
Curve = Callable[[FloatArray], FloatArray]


def counts(asked: Sequence[Positions]) -> tuple[FloatArray, FloatArray]:
    """Trials and hits [rules, k, BINS]."""
    calibration = AcceptanceCalibration(branching=CHILDREN)
    size = len(RULES) * CHILDREN * BINS
    trials, hits = np.zeros(size), np.zeros(size)
    for positions in asked:
        buckets = buckets_of(calibration, positions)
        accepted = positions.hit[:, None] == np.arange(CHILDREN)
        trials += np.bincount(buckets.ravel(), minlength=size)
        hits += np.bincount(buckets[accepted], minlength=size)
    shape = (len(RULES), CHILDREN, BINS)
    return trials.reshape(shape), hits.reshape(shape)


def fit(asked: Sequence[Positions]) -> dict[str, tuple[float, ...]]:
    """The numbers of `acceptance_prior`, by name."""
    trials, hits = counts(asked)
    surprise, gap = (acceptance_prior.bin_centers(edges) for edges in (SURPRISE_EDGES, GAP_EDGES))
    ranks = np.arange(1, CHILDREN)[:, None]
    fallen = {"GREEDY_BEST": slice(0, 1), "GREEDY_SECOND": slice(1, 2), "GREEDY_OTHERS": slice(2, None)}
    found = {
        name: _fitted(lambda x: x[0] * np.exp(-x[1] * surprise), (0.8, 0.5), trials[0, rank], hits[0, rank])
        for name, rank in fallen.items()
    }
    found["COUPLED_BEST"] = _fitted(lambda x: 1 - x[0] * np.exp(-x[1] * gap), (0.6, 0.6), trials[1, 0], hits[1, 0])
    found["COUPLED_OTHERS"] = _fitted(
        lambda x: x[0] * x[2] ** (ranks - 1.0) * np.exp(-x[1] * gap), (0.3, 0.8, 0.6), trials[1, 1:], hits[1, 1:]
    )
    return found


def _fitted(curve: Curve, start: tuple[float, ...], trials: FloatArray, hits: FloatArray) -> tuple[float, ...]:
    """The curve's parameters, none above 1 but the second, which is how fast it falls."""

    def loss(parameters: FloatArray) -> float:
        share = np.clip(curve(parameters), 1e-6, 1 - 1e-6)
        return -float((hits * np.log(share) + (trials - hits) * np.log(1 - share)).sum())

    bounds = [(1e-3, 5.0 if place == 1 else 1.0) for place in range(len(start))]
    found = minimize(loss, np.array(start), bounds=bounds, method="L-BFGS-B")
    return tuple(round(float(value), 3) for value in found.x)


def as_code(found: dict[str, tuple[float, ...]]) -> str:
    """What stands between the marks of `acceptance_prior`."""
    return "\n".join(f"{name} = ({', '.join(f'{value:g}' for value in values)})" for name, values in found.items())
