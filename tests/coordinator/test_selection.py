import itertools
import random

import numpy as np
import pytest

from outrider.coordinator.selection import choose_counts, choose_each
from outrider.tree import Node, TokenTree


def random_tree(chance: random.Random, size: int) -> TokenTree:
    tree = TokenTree(0)
    nodes = [tree.root]
    for token in range(size):
        nodes.append(tree.add(chance.choice(nodes), token, chance.random()))
    return tree


def columns(candidates: list[list[Node]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([node.path_value for nodes in candidates for node in nodes], dtype=np.float64)
    return values, np.repeat(np.arange(len(candidates)), [len(nodes) for nodes in candidates])


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_has_the_best_rate_of_all_closed_subsets(seed):
    chance = random.Random(seed)
    trees = [random_tree(chance, 5) for _ in range(2)]
    candidates = [tree.best(5) for tree in trees]

    def cost_ns(rows):
        return 5.0 + 0.6 * rows

    values, places = columns(candidates)
    choice = choose_counts(values, places, sessions=2, cost_ns=cost_ns, max_rows=100)
    chosen = [nodes[:count] for nodes, count in zip(candidates, choice.counts, strict=True)]
    emitted = 2 + sum(node.path_value for nodes in chosen for node in nodes)
    assert choice.emitted == pytest.approx(emitted)
    everything = [node for nodes in candidates for node in nodes]
    rates = []
    for size in range(len(everything) + 1):
        for subset in itertools.combinations(everything, size):
            roots = {id(tree.root) for tree in trees}
            if all(id(node.parent) in roots or node.parent in subset for node in subset):
                rates.append((2 + sum(node.path_value for node in subset)) / cost_ns(2 + size))
    assert emitted / cost_ns(2 + sum(map(len, chosen))) == pytest.approx(max(rates))


def test_parents_come_with_their_children_and_rows_are_bounded():
    nodes = random_tree(random.Random(1), 60).best(60)
    values, places = columns([nodes])
    choice = choose_counts(values, places, sessions=1, cost_ns=lambda rows: np.ones(len(rows)), max_rows=20)
    assert choice.counts.tolist() == [19]
    for place, node in enumerate(nodes[:19]):
        assert node.parent is not None
        assert node.parent.parent is None or node.parent in nodes[:place]


def test_a_stair_is_filled_to_its_edge():
    values, places = np.linspace(0.9, 0.3, 40), np.zeros(40, dtype=np.int64)
    stairs = choose_counts(
        values, places, sessions=1, cost_ns=lambda rows: 5.0 + np.ceil(rows / 16) * 4.0, max_rows=100
    )
    assert (1 + stairs.counts[0]) % 16 == 0


def test_dear_steps_are_not_filled():
    values, places = columns([random_tree(random.Random(2), 30).best(30)])
    choice = choose_counts(values, places, sessions=1, cost_ns=lambda rows: rows**3.0, max_rows=100)
    assert choice.counts.tolist() == [0]


def test_nothing_to_choose_from():
    values, places = columns([[]])
    choice = choose_counts(values, places, sessions=1, cost_ns=lambda rows: rows * 1.0, max_rows=10)
    assert choice.counts.tolist() == [0]
    assert choice.emitted == 1.0


def test_nobody_is_slowed_down_beyond_the_bound_for_the_sake_of_others():
    # One session has twenty nodes nearly sure to be right, the other none; every row costs as much as the first one.
    values, places = np.full(20, 0.95), np.zeros(20, dtype=np.int64)

    def cost_ns(rows):
        return 8.0 + rows * 1.0

    free = choose_counts(values, places, sessions=2, cost_ns=cost_ns, max_rows=100)
    fair = choose_counts(values, places, sessions=2, cost_ns=cost_ns, max_rows=100, fair_slowdown=1.5)
    assert free.counts.tolist() == [20, 0]
    assert fair.counts.tolist() == [5, 0]
    # Who speculates alone is slowed down by nobody.
    alone = choose_counts(values, places, sessions=1, cost_ns=cost_ns, max_rows=100, fair_slowdown=1.5)
    assert alone.counts.tolist() == [20]


def test_a_fixed_tree_is_what_there_is_of_it():
    assert choose_each(np.array([0, 0, 0, 2]), sessions=3, count=2).tolist() == [2, 0, 1]
