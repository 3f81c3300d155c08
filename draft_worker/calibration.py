"""How likely the target accepts a child, given that it accepted the parent: learned online from commits.

The raw draft probability is a poor estimate. A child falls into a bucket by its rank among its siblings and by one
number that separates accepted from rejected children well:

    greedy       -log q of the child
    coupled      the gap, in units of the logits, between its score log q + G and the best sibling's (for the best
                 child itself: the second's); q alone says next to nothing once noise decides
    independent  -log q of the child; the target throws coins that the draft does not share (target_only)

Each bucket starts at a prior worth `prior_strength` trials and forgets with `decay` a trial. A trial is a child whose
parent lies on the committed path: it was a hit if the next committed token is the child's. Children that were never
submitted count too, for the target's choice does not depend on what was submitted.

Shapes: R parents, k children of each, best first.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_SURPRISE_EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
_GAP_EDGES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_BINS = len(_GAP_EDGES) + 1


class AcceptanceCalibration:
    """Acceptance estimates by bucket, and what was observed of each.

    Args:
        branching: k, most children of a parent.
        prior_strength: trials that the prior is worth.
        decay: what one trial leaves of the bucket's earlier ones; 0.999 remembers about a thousand.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, *, branching: int, prior_strength: float = 20.0, decay: float = 0.999) -> None:
        if branching < 1:
            raise ValueError(f"branching: {branching} given, at least 1 needed")
        if prior_strength <= 0:
            raise ValueError(f"prior_strength: {prior_strength} given, a positive number needed")
        if not 0 < decay <= 1:
            raise ValueError(f"decay: {decay} given, above 0 and at most 1 needed")
        self._strength, self._decay = prior_strength, decay
        self._edges = np.array([_SURPRISE_EDGES, _GAP_EDGES], dtype=np.float32)
        self._rank_offset = np.arange(branching, dtype=np.int64) * _BINS
        self._rule_offset = branching * _BINS
        self._prior = np.concatenate(
            [_prior(branching, coupled=False), _prior(branching, coupled=True), _independent_prior(branching)]
        )
        self._hits = np.zeros_like(self._prior)
        self._trials = np.zeros_like(self._prior)
        self._learned = self._prior.copy()

    def buckets(self, log_q: FloatArray, scores: FloatArray, temperature: FloatArray) -> IntArray:
        """The bucket of every child.

        Args:
            log_q: [R, k] log draft probability, after temperature and filters.
            scores: [R, k] log q + G, descending; read where the temperature is above 0.
            temperature: [R]; 0 is greedy.

        Returns:
            [R, k] int64.
        """
        ranks = self._rank_offset[: log_q.shape[1]]
        coupled = temperature > 0
        if not coupled.any():
            return np.searchsorted(self._edges[0], -log_q) + ranks
        scores = np.maximum(scores, np.float32(-1e30))  # -inf, of tokens that may not be chosen, has no gap
        gaps = scores[:, :1] - scores
        if scores.shape[1] > 1:
            gaps[:, 0] = gaps[:, 1]
        # Log probabilities at temperature t are logits over t: in units of the logits one table serves every t.
        found = np.searchsorted(self._edges[1], gaps * temperature[:, None]) + ranks + self._rule_offset
        if not coupled.all():
            greedy = np.searchsorted(self._edges[0], -log_q) + ranks
            found = np.where(coupled[:, None], found, greedy)
        return found

    def independent_buckets(self, log_q: FloatArray) -> IntArray:
        """The bucket of every child of parents after which the target draws with coins of its own.

        Args:
            log_q: [R, k] log draft probability, after temperature and filters, best first.

        Returns:
            [R, k] int64.
        """
        return np.searchsorted(self._edges[0], -log_q) + self._rank_offset[: log_q.shape[1]] + 2 * self._rule_offset

    def estimate(self, buckets: IntArray, learned: npt.NDArray[np.bool_] | bool = True) -> FloatArray:
        """Estimates of children; those of one parent do not sum above 1.

        Args:
            buckets: [R, k] from `buckets`.
            learned: [R] or one bool: False answers from the prior alone, so that trees are reproducible.

        Returns:
            [R, k] float32.
        """
        if learned is True:
            estimates = self._learned[buckets]
        else:
            learned = np.broadcast_to(np.asarray(learned), buckets.shape[:1])
            estimates = np.where(learned[:, None], self._learned[buckets], self._prior[buckets])
        return estimates / np.maximum(estimates.sum(axis=1, keepdims=True), np.float32(1))

    def observe(self, buckets: IntArray, hit: int) -> None:
        """Counts the children of one parent on the committed path.

        Args:
            buckets: [k] the children's buckets.
            hit: index of the child that was committed; negative if none of them was.
        """
        # Ranks differ, so no bucket occurs twice and plain indexing adds to each once.
        self._hits[buckets] *= self._decay
        self._trials[buckets] = self._trials[buckets] * self._decay + 1
        if hit >= 0:
            self._hits[buckets[hit]] += 1
        prior, hits, trials = self._prior[buckets], self._hits[buckets], self._trials[buckets]
        self._learned[buckets] = (self._strength * prior + hits) / (self._strength + trials)


def _prior(branching: int, *, coupled: bool) -> FloatArray:
    """[k * bins] estimates before anything was observed: curves through the embedded pair's acceptance."""
    edges = np.array((0.0, *(_GAP_EDGES if coupled else _SURPRISE_EDGES)))
    centers = np.append((edges[:-1] + edges[1:]) / 2, edges[-1] * 1.2)
    ranks = np.arange(branching)[:, None]
    if coupled:
        best = 1 - 0.63 * np.exp(-0.65 * centers)
        others = 0.32 * 0.63 ** (ranks - 1.0) * np.exp(-0.8 * centers)
    else:
        best = 0.995 * np.exp(-0.33 * centers)
        others = np.where(ranks == 1, 0.75 * np.exp(-0.95 * centers), 0.45 * np.exp(-0.9 * centers))
    return np.where(ranks == 0, best, others).astype(np.float32).ravel()


def _independent_prior(branching: int) -> FloatArray:
    """[k * bins] estimates before anything was observed: the draft's own probability."""
    edges = np.array((0.0, *_SURPRISE_EDGES))
    centers = np.append((edges[:-1] + edges[1:]) / 2, edges[-1] * 1.2)
    return np.tile(np.exp(-centers), branching).astype(np.float32)
