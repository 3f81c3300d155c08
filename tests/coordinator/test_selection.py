import itertools
import random

import pytest

from outrider.coordinator.selection import choose_nodes
from outrider.tree import TokenTree


def random_tree(chance: random.Random, size: int) -> TokenTree:
    tree = TokenTree(0)
    nodes = [tree.root]
    for token in range(size):
        nodes.append(tree.add(chance.choice(nodes), token, chance.random()))
    return tree


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_has_the_best_rate_of_all_closed_subsets(seed):
    chance = random.Random(seed)
    trees = [random_tree(chance, 5) for _ in range(2)]
    candidates = [tree.best(5) for tree in trees]

    def cost_ns(rows: int) -> float:
        return 5.0 + 0.6 * rows

    chosen = choose_nodes(candidates, cost_ns=cost_ns, max_rows=100)
    got = (2 + sum(node.path_value for nodes in chosen for node in nodes)) / cost_ns(2 + sum(map(len, chosen)))
    everything = [node for nodes in candidates for node in nodes]
    rates = []
    for size in range(len(everything) + 1):
        for subset in itertools.combinations(everything, size):
            roots = {id(tree.root) for tree in trees}
            if all(id(node.parent) in roots or node.parent in subset for node in subset):
                rates.append((2 + sum(node.path_value for node in subset)) / cost_ns(2 + size))
    assert got == pytest.approx(max(rates))


def test_parents_come_with_their_children_and_rows_are_bounded():
    tree = random_tree(random.Random(1), 60)
    (chosen,) = choose_nodes([tree.best(60)], cost_ns=lambda rows: 1.0, max_rows=20)
    assert len(chosen) == 19
    for place, node in enumerate(chosen):
        assert node.parent is tree.root or node.parent in chosen[:place]


def test_dear_steps_are_not_filled():
    tree = random_tree(random.Random(2), 30)
    assert choose_nodes([tree.best(30)], cost_ns=lambda rows: float(rows) ** 3, max_rows=100) == [[]]


def test_no_session_is_no_choice():
    assert choose_nodes([[]], cost_ns=lambda rows: 1.0, max_rows=10) == [[]]
