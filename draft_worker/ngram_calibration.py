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

from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.acceptance_calibration import RELIABILITY_EDGES, RULES, Reliability
from outrider.compiled import entries
from outrider.draft_worker.guess_kernels import LEARNED, PRIOR_HITS, TABLES
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
        columns: what a commit writes its observations into, as `guess_kernels.commit` takes it.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, *, prior_strength: float = 8.0, decay: float = 0.998) -> None:
        if prior_strength <= 0:
            raise ValueError(f"prior_strength: {prior_strength} given, a positive number needed")
        if not 0 < decay <= 1:
            raise ValueError(f"decay: {decay} given, above 0 and at most 1 needed")
        learned = np.concatenate([_prior(*_PRIORS[rule]) for rule in RULES])
        tables = np.zeros((TABLES, len(learned)))
        tables[LEARNED], tables[PRIOR_HITS] = learned, learned * prior_strength
        self.learned = tables[LEARNED]
        # Of the guesses' own kinds: nothing is converted to be looked up.
        self._edges = (np.array(CONTEXT_EDGES, np.int32), np.array(COUNT_EDGES, np.int32), np.array(SHARE_EDGES))
        self._counted = np.zeros((2, len(RULES) * _RELIABILITY_BINS), np.int64)
        self._predicted = np.zeros(len(RULES) * _RELIABILITY_BINS)
        columns = (tables, self._counted, self._predicted, np.array(RELIABILITY_EDGES, np.float64))
        self.columns: Any = (*map(entries, columns), _OF_RULE, float(prior_strength), float(decay))

    def buckets(self, guesses: GuessColumns, rules: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [B, S] the bucket of every guess.

        Args:
            guesses: of the trie.
            rules: int64 [B] `rule_number` of each text's session.
        """
        context = self._edges[0].searchsorted(guesses.contexts)
        count = self._edges[1].searchsorted(guesses.counts)
        share = self._edges[2].searchsorted(guesses.shares)
        return (context * _SHAPE[1] + count) * _SHAPE[2] + share + rules[:, None] * _OF_RULE

    def estimates(self, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 [B, S] of guesses, given that their parents are accepted."""
        return self.learned[buckets]

    def reliability(self) -> list[Reliability]:
        """How the estimates came true since start, for each rule with observations; any thread may ask."""
        found = []
        for number, rule in enumerate(RULES):
            span = slice(number * _RELIABILITY_BINS, (number + 1) * _RELIABILITY_BINS)
            # In the reverse of the order in which a commit counts: no share of these exceeds 1.
            hits, predicted = self._counted[1, span].tolist(), self._predicted[span].tolist()
            children = self._counted[0, span].tolist()
            if any(children):
                found.append(Reliability(rule=rule, hits=hits, predicted=predicted, children=children))
        return found


def _prior(unlikely: float, fall: float, alone: float) -> npt.NDArray[Any]:
    context, count, share = (np.array(centers) for centers in (_CONTEXT_CENTERS, _COUNT_CENTERS, _SHARE_CENTERS))
    by_context = 1 - unlikely * fall**context
    by_count = 1 - alone / (1 + count)
    return (by_context[:, None, None] * by_count[None, :, None] * share[None, None, :]).ravel()
