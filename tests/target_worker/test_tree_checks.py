"""Trees that a rule does not take are refused with what is wrong."""

import numpy as np
import pytest

from outrider.draft_distribution import WEIGHT_SUM, DraftDistribution
from outrider.sampling import VerificationRule
from outrider.target_worker.sessions import Code, SessionFault, TreeRequest
from outrider.target_worker.tree_checks import check_tree

COUPLED, TARGET_ONLY, REJECTION, _ = VerificationRule


def q_of(**weights: int) -> DraftDistribution:
    """Of t1=..., t2=...: the weight of token 1, of token 2."""
    token_ids = [int(name[1:]) for name in weights]
    return DraftDistribution(np.array(token_ids, dtype=np.uint32), np.array([*weights.values()], dtype=np.uint32))


HALVES = q_of(t1=WEIGHT_SUM // 2, t2=WEIGHT_SUM // 2)


def tree_of(tokens, parents, distributions=()) -> TreeRequest:
    return TreeRequest(key=(0, 1), epoch=1, length=5, tokens=tokens, parents=parents, distributions=distributions)


@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        (COUPLED, tree_of([3, 3, 1], [0, 0, 2])),
        (COUPLED, tree_of([3], [0], [None])),
        (TARGET_ONLY, tree_of([3, 1, 3], [0, 0, 1])),
        (REJECTION, tree_of([], [])),
        (REJECTION, tree_of([1, 2], [0, 1], [HALVES, q_of(t2=WEIGHT_SUM)])),
    ],
)
def test_good_trees_pass(rule, tree):
    check_tree(tree, rule, 10)


@pytest.mark.parametrize(
    ("rule", "tree", "words"),
    [
        (COUPLED, tree_of([3], []), "1 tokens and 0 parents"),
        (COUPLED, tree_of([10], [0]), "0 to 9"),
        (COUPLED, tree_of([1, 2], [0, 2]), "before its children"),
        (COUPLED, tree_of([1], [0], [HALVES]), "the session's rule is coupled"),
        (TARGET_ONLY, tree_of([1], [0], [HALVES]), "the session's rule is target_only"),
        (TARGET_ONLY, tree_of([3, 4, 3], [0, 0, 0]), "distinct"),
        (REJECTION, tree_of([1, 2], [0, 0], [HALVES] * 2), "chains"),
        (REJECTION, tree_of([1, 2], [0, 1]), "0 given, one for each of 2"),
        (REJECTION, tree_of([1, 2], [0, 1], [HALVES, None]), "node 2 has none"),
        (REJECTION, tree_of([1, 3], [0, 1], [HALVES] * 2), "node 2: the node's own token, 3"),
        (REJECTION, tree_of([1], [0], [q_of(t1=WEIGHT_SUM - 1)]), "node 1: weights"),
        (REJECTION, tree_of([1], [0], [q_of(t1=5, t10=WEIGHT_SUM - 5)]), "node 1: token ids from 0 to 9"),
    ],
)
def test_others_are_refused(rule, tree, words):
    with pytest.raises(SessionFault) as caught:
        check_tree(tree, rule, 10)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert words in caught.value.message
