import numpy as np

from outrider.coordinator.messages import TreeSubmission
from outrider.coordinator.trees import Submissions, Tree, Trees
from outrider.draft_distribution import WEIGHT_SUM, DraftDistribution

GROWN = Tree(slots=[7, 9], tokens=[5, 6], parents=[0, 1], values=[0.5, 0.25])


def drawn(token: int) -> DraftDistribution:
    return DraftDistribution(token_ids=np.array([token]), weights=np.array([WEIGHT_SUM]))


CHAIN = Tree(tokens=[3], parents=[0], values=[0.75], distributions=[drawn(3)])


def plain(tree: Tree) -> list[list[object]]:
    return [list(column) for column in tree]


def test_each_tree_comes_out_as_it_went_in():
    trees = Trees.of([GROWN, Tree(), CHAIN])
    assert trees.counts.tolist() == [2, 0, 1]
    assert trees.starts.tolist() == [0, 2, 2]
    assert [plain(tree) for tree in trees] == [plain(GROWN), [[]] * 5, plain(CHAIN)]
    assert [plain(tree) for tree in trees[1:3]] == [[[]] * 5, plain(CHAIN)]
    assert len(trees) == len(list(trees)) == 3


def test_columns_are_the_batch():
    trees = Trees.of([CHAIN, GROWN])
    assert (trees.tokens, trees.parents) == ([3, 5, 6], [0, 0, 1])
    assert trees.slots.tolist() == [-1, 7, 9]
    assert list(trees.distributions) == [*CHAIN.distributions, None, None]
    assert Trees.of([GROWN]).distributions == []


def test_a_submission_is_a_session_s_part():
    batch = Submissions(session_ids=[4, 8], epochs=[1, 2], lengths=[10, 20], trees=Trees.of([GROWN, Tree()]))
    assert batch[0][:5] == TreeSubmission(4, 1, 10, [5, 6], [0, 1])[:5]
    assert (batch[1].session_id, batch[1].epoch, batch[1].length, list(batch[1].tokens)) == (8, 2, 20, [])
    assert [own.session_id for own in batch] == [4, 8]
