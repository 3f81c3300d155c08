"""A session's guesses: only new ones are sent, within the session's bounds, and commits are learned from."""

from outrider.draft_worker.guess_tree import GuessTree
from outrider.draft_worker.ngram_calibration import NgramCalibration


def make_tree(**changes: object) -> GuessTree:
    options = {"max_depth": 16, "max_nodes": 64, "last_position": 100, "final_tokens": frozenset()} | changes
    return GuessTree(10, **options)  # pyright: ignore[reportArgumentType]


def graft(tree: GuessTree, tokens: list[int], parents: list[int], estimates: list[float] | None = None):
    return tree.graft(tokens, parents, estimates or [0.5] * len(tokens), [0] * len(tokens), min_value=0.0)


CHAIN = ([5, 6, 7], [-1, 0, 1])


def test_a_second_match_sends_only_what_is_new():
    tree = make_tree()
    first = graft(tree, *CHAIN)
    assert (first.node_ids, first.parents, first.tokens) == ([1, 2, 3], [0, 1, 2], [5, 6, 7])
    again = graft(tree, [5, 6, 7, 8, 9], [-1, 0, 1, 2, 0])
    assert (again.node_ids, again.parents, again.tokens) == ([4, 5], [3, 1], [8, 9])
    assert tree.size == 5


def test_a_commit_keeps_what_hangs_below_it_and_learns():
    tree, calibration = make_tree(), NgramCalibration()
    tree.graft([5, 6, 7, 9], [-1, 0, 1, -1], [0.6, 0.5, 0.5, 0.3], [7, 8, 9, 10], min_value=0.0)
    before = calibration.learned[[7, 8, 9, 10]].tolist()
    tree.commit([5, 6], calibration)
    after = calibration.learned[[7, 8, 9, 10]].tolist()
    # Right, right, not tried, wrong.
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] == before[2]
    assert after[3] < before[3]
    assert (tree.size, tree.position) == (1, 12)
    new = graft(tree, [7, 8], [-1, 0])
    # The 7 is there, and its id goes on being its id.
    assert (new.node_ids, new.parents, new.tokens) == ([5], [3], [8])
    tree.commit([1], calibration)
    assert tree.size == 0
    assert graft(tree, [7], [-1]).parents == [0]


def test_the_likeliest_path_goes_on():
    tree = make_tree(max_depth=5)
    assert tree.likeliest_path() is None
    graft(tree, [5, 6, 7, 8], [-1, -1, 1, 1], [0.3, 0.6, 0.2, 0.5])
    path = tree.likeliest_path()
    assert path is not None
    assert (path.tokens, path.value) == ([6, 8], 0.3)
    new = tree.graft([1, 2, 3, 4], [-1, 0, 1, 2], [0.9] * 4, [0] * 4, min_value=0.0, below=path)
    # Two tokens are above it, and five levels there may be.
    assert (new.tokens, new.parents[0]) == ([1, 2, 3], path.node.node_id)
    assert tree.likeliest_path() is None
    assert path.node.children[1].acceptance == 0.9
    # Values count from the root.
    assert not tree.graft([9], [-1], [0.5], [0], min_value=0.2, below=path).tokens
    final = make_tree(final_tokens=frozenset([7]))
    graft(final, *CHAIN)
    assert final.likeliest_path() is None


def test_bounds_of_depth_credit_length_and_ends():
    assert graft(make_tree(max_depth=2), *CHAIN).tokens == [5, 6]
    assert graft(make_tree(max_nodes=2), *CHAIN).tokens == [5, 6]
    assert graft(make_tree(last_position=11), *CHAIN).tokens == [5]
    assert graft(make_tree(last_position=10), *CHAIN).tokens == []
    assert graft(make_tree(final_tokens=frozenset([6])), *CHAIN).tokens == [5, 6]
    # Credit comes back with a commit.
    tree = make_tree(max_nodes=2)
    graft(tree, *CHAIN)
    tree.commit([5], NgramCalibration())
    assert graft(tree, [6, 7, 8], [-1, 0, 1]).tokens == [7]


def test_unlikely_guesses_are_left_out_with_all_below_them():
    tree = make_tree()
    new = tree.graft([1, 2, 3, 4], [-1, -1, 1, 0], [0.5, 0.05, 0.9, 0.1], [0] * 4, min_value=0.06)
    assert new.tokens == [1]
    # What was left out once may come later.
    assert tree.graft([2], [-1], [0.3], [0], min_value=0.06).tokens == [2]


def test_estimates_of_siblings_do_not_add_up_to_more_than_one():
    tree = make_tree()
    assert graft(tree, [1, 2], [-1, -1], [0.7, 0.2]).acceptance == [0.7, 0.2]
    (third,) = graft(tree, [3], [-1], [0.9]).acceptance
    assert abs(third - 0.1) < 1e-9
    assert graft(tree, [4], [-1], [0.9]).acceptance[0] < 1e-9


def test_ids_go_on_after_everything_was_forgotten():
    tree = make_tree()
    graft(tree, *CHAIN)
    tree.clear()
    assert tree.size == 0
    assert graft(tree, *CHAIN).node_ids == [4, 5, 6]
