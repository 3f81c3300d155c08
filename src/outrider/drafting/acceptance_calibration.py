"""Acceptance of a child given that its parent was accepted, learned online from commits.

The raw draft probability is a poor estimate. A child falls into a bucket by its rank among its siblings and by one
number that separates accepted from rejected children well:

    greedy       -log q of the child
    coupled      the gap, in units of the logits, between its score log q + G and the best sibling's (for the best
                 child itself: the second's); q alone says next to nothing once noise decides
    independent  -log q of the child; the target throws coins that the draft does not share (target_only)

Each bucket starts at a prior worth `prior_strength` trials and forgets with `decay` a trial. A trial is a child whose
parent lies on the committed path: it was a hit if the next committed token is the child's. Children that were never
submitted count too, for the target's choice does not depend on what was submitted.

What was predicted is held against what came true: each trial also counts in a bin of the estimate in force just
before it, and these counts are the reliability diagram. The prior's curves are in `acceptance_prior`.

Shapes: R parents, k children of each, best first; T = 3 k BINS buckets, B bins of estimates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.drafting.acceptance_prior import coupled_prior, greedy_prior, independent_prior
from outrider.kernels.compiled import compiled

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

SURPRISE_EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
GAP_EDGES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
BINS = len(GAP_EDGES) + 1
RULES = ("greedy", "coupled", "target_only")
# Finer at both ends, where most children are.
RELIABILITY_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_RELIABILITY_BINS = len(RELIABILITY_EDGES) + 1


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Predicted against observed acceptance of one rule, by bins between RELIABILITY_EDGES."""

    rule: str
    children: Sequence[int]  # [B] of parents on the committed path
    predicted: Sequence[float]  # [B] sum of their estimates
    hits: Sequence[int]  # [B] those that were committed


class LearnedBuckets:
    """Acceptance estimates by bucket, and what was observed of each.

    Args:
        prior: [T] estimates before anything is observed; buckets of one rule stand together, rules as in RULES.
        prior_strength: trials that the prior is worth.
        decay: what one trial leaves of the bucket's earlier ones; 0.999 remembers about a thousand.
    """

    def __init__(self, prior: npt.NDArray[Any], *, prior_strength: float, decay: float) -> None:
        assert prior_strength > 0 and 0 < decay <= 1
        # learned: [T] estimates now, of the prior's dtype; changes in place.
        self.learned = prior.copy()
        # Hits that the prior is worth, hits, trials.
        self._tried = np.zeros((3, len(prior)))
        self._tried[0] = prior * prior_strength
        bins = len(RULES) * _RELIABILITY_BINS
        self._counted, self._predicted = np.zeros((2, bins), dtype=np.int64), np.zeros(bins)
        self._settings = np.array(RELIABILITY_EDGES), len(prior) // len(RULES), float(prior_strength), float(decay)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The tables, as `count_trial` takes them."""
        return (self.learned, self._tried, self._counted, self._predicted, *self._settings)

    def reliability(self) -> list[Reliability]:
        """Return how the estimates came true since start, for each rule with observations. Thread-safe."""
        found = []
        for number, rule in enumerate(RULES):
            span = slice(number * _RELIABILITY_BINS, (number + 1) * _RELIABILITY_BINS)
            # In the reverse of the order in which they are counted, so that no share exceeds 1.
            hits, predicted = self._counted[1, span].tolist(), self._predicted[span].tolist()
            children = self._counted[0, span].tolist()
            if any(children):
                found.append(Reliability(rule=rule, hits=hits, predicted=predicted, children=children))
        return found


class AcceptanceCalibration(LearnedBuckets):
    """Estimates of the children of a model's nodes.

    Args:
        branching: k, most children of a parent.
    """

    def __init__(self, *, branching: int, prior_strength: float = 20.0, decay: float = 0.999) -> None:
        assert branching >= 1
        # What parts the bins of -log q, and those of the gap.
        self.edges = np.array([SURPRISE_EDGES, GAP_EDGES], dtype=np.float32)
        self._rank_offset = np.arange(branching, dtype=np.int64) * BINS
        self._rule_offset = branching * BINS
        tables = (
            greedy_prior(branching, SURPRISE_EDGES),
            coupled_prior(branching, GAP_EDGES),
            independent_prior(branching, SURPRISE_EDGES),
        )
        self.prior: FloatArray = np.concatenate(tables).ravel()  # bucket = (rule k + rank) BINS + bin
        super().__init__(self.prior, prior_strength=prior_strength, decay=decay)

    def buckets(self, log_q: FloatArray, scores: FloatArray, temperature: FloatArray) -> IntArray:
        """The bucket of every child.

        Args:
            log_q: [R, k] log draft probability, after temperature and filters.
            scores: [R, k] log q + G, descending; read where the temperature is above 0.
            temperature: [R]; 0 is greedy.
        """
        ranks = self._rank_offset[: log_q.shape[1]]
        coupled = temperature > 0
        if not coupled.any():
            return np.searchsorted(self.edges[0], -log_q) + ranks
        scores = np.maximum(scores, np.float32(-1e30))  # -inf, of tokens that may not be chosen, has no gap
        gaps = scores[:, :1] - scores
        if scores.shape[1] > 1:
            gaps[:, 0] = gaps[:, 1]
        # Log probabilities at temperature t are logits over t: in units of the logits one table serves every t.
        with np.errstate(over="ignore"):  # at a temperature of 3e38 a gap is as wide as they come
            found = np.searchsorted(self.edges[1], gaps * temperature[:, None]) + ranks + self._rule_offset
        if not coupled.all():
            greedy = np.searchsorted(self.edges[0], -log_q) + ranks
            found = np.where(coupled[:, None], found, greedy)
        return found

    def independent_buckets(self, log_q: FloatArray) -> IntArray:
        """Return the buckets [R, k] int64 of children after whose parents the target draws with coins of its own.

        Args:
            log_q: [R, k], best first.
        """
        return np.searchsorted(self.edges[0], -log_q) + self._rank_offset[: log_q.shape[1]] + 2 * self._rule_offset

    def estimate(self, buckets: IntArray, learned: npt.NDArray[np.bool_] | bool = True) -> FloatArray:
        """Estimates [R, k] of children; those of one parent do not sum above 1.

        Args:
            learned: [R] or one bool: False answers from the prior alone, so that trees are reproducible.
        """
        if learned is True:
            estimates = self.learned[buckets]
        else:
            learned = np.broadcast_to(np.asarray(learned), buckets.shape[:1])
            estimates = np.where(learned[:, None], self.learned[buckets], self.prior[buckets])
        return estimates / np.maximum(estimates.sum(axis=1, keepdims=True), np.float32(1))

    def observe_parents(self, seen: IntArray) -> None:
        """Count the children of parents on the committed path, one parent after the other.

        Args:
            seen: [n, 2 + k] which child was committed (negative: none), how many there are, and their buckets.
        """
        _observe_parents(seen, self.arrays)


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
def _observe_parents(seen: Any, arrays: Any) -> None:
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


def warm_up() -> None:
    """Compile the loop of `observe_parents`, or load it from the cache, before anybody waits for it."""
    AcceptanceCalibration(branching=2).observe_parents(np.zeros((0, 4), dtype=np.int64))
