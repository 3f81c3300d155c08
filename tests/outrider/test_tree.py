import random

import numpy as np
import pytest

from outrider.tree import TokenTree, ancestor_masks, node_depths, parent_numbers


def grow(seed: int, size: int) -> tuple[TokenTree, list]:
    chance, tree = random.Random(seed), TokenTree(0)
    nodes = [tree.root]
    for _ in range(size):
        node = tree.add(chance.choice(nodes), chance.randrange(6), chance.random())
        if node not in nodes:
            nodes.append(node)
    return tree, nodes


def test_same_parent_and_token_are_one_node_with_the_higher_estimate():
    tree = TokenTree(0)
    first = tree.add(tree.root, 5, 0.4)
    below = tree.add(first, 6, 0.5)
    assert tree.add(tree.root, 5, 0.8) is first
    assert tree.size == 2
    assert below.path_value == pytest.approx(0.4)
    assert tree.add(tree.root, 5, 0.1).acceptance == 0.8


@pytest.mark.parametrize("seed", range(5))
def test_commit_keeps_the_surviving_branch(seed):
    tree, _ = grow(seed, 60)
    child = max(tree.root.children.values(), key=lambda node: len(list(node.walk())))
    below = {id(node) for node in child.walk()}
    path = tree.commit([child.token])
    assert path == [child]
    assert tree.root is child
    assert {id(node) for node in tree.root.walk()} == below
    assert tree.size == len(below)
    for node in tree.root.walk():
        chain, at = [], node
        while at is not tree.root:
            chain.append(at.acceptance)
            assert at.parent is not None
            at = at.parent
        assert node.depth == len(chain)
        assert node.path_value == pytest.approx(np.prod(chain))


def test_commit_of_an_unknown_token_starts_anew():
    tree = TokenTree(0)
    node = tree.add(tree.root, 5, 0.9)
    tree.add(node, 6, 0.9)
    assert tree.commit([5, 7, 8]) == [node]
    assert (tree.root.token, tree.size, tree.root.children) == (8, 0, {})


@pytest.mark.parametrize("seed", range(5))
def test_best_is_what_a_full_sort_gives(seed):
    tree, _ = grow(seed, 80)
    everything = sorted((node.path_value for node in tree.root.walk()), reverse=True)
    best = tree.best(20)
    assert [node.path_value for node in best] == pytest.approx(everything[:20])
    for place, node in enumerate(best):
        assert node.parent is tree.root or node.parent in best[:place]
    assert all(node.depth <= 2 for node in tree.best(20, max_depth=2))
    assert all(node.path_value >= 0.3 for node in tree.best(100, min_value=0.3))


@pytest.mark.parametrize("size", [1, 5, 63, 64, 150])
def test_masks_and_depths_follow_the_ancestors(size):
    tree, _ = grow(size, size)
    nodes = tree.best(size)
    parents = parent_numbers(nodes)
    masks, depths = ancestor_masks(parents).view(np.uint64), node_depths(parents)
    for number, node in enumerate(nodes, start=1):
        visible, at = {0}, node
        while at is not tree.root:
            visible.add(nodes.index(at) + 1)
            assert at.parent is not None
            at = at.parent
        bits = {bit for bit in range(len(nodes) + 1) if int(masks[number, bit >> 6]) >> (bit & 63) & 1}
        assert bits == visible
        assert depths[number] == node.depth
