"""How likely the target accepts a node that the trie has guessed, given that it accepted the parent.

A guess falls into a bucket by

    context  tokens before it that the trie has seen it after: the longer they are, the less is chance
    count    how often the trie has seen it there
    share    of all continuations there, its part

and by the session's rule, as noise and coins make repetitions rarer than greedy choice does. Each bucket starts at a
prior of the form share * (1 - a b^context) * (1 - c / (1 + count)), worth `prior_strength` trials, and forgets with
`decay` a trial. A trial is a guess whose parent lies on the committed path; it was a hit if the next committed token is
the guess's. Guesses that were never submitted count too, for the target's choice does not depend on what was submitted.

Shapes: B texts, S guesses of each; T = 3 * contexts * counts * shares buckets.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.acceptance_calibration import RELIABILITY_EDGES, RULES, Reliability
from outrider.draft_worker.ngram_tree import GuessColumns
from outrider.sampling import SamplingSpec, VerificationRule

# A bin holds its upper end; the last one has none.
CONTEXT_EDGES = (1, 2, 3, 4, 6, 8, 11, 14)
COUNT_EDGES = (1, 2, 4, 9)
SHARE_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.99)
_CONTEXT_CENTERS = (1, 2, 3, 4, 5.5, 7.5, 10, 13, 16)
_COUNT_CENTERS = (1, 2, 3.5, 7, 16)
_SHARE_CENTERS = (0.03, 0.08, 0.15, 0.28, 0.43, 0.58, 0.73, 0.9, 1.0)
_SHAPE = (len(_CONTEXT_CENTERS), len(_COUNT_CENTERS), len(_SHARE_CENTERS))
_OF_RULE = _SHAPE[0] * _SHAPE[1] * _SHAPE[2]
# a, b and c of the prior, by rule.
_PRIORS = {"greedy": (0.95, 0.80, 0.3), "coupled": (0.97, 0.83, 0.4), "target_only": (0.97, 0.83, 0.4)}
_RELIABILITY_BINS = len(RELIABILITY_EDGES) + 1


def rule_number(sampling: SamplingSpec) -> int:
    """Place in RULES of what the target does with this session's guesses."""
    if sampling.temperature == 0:
        return 0
    return 2 if sampling.rule is VerificationRule.TARGET_ONLY else 1


class NgramCalibration:
    """Acceptance estimates by bucket, and what was observed of each.

    Args:
        prior_strength: trials that the prior is worth.
        decay: what one trial leaves of the bucket's earlier ones.

    Attributes:
        learned: float64 [T] estimates now; changes in place.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, *, prior_strength: float = 8.0, decay: float = 0.998) -> None:
        if prior_strength <= 0:
            raise ValueError(f"prior_strength: {prior_strength} given, a positive number needed")
        if not 0 < decay <= 1:
            raise ValueError(f"decay: {decay} given, above 0 and at most 1 needed")
        self._strength, self._decay = prior_strength, decay
        self.learned = np.concatenate([_prior(*_PRIORS[rule]) for rule in RULES])
        self._prior_hits = (self.learned * prior_strength).tolist()
        self._hits = [0.0] * len(self.learned)
        self._trials = [0.0] * len(self.learned)
        self._children = [0] * (len(RULES) * _RELIABILITY_BINS)
        self._predicted = [0.0] * len(self._children)
        self._came_true = [0] * len(self._children)

    def buckets(self, guesses: GuessColumns, rules: Sequence[int]) -> npt.NDArray[np.int64]:
        """int64 [B, S] the bucket of every guess.

        Args:
            guesses: of the trie.
            rules: [B] `rule_number` of each text's session.
        """
        context = np.searchsorted(CONTEXT_EDGES, guesses.contexts)
        count = np.searchsorted(COUNT_EDGES, guesses.counts)
        share = np.searchsorted(SHARE_EDGES, guesses.shares)
        in_rule = (context * _SHAPE[1] + count) * _SHAPE[2] + share
        return in_rule + np.array(rules, dtype=np.int64)[:, None] * _OF_RULE

    def estimates(self, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 [B, S] of guesses, given that their parents are accepted."""
        return self.learned[buckets]

    def observe(self, bucket: int, estimate: float, *, came_true: bool) -> None:
        """Counts one guess after a committed parent.

        Args:
            bucket: its bucket.
            estimate: that it was sent with.
            came_true: whether it was committed.
        """
        place = bucket // _OF_RULE * _RELIABILITY_BINS + bisect_left(RELIABILITY_EDGES, estimate)
        self._children[place] += 1
        self._predicted[place] += estimate
        self._came_true[place] += came_true
        hits = self._hits[bucket] = self._hits[bucket] * self._decay + came_true
        trials = self._trials[bucket] = self._trials[bucket] * self._decay + 1
        self.learned[bucket] = (self._prior_hits[bucket] + hits) / (self._strength + trials)

    def reliability(self) -> list[Reliability]:
        """How the estimates came true since start, for each rule with observations; any thread may ask."""
        found = []
        for number, rule in enumerate(RULES):
            span = slice(number * _RELIABILITY_BINS, (number + 1) * _RELIABILITY_BINS)
            if any(self._children[span]):
                # In the reverse of the order in which `observe` counts: no share of these exceeds 1.
                hits, predicted = self._came_true[span], self._predicted[span]
                found.append(Reliability(rule=rule, hits=hits, predicted=predicted, children=self._children[span]))
        return found


def _prior(unlikely: float, fall: float, alone: float) -> npt.NDArray[Any]:
    context, count, share = (np.array(centers) for centers in (_CONTEXT_CENTERS, _COUNT_CENTERS, _SHARE_CENTERS))
    by_context = 1 - unlikely * fall**context
    by_count = 1 - alone / (1 + count)
    return (by_context[:, None, None] * by_count[None, :, None] * share[None, None, :]).ravel()
