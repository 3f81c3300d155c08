"""How well a number per child tells accepted children from others, and whether it is a probability.

    area under the curve   the chance that of an accepted and another child the accepted one has the larger number
    calibration error      mean over children of |mean estimate - share accepted|, in the reliability diagram's bins
    log loss               mean of -log of what was said of the outcome, in nats

Shapes: n children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from benchmarks.calibration_bench.positions import Positions, Rule
from scipy.stats import rankdata

from outrider.drafting.acceptance_calibration import RELIABILITY_EDGES, AcceptanceCalibration

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What one estimate is worth on one set of positions.

    Attributes:
        estimate: its name.
        auc: over all children.
        best_auc: over the best child of each position.
        calibration_error: over all children.
        log_loss: over all children.
    """

    estimate: str
    auc: float
    best_auc: float
    calibration_error: float
    log_loss: float


def area_under_curve(values: FloatArray, accepted: BoolArray) -> float:
    """[n] numbers and [n] outcomes; NaN where all outcomes are the same."""
    positives = int(accepted.sum())
    negatives = len(accepted) - positives
    if not positives or not negatives:
        return float("nan")
    return float((rankdata(values)[accepted].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def calibration_error(values: FloatArray, accepted: BoolArray) -> float:
    """[n] probabilities and [n] outcomes."""
    places = np.searchsorted(RELIABILITY_EDGES, values)
    missed = [abs((values[places == place] - accepted[places == place]).sum()) for place in np.unique(places)]
    return float(sum(missed) / len(values))


def log_loss(values: FloatArray, accepted: BoolArray) -> float:
    """[n] probabilities and [n] outcomes."""
    said = np.clip(np.where(accepted, values, 1 - values), 1e-6, 1)
    return float(-np.log(said).mean())


def buckets_of(calibration: AcceptanceCalibration, positions: Positions) -> npt.NDArray[np.int64]:
    """[R, k] as the draft worker files them."""
    if positions.rule is Rule.TARGET_ONLY:
        return calibration.independent_buckets(positions.log_q)
    temperature = np.full(len(positions.log_q), positions.temperature, dtype=np.float32)
    return calibration.buckets(positions.log_q, positions.scores, temperature)


def online_estimates(
    calibration: AcceptanceCalibration, positions: Positions, buckets: npt.NDArray[np.int64]
) -> FloatArray:
    """[R, k] what is said of each position before its outcome is learned, one after the other."""
    said = np.empty(buckets.shape, dtype=np.float32)
    for place, (row, hit) in enumerate(zip(buckets, positions.hit.tolist(), strict=True)):
        said[place] = calibration.estimate(row[None])[0]
        calibration.observe(row, hit)
    return said


def compare(fitted: Positions, positions: Positions) -> list[Worth]:
    """The draft's probability beside the estimates: the prior, what other prompts taught, and learning as it goes.

    Args:
        fitted: of prompts that are not reported on.
        positions: those reported on.
    """
    children = positions.log_q.shape[1]
    taught, fresh = AcceptanceCalibration(branching=children), AcceptanceCalibration(branching=children)
    for row, hit in zip(buckets_of(taught, fitted), fitted.hit.tolist(), strict=True):
        taught.observe(row, hit)
    buckets = buckets_of(fresh, positions)
    estimates = {
        "probability": np.exp(positions.log_q),
        "prior": fresh.estimate(buckets, learned=False),
        "taught": taught.estimate(buckets),
        "online": online_estimates(fresh, positions, buckets),
    }
    accepted = positions.hit[:, None] == np.arange(children)
    return [
        Worth(
            estimate=name,
            auc=area_under_curve(values.ravel(), accepted.ravel()),
            best_auc=area_under_curve(values[:, 0], accepted[:, 0]),
            calibration_error=calibration_error(values.ravel(), accepted.ravel()),
            log_loss=log_loss(values.ravel(), accepted.ravel()),
        )
        for name, values in estimates.items()
    ]
