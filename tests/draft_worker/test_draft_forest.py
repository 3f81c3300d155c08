"""The loops over all trees, by themselves: with and without numba, and where the columns run out of room."""

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from outrider.compiled import IS_COMPILED
from outrider.draft_worker import tree_kernels
from outrider.draft_worker.draft_forest import NO_NODES, DraftForest, TakingLimits
from outrider.draft_worker.draft_tree import DraftTree, warm_up

TREES = 5
LIMITS = TakingLimits(
    branching=4,
    max_session_nodes=6,
    min_session_nodes=1,
    max_live_nodes=60,
    max_row_len=400,
    most_promised=100,
    min_path_value=0.001,
)


def life(seed: int, forest: DraftForest) -> list[Any]:
    """What random steps, of which two may be under way, and commits make of a few trees."""
    chance, numbers = random.Random(seed), np.random.default_rng(seed)
    trees = [
        DraftTree(
            7, 9, max_depth=5, max_children=60, last_position=300, final_tokens=frozenset(range(number * 4)),
            forest=forest, number=number,
        )
        for number in range(TREES)
    ]  # fmt: skip
    lengths, turn, told = [10] * TREES, 0, list[Any]()
    steps = [(np.array([(tree.root.row, tree.root.serial) for tree in trees]), [1] * TREES)]
    for _ in range(120):
        if len(steps) < 2 and chance.random() < 0.7:
            before = steps[-1][0] if steps else NO_NODES
            live = [number for number, tree in enumerate(trees) if tree.root.child_tokens is not None]
            taken, turn = forest.take(live, lengths, LIMITS, width=12, turn=turn, before=before)
            for number, count in zip(taken.trees, taken.counts, strict=True):
                lengths[number] += count
            rows = taken.rows
            told.append((taken.trees, taken.counts, rows.rows.tolist(), rows.sessions.tolist(), rows.masks.tolist()))
            if len(taken.nodes):
                steps.append((taken.nodes, taken.counts))
        elif steps:
            nodes, counts = steps.pop(0)
            shape = len(nodes), 4
            tokens = numbers.integers(0, 20, (shape[0], 1)) * 4 + np.arange(4)
            tokens[numbers.random(shape[0]) < 0.1, 2:] = -1
            estimates = np.sort(numbers.dirichlet(np.ones(4), shape[0]))[:, ::-1].copy()
            grown = forest.grow(
                nodes, counts, tokens, estimates, numbers.integers(0, 50, shape), learned=np.ones(len(nodes), np.int64),
                least=0.05,
            )  # fmt: skip
            told.append((grown.expanded, grown.counts, grown.made, grown.node_ids.tolist(), grown.parents.tolist()))
            told.append((grown.tokens.tolist(), grown.acceptance.tolist()))
        number = chance.randrange(TREES)
        if chance.random() < 0.3:
            tree, tokens = trees[number], list[int]()
            node = tree.root
            while node.children and chance.random() < 0.7:
                node = chance.choice(list(node.children.values())[:2])
                tokens.append(node.token)
            tokens.append(chance.randrange(90))
            seen, kept, path = tree.reroot(tokens)
            seen = [[hit, count, *buckets[:count]] for hit, count, *buckets in seen.tolist()]
            told.append((tokens, seen, kept, path, tree.size, tree.best_value))
            lengths[number] = tree.position + 1 + len(kept) - path
            if tree.root.child_tokens is None and not steps:
                steps.append((np.array([(tree.root.row, tree.root.serial)]), [1]))
    told.append([(tree.size, tree.waiting, tree.guess, sorted(tree.path_values())) for tree in trees])
    return told


@pytest.mark.skipif(not IS_COMPILED, reason="without numba there is one way")
def test_without_numba_it_is_the_same():
    """In a process that has none."""
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from outrider.compiled import IS_COMPILED\n"
        "from tests.draft_worker.test_draft_forest import TREES, DraftForest, life\n"
        "assert not IS_COMPILED\n"
        "print([life(seed, DraftForest(TREES)) for seed in range(4)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([life(seed, DraftForest(TREES)) for seed in range(4)])


def test_columns_get_room_where_it_runs_out(monkeypatch: pytest.MonkeyPatch):
    expected = [life(seed, DraftForest(TREES)) for seed in range(4)]
    monkeypatch.setattr("outrider.draft_worker.draft_forest._FIRST_NODES", TREES)
    monkeypatch.setattr("outrider.draft_worker.draft_forest._FIRST_HEAP", 1)
    small = DraftForest(TREES, children=1)
    assert (small.children, len(small.columns.nodes)) == (1, TREES)
    assert life(0, small) == expected[0]
    assert (small.children, len(small.columns.nodes) > TREES) == (4, True)
    assert [life(seed, DraftForest(TREES, children=1)) for seed in range(4)] == expected


def test_a_closed_tree_gives_every_row_back():
    forest = DraftForest(1)
    free = forest.columns.pool[tree_kernels.FREE_ROWS]
    tree = DraftTree(7, 9, max_depth=5, max_children=60, last_position=300, final_tokens=frozenset(), forest=forest)
    tree.grow(tree.root, [1, 2], [0.5, 0.4], None)
    (best,) = tree.take(1)
    tree.promise(best, 0)
    tree.close()
    assert forest.columns.pool[tree_kernels.FREE_ROWS] == free
    # Its number is free for another one.
    DraftTree(8, 9, max_depth=5, max_children=60, last_position=300, final_tokens=frozenset(), forest=forest)


@pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled without numba")
def test_no_step_waits_for_the_compiler():
    loops: Any = [getattr(tree_kernels, name) for name in ("plan_trees", "grow_step", "commit", "plant", "uproot")]
    warm_up()
    before = [list(loop.signatures) for loop in loops]
    life(0, DraftForest(TREES))
    # Other tests have compiled what steps need: one signature says that the warm-up's is the same.
    assert [list(loop.signatures) for loop in loops] == before
    assert [len(signatures) for signatures in before] == [1] * len(loops)
