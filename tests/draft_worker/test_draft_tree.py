import numpy as np

from outrider.draft_worker.draft_tree import DraftNode, DraftTree, assign_keys, mask_words


def make_tree(**changes: int | frozenset[int]) -> DraftTree:
    settings = {"max_depth": 8, "max_children": 8, "last_position": 100, "final_tokens": frozenset[int]()} | changes
    return DraftTree(5, 10, **settings)  # pyright: ignore[reportArgumentType]


def grow(tree: DraftTree, parent: DraftNode, **acceptance: float) -> list[DraftNode]:
    tokens = [int(name[1:]) for name in acceptance]
    return tree.grow(parent, tokens, list(acceptance.values()), np.arange(len(tokens)))


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
    first, _ = grow(tree, tree.root, t1=0.6, t2=0.3)
    tree.reroot([9])
    third, _ = grow(tree, tree.root, t1=0.6, t2=0.3)
    tree.clear()
    (fifth,) = grow(tree, tree.root, t1=0.5)
    assert [first.node_id, third.node_id, fifth.node_id] == [1, 3, 5]


def test_reroot_keeps_what_hangs_below_and_rescales():
    tree = make_tree(max_depth=2)
    first, second = grow(tree, tree.root, t1=0.6, t2=0.3)
    deep, other = grow(tree, first, t3=0.5, t4=0.4)
    grow(tree, second, t6=0.9)
    assert tree.take(9) == [first, second]  # all others are at the greatest depth
    path, expanded = tree.reroot([1])
    assert path == [first]
    assert expanded == []
    assert tree.root is first
    assert tree.size == 2
    assert (deep.path_value, deep.depth, deep.position) == (0.5, 1, 12)
    assert tree.take(9) == [deep, other]


def test_reroot_beyond_the_tree_starts_anew():
    tree = make_tree()
    (first,) = grow(tree, tree.root, t1=0.6)
    path, expanded = tree.reroot([1, 8, 9])
    assert path == [first]
    assert expanded == []
    assert (tree.root.token, tree.root.position, tree.size, tree.best_value) == (9, 13, 0, 0.0)


def test_children_that_are_unlikely_or_beyond_the_credit_are_remembered_but_not_made():
    tree = make_tree(max_children=2)
    made = tree.grow(tree.root, [1, 2, 3, -1], [0.5, 0.01, 0.2, 0.0], np.arange(4), min_acceptance=0.05)
    assert [node.token for node in made] == [1]
    assert tree.root.child_tokens == [1, 2, 3]
    assert tree.root.child_buckets is not None
    assert tree.root.child_buckets.tolist() == [0, 1, 2]


def test_final_tokens_and_last_positions_have_no_children():
    tree = make_tree(final_tokens=frozenset({2}), last_position=12)
    first, _ = grow(tree, tree.root, t1=0.5, t2=0.5)
    assert tree.take(9) == [first]
    grow(tree, first, t3=0.5)
    assert tree.take(9) == []


def test_masks_hold_the_node_and_its_ancestors_over_several_words():
    tree = make_tree(max_depth=200, last_position=500)
    node, chain = tree.root, []
    for token in range(70):
        (node,) = grow(tree, node, **{f"t{token}": 0.9})
        chain.append(node)
    assign_keys(chain, 0)
    words = mask_words(chain)
    assert words.shape == (70, 2)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :70]
    np.testing.assert_array_equal(bits, np.tril(np.ones((70, 70), dtype=np.uint8)))
    assert mask_words(chain[:64]).shape == (64, 1)
