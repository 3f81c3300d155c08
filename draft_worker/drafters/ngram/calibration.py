"""Estimates that the target accepts a proposal, given that it accepted the parent, learned online from commits.

A proposal falls into a bucket by

    context  tokens before it in the trie's path: the longer, the less is chance
    count    how often the trie has seen that path
    share    its part of all continuations there

and by the session's rule, because noise and coins make repetitions rarer than greedy choice does. A bucket starts at a
prior of the form share * (1 - a b^context) * (1 - c / (1 + count)), worth `prior_strength` trials, and forgets with
`decay` a trial. Every child of a node on the committed path is a trial, verified or not, because the target's choice
does not depend on what was verified. It is a hit if the next committed token is its own.

Shapes: B texts, P proposals of each; S rows and C entries of the pool; T = 3 * contexts * counts * shares buckets.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.draft_worker.drafters.ngram.proposals import Proposals
from outrider.drafting.acceptance_calibration import RULES, LearnedBuckets, count_trial
from outrider.kernels.compiled import compiled
from outrider.sampling import SamplingSpec, VerificationRule

# Upper ends of the bins; the last bin has none.
_CONTEXT_EDGES = (1, 2, 3, 4, 6, 8, 11, 14)
_COUNT_EDGES = (1, 2, 4, 9)
_SHARE_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.99)
_CONTEXT_CENTERS = (1, 2, 3, 4, 5.5, 7.5, 10, 13, 16)
_COUNT_CENTERS = (1, 2, 3.5, 7, 16)
_SHARE_CENTERS = (0.03, 0.08, 0.15, 0.28, 0.43, 0.58, 0.73, 0.9, 1.0)
_SHAPE = (len(_CONTEXT_CENTERS), len(_COUNT_CENTERS), len(_SHARE_CENTERS))
# a, b and c of the prior, by rule.
_PRIORS = {"greedy": (0.95, 0.80, 0.3), "coupled": (0.97, 0.83, 0.4), "target_only": (0.97, 0.83, 0.4)}


def rule_number(sampling: SamplingSpec) -> int:
    """Return the index in RULES of the rule by which this session's nodes are accepted."""
    if sampling.temperature == 0:
        return 0
    return 2 if sampling.rule is VerificationRule.TARGET_ONLY else 1


class NgramCalibration(LearnedBuckets):
    """Estimates of proposals.

    Args:
        prior_strength: trials that the prior is worth.
        decay: what one trial leaves of the bucket's earlier ones.
    """

    def __init__(self, *, prior_strength: float = 8.0, decay: float = 0.998) -> None:
        prior = np.concatenate([_prior(*_PRIORS[rule]) for rule in RULES])
        super().__init__(prior, prior_strength=prior_strength, decay=decay)
        self._edges = np.array(_CONTEXT_EDGES), np.array(_COUNT_EDGES), np.array(_SHARE_EDGES)

    def estimate(self, proposals: Proposals, rules: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Return each proposal's bucket, [B, P] int64, and estimate, [B, P] float64.

        Args:
            proposals: of the trie.
            rules: [B] int64, `rule_number` of each text's session.
        """
        shape = proposals.tokens.shape
        buckets, estimates = np.zeros(shape, np.int64), np.zeros(shape)
        _estimate(
            proposals.contexts, proposals.counts, proposals.shares, proposals.found, rules, *self._edges, self.learned,
            buckets, estimates,
        )  # fmt: skip
        return buckets, estimates

    def observe(self, entries: tuple[Any, Any, Any, Any], buckets: Any, commits: Any, num_commits: Any) -> None:
        """Count which children on the committed paths came true; called before the pool is re-rooted.

        Args:
            entries: the columns count, parent, token and acceptance of the pool.
            buckets: [S, C] int64, of the entries.
            commits: [S, M] int32, tokens committed to each row.
            num_commits: [S] int32, how many of them.
        """
        _observe(*entries, buckets, commits, num_commits, self.arrays)


def _prior(unlikely: float, fall: float, alone: float) -> npt.NDArray[Any]:
    context, count, share = (np.array(centers) for centers in (_CONTEXT_CENTERS, _COUNT_CENTERS, _SHARE_CENTERS))
    by_context = 1 - unlikely * fall**context
    by_count = 1 - alone / (1 + count)
    return (by_context[:, None, None] * by_count[None, :, None] * share[None, None, :]).ravel()


@compiled
def _estimate(
    contexts: Any, counts: Any, shares: Any, found: Any, rules: Any, context_edges: Any, count_edges: Any,
    share_edges: Any, learned: Any, buckets: Any, estimates: Any,
) -> None:  # fmt: skip
    for text in range(len(rules)):
        for place in range(found[text, 0]):
            context = np.searchsorted(context_edges, contexts[text, place])
            count = np.searchsorted(count_edges, counts[text, place])
            share = np.searchsorted(share_edges, shares[text, place])
            bucket = ((rules[text] * _SHAPE[0] + context) * _SHAPE[1] + count) * _SHAPE[2] + share
            buckets[text, place], estimates[text, place] = bucket, learned[bucket]


@compiled
def _observe(
    counts: Any, parents: Any, tokens: Any, acceptances: Any, buckets: Any, commits: Any, num_commits: Any, arrays: Any
) -> None:
    for row in range(len(num_commits)):
        entry = -1
        for number in range(num_commits[row]):
            next_entry = -2
            for child in range(entry + 1, counts[row]):
                if parents[row, child] != entry:
                    continue
                came_true = 1 if tokens[row, child] == commits[row, number] else 0
                if came_true:
                    next_entry = child
                count_trial(buckets[row, child], came_true, acceptances[row, child], arrays)
            entry = next_entry
            if entry < -1:
                break
