import gc

import numpy as np
import pytest

from outrider.draft_worker import draft_tree
from outrider.draft_worker.draft_tree import DraftNode, DraftTree


def make_tree(**changes: int | frozenset[int]) -> DraftTree:
    settings = {"max_depth": 8, "max_children": 8, "last_position": 100, "final_tokens": frozenset[int]()} | changes
    return DraftTree(5, 10, **settings)  # pyright: ignore[reportArgumentType]


def grow(tree: DraftTree, parent: DraftNode, **acceptance: float) -> list[DraftNode]:
    tokens = [int(name[1:]) for name in acceptance]
    assert tree.grow(parent, tokens, list(acceptance.values()), np.arange(len(tokens))) == len(tokens)
    return [parent.children[token] for token in tokens]


def assign_keys(nodes: list[DraftNode], first_offset: int) -> None:
    if nodes:
        draft_tree.assign_keys(nodes[0]._forest, np.array([node.row for node in nodes]), first_offset)


def take(tree: DraftTree, count: int) -> list[DraftNode]:
    """Takes nodes as a step does, which gives them places for their KV."""
    taken = tree.take(count)
    assign_keys(taken, sum(node.has_kv for node in tree.nodes()))
    return taken


def test_takes_the_best_nodes_of_any_depth_first():
    tree = make_tree()
    first, second = grow(tree, tree.root, t1=0.6, t2=0.3)
    assert [node.token for node in tree.take(1)] == [1]
    deep, _ = grow(tree, first, t3=0.9, t4=0.1)
    assert tree.best_value == deep.path_value
    assert tree.take(2) == [deep, second]
    assert [round(node.path_value, 9) for node in tree.take(5, min_value=0.07)] == []
    assert len(tree.take(5, min_value=0.05)) == 1


def test_ids_count_up_and_are_never_used_again():
    tree = make_tree()
    ids = [node.node_id for node in grow(tree, tree.root, t1=0.6, t2=0.3)]
    tree.reroot([9])
    ids += [node.node_id for node in grow(tree, tree.root, t1=0.6, t2=0.3)]
    tree.clear()
    ids += [node.node_id for node in grow(tree, tree.root, t1=0.5)]
    # Whoever shares the ids goes on when the tree is closed.
    ids.append(tree.new_id())
    tree.close()
    assert [*ids, tree.new_id(), tree.new_id()] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_reroot_keeps_what_hangs_below_and_rescales():
    tree = make_tree(max_depth=2)
    first, second = grow(tree, tree.root, t1=0.6, t2=0.3)
    assert take(tree, 1) == [first]
    deep, other = grow(tree, first, t3=0.5, t4=0.4)
    assert take(tree, 9) == [second]  # all others are at the greatest depth
    grow(tree, second, t6=0.9)
    seen, kept, path = tree.reroot([1])
    assert (seen[:, :4].tolist(), kept, path) == ([[0, 2, 0, 1]], [0], 1)
    assert tree.root == first
    assert tree.size == 2
    assert (deep.path_value, deep.depth, deep.position) == (0.5, 1, 12)
    assert tree.best_value == pytest.approx(0.5)
    assert second.is_dead
    assert take(tree, 9) == [deep, other]


def test_reroot_beyond_the_tree_starts_anew():
    tree = make_tree()
    (first,) = grow(tree, tree.root, t1=0.6)
    take(tree, 1)
    grow(tree, first, t2=0.5)
    seen, kept, path = tree.reroot([1, 8, 9])
    assert (seen[:, :3].tolist(), kept, path) == ([[0, 1, 0], [-1, 1, 0]], [0], 1)
    assert (tree.root.token, tree.root.position, tree.size, tree.best_value) == (9, 13, 0, 0.0)
    assert first.is_dead


def test_a_node_in_flight_keeps_its_place_and_gets_its_children_as_the_root():
    tree = make_tree()
    first, second = grow(tree, tree.root, t1=0.6, t2=0.3)
    assert take(tree, 2) == [first, second]
    third, _ = grow(tree, first, t3=0.9, t4=0.1)
    assert take(tree, 1) == [third]
    assert tree.reroot([1])[1:] == ([0, 2], 1)
    assert (third.key_offset, third.mask, third.is_dead, second.is_dead) == (0, 1, False, True)
    assert tree.reroot([3])[1:] == ([0], 1)
    assert tree.root == third
    grow(tree, third, t5=0.5)
    assert (tree.size, tree.best_value) == (1, 0.5)


def test_a_promised_child_is_taken_with_its_place_and_named_when_its_parent_is_expanded():
    tree = make_tree()
    first, second = grow(tree, tree.root, t1=0.6, t2=0.5)
    assert take(tree, 1) == [first]
    for _ in range(2):  # once is enough
        tree.promise(first, 7)
    # A node that is known may be worth more.
    known, promised = tree.take(9)
    assert (known, promised.parent, promised.token, promised.position) == (second, first, -8, 12)
    assert promised.path_value == pytest.approx(0.6 * tree.guess)
    assign_keys([promised, known], 1)
    assert (promised.mask, tree.size) == (0b11, 2)
    best, other = grow(tree, first, t3=0.5, t4=0.25)
    assert best == promised
    assert (promised.token, promised.acceptance, promised.path_value) == (3, 0.5, pytest.approx(0.3))
    assert [promised.node_id, other.node_id] == [3, 4]
    # It is in flight: nobody takes it again.
    assert tree.take(9) == [other]
    grow(tree, promised, t5=0.9)
    # By the estimate that it has got, not by the one that it was promised with.
    assert tree.best_value == pytest.approx(0.27)
    assert tree.reroot([1, 3])[1:] == ([0, 1], 2)
    assert tree.root == promised


def test_a_promised_child_survives_with_its_parent_and_dies_with_it():
    for committed, survives in ([1], True), ([2], False):
        tree = make_tree()
        first, second = grow(tree, tree.root, t1=0.6, t2=0.5)
        assert take(tree, 2) == [first, second]
        tree.promise(first, 0)
        (promised,) = tree.take(1)
        assign_keys([promised], 2)
        assert tree.reroot(committed)[1:] == (([0, 2] if survives else [1]), 1)
        assert tree.held == ([promised] if survives else [])
        assert promised.is_dead == first.is_dead == (not survives)
        assert tree.take(9) == []


def test_a_promise_is_broken_where_the_child_is_not_to_be_expanded():
    for tokens, best, least in (([2, 4], 0.6, 0.0), ([3, 4], 0.6, 0.7), ([3, 4], 0.2, 0.4), ([-1, -1], 0.6, 0.0)):
        tree = make_tree(final_tokens=frozenset({2}))
        tree.promise(tree.root, 0)
        (promised,) = tree.take(1)
        assign_keys([promised], 0)
        made = tree.grow(tree.root, tokens, [best, 0.5], None, min_acceptance=least)
        assert promised.is_dead
        assert {node.token for node in tree.nodes()} == set(tokens[:made] if best > least else tokens[2 - made :])
        assert [node.token for node in tree.take(9)] == ([4] if made else [])


def test_a_promise_that_nobody_took_makes_no_difference():
    tree = make_tree()
    tree.promise(tree.root, 0)
    assert tree.best_value == pytest.approx(tree.guess)
    before = tree.guess
    first, second = grow(tree, tree.root, t1=0.6, t2=0.3)
    assert 0.6 < tree.guess < before
    assert tree.best_value == 0.6
    assert tree.take(9) == [first, second]
    assert tree.take_best() is None


def test_no_child_is_promised_that_may_have_no_children():
    for changes in {"max_depth": 1}, {"last_position": 11}:
        tree = make_tree(**changes)  # pyright: ignore[reportArgumentType]
        tree.promise(tree.root, 0)
        assert tree.best_value == 0
    tree = make_tree(max_depth=2, last_position=12)
    tree.promise(tree.root, 0)
    assert tree.best_value > 0


def test_values_do_not_vanish_over_many_commits():
    tree = make_tree(last_position=10_000)
    grow(tree, tree.root, t1=0.5, t2=0.25)
    for _ in range(600):
        (node,) = take(tree, 1)
        assert (node.token, tree.best_value) == (1, 0.25)
        grow(tree, node, t1=0.5, t2=0.25)
        tree.reroot([1])
        assert (tree.size, tree.best_value) == (2, 0.5)
    assert 0 < tree.root.value <= 1
    assert [node.path_value for node in tree.nodes()] == [0.25, 0.5]


def test_dead_trees_wait_for_no_collector():
    tree = make_tree()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            for node in (tree.root, *take(tree, 3)):
                if node.child_tokens is None:
                    grow(tree, node, t1=0.6, t2=0.3)
            tree.reroot([1])
        tree.clear()
        del node
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_dead_entries_do_not_pile_up():
    tree = make_tree(last_position=10_000)
    grow(tree, tree.root, **{f"t{token}": 0.5 for token in range(8)})
    for _ in range(100):
        (node,) = take(tree, 1)
        grow(tree, node, **{f"t{token}": 0.5 for token in range(8)})
        tree.reroot([0])
    assert tree.waiting < 100
    assert len(tree.forest.columns.nodes) < 2048


def test_children_that_are_unlikely_or_beyond_the_credit_are_remembered_but_not_made():
    tree = make_tree(max_children=2)
    made = tree.grow(tree.root, [1, 2, 3, -1], [0.5, 0.01, 0.2, 0.0], np.arange(4), min_acceptance=0.05)
    assert (made, list(tree.root.children)) == (1, [1])
    assert tree.root.child_tokens == [1, 2, 3]
    assert tree.root.child_buckets is not None
    assert tree.root.child_buckets.tolist() == [0, 1, 2]


def test_final_tokens_and_last_positions_have_no_children():
    tree = make_tree(final_tokens=frozenset({2}), last_position=12)
    first, _ = grow(tree, tree.root, t1=0.5, t2=0.5)
    assert tree.take(9) == [first]
    grow(tree, first, t3=0.5)
    assert tree.take(9) == []


def test_masks_hold_the_node_and_its_ancestors():
    tree = make_tree(max_depth=200, last_position=500)
    node, chain = tree.root, []
    for token in range(70):
        (node,) = grow(tree, node, **{f"t{token}": 0.9})
        chain.append(node)
    assign_keys(chain, 0)
    assert [node.key_offset for node in chain] == list(range(70))
    assert [node.mask for node in chain] == [(1 << count) - 1 for count in range(1, 71)]
