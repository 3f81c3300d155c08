import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.coordinator.messages import Growth
from outrider.coordinator.mirror import MirrorTree
from outrider.draft_distribution import WEIGHT_SUM, DraftDistribution


def make_growth(as_of, nodes, *, complete=False) -> Growth:
    node_ids, parents, tokens = zip(*nodes, strict=True)
    return Growth(
        session_id=1,
        epoch=1,
        as_of=as_of,
        node_ids=node_ids,
        parents=parents,
        tokens=tokens,
        acceptance=[0.5] * len(nodes),
        complete=complete,
    )


def paths(mirror: MirrorTree) -> set[tuple[int, ...]]:
    found = set()

    def descend(node, path):
        for child in node.children.values():
            found.add((*path, child.token))
            descend(child, (*path, child.token))

    descend(mirror.tree.root, ())
    return found


def commit(mirror: MirrorTree, token_ids: list[int], new: list[int]) -> None:
    token_ids.extend(new)
    mirror.commit(new)


def test_growth_of_two_workers_merges_by_parent_and_token():
    mirror = MirrorTree([9])
    assert mirror.graft("a", make_growth(1, [(1, 0, 5), (2, 1, 6)])) == 2
    assert mirror.graft("b", make_growth(1, [(1, 0, 5), (2, 1, 7)])) == 2
    assert paths(mirror) == {(5,), (5, 6), (5, 7)}
    assert mirror.tree.size == 3


def test_late_growth_descends_through_committed_tokens():
    token_ids = [9]
    mirror = MirrorTree(token_ids)
    mirror.graft("a", make_growth(1, [(1, 0, 5), (2, 0, 4)]))
    commit(mirror, token_ids, [5, 6])
    # Made before the draft knew of the commit: one branch leads through 5 and 6, the others are dead.
    late = make_growth(1, [(3, 1, 6), (4, 3, 7), (5, 1, 8), (6, 2, 6), (7, 4, 1)])
    assert mirror.graft("a", late) == 3
    assert paths(mirror) == {(7,), (7, 1)}
    # Ids of committed nodes serve until as_of has passed them.
    assert mirror.graft("a", make_growth(1, [(8, 3, 2)])) == 1
    assert paths(mirror) == {(7,), (7, 1), (2,)}
    assert mirror.graft("a", make_growth(3, [(9, 0, 3)])) == 1
    assert mirror.graft("a", make_growth(3, [(10, 3, 4)])) == 0


def test_growth_for_the_root_at_an_older_length():
    token_ids = [9]
    mirror = MirrorTree(token_ids)
    commit(mirror, token_ids, [5])
    assert mirror.graft("a", make_growth(1, [(1, 0, 5), (2, 0, 6), (3, 1, 7)])) == 2
    assert paths(mirror) == {(7,)}


def test_growth_from_the_future_is_dropped():
    mirror = MirrorTree([9])
    assert mirror.graft("a", make_growth(2, [(1, 0, 5)])) == 0
    assert not paths(mirror)


def test_complete_holds_for_its_round_only():
    token_ids = [9]
    mirror = MirrorTree(token_ids)
    mirror.graft("a", make_growth(1, [(1, 0, 5)], complete=True))
    assert mirror.is_complete
    commit(mirror, token_ids, [5])
    mirror.clear()
    assert not mirror.is_complete
    assert not paths(mirror)


def test_a_worker_that_starts_anew_may_use_its_ids_again():
    mirror = MirrorTree([9])
    mirror.graft("a", make_growth(1, [(1, 0, 5)]))
    mirror.forget_worker("a")
    assert mirror.graft("a", make_growth(1, [(2, 1, 6)])) == 0
    assert mirror.graft("a", make_growth(1, [(1, 0, 6)])) == 1
    assert paths(mirror) == {(5,), (6,)}


@pytest.mark.parametrize("seed", range(20))
def test_mirror_equals_the_draft_whatever_the_delay(seed):
    """A draft that applies commits late, its growth delayed too: every node that agrees with the commits is there."""
    chance = random.Random(seed)
    token_ids = [0]
    mirror = MirrorTree(token_ids)
    draft_tokens, commits, in_flight = [0], [], []
    grown: dict[int, tuple[int, ...]] = {}
    next_id = 0
    delivered: set[tuple[int, ...]] = set()
    for _ in range(300):
        action = chance.random()
        if action < 0.4:
            # Grow below the draft's root or below a node of its that is still alive.
            root = tuple(draft_tokens)
            alive = [number for number, path in grown.items() if path[: len(root)] == root and len(path) > len(root)]
            parent = chance.choice([0, *alive])
            path = (*(grown[parent] if parent else root), chance.randrange(3))
            if path not in grown.values():
                next_id += 1
                grown[next_id] = path
                in_flight.append((len(root), next_id, parent, path))
        elif action < 0.7 and in_flight:
            as_of, node_id, parent, path = in_flight.pop(0)
            mirror.graft("a", make_growth(as_of, [(node_id, parent, path[-1])]))
            delivered.add(path)
        elif action < 0.85:
            choices = list(mirror.tree.root.children) or [chance.randrange(3)]
            new = [chance.choice([*choices, chance.randrange(3)])]
            commit(mirror, token_ids, new)
            commits.append(new)
        elif commits:
            draft_tokens.extend(commits.pop(0))
    root = tuple(token_ids)
    wanted = {path[len(root) :] for path in delivered if path[: len(root)] == root and len(path) > len(root)}
    assert paths(mirror) == wanted


def make_chain(as_of, nodes, *, with_q=True) -> Growth:
    """Nodes as (id, parent, token); the id is also the q's first token, to tell them apart."""
    growth = make_growth(as_of, nodes)
    distributions = [
        DraftDistribution(np.array([node_id], dtype=np.uint32), np.array([WEIGHT_SUM], dtype=np.uint32))
        for node_id, _, _ in nodes
    ]
    return replace(growth, distributions=distributions if with_q else ())


def q_ids(mirror: MirrorTree) -> list[int]:
    """Of the chain's nodes, root to leaf."""
    nodes = mirror.tree.best(100)
    assert all(node.parent is before for before, node in itertools.pairwise([mirror.tree.root, *nodes]))
    assert mirror.tree.size == len(nodes)
    return [int(node.distribution.token_ids[0]) for node in nodes if node.distribution is not None]


def test_a_chain_takes_nodes_with_a_q_only():
    mirror = MirrorTree([9], is_chain=True)
    assert mirror.graft("a", make_chain(1, [(1, 0, 5)], with_q=False)) == 0
    assert mirror.graft("a", make_chain(1, [(2, 0, 5), (3, 2, 6)])) == 2
    assert mirror.graft("a", make_chain(1, [(4, 3, 6)], with_q=False)) == 0
    assert q_ids(mirror) == [2, 3]


@pytest.mark.parametrize("token", [5, 7])
def test_a_draft_that_begins_anew_replaces_its_chain_whatever_the_token(token):
    mirror = MirrorTree([9], is_chain=True)
    mirror.graft("a", make_chain(1, [(1, 0, 5), (2, 1, 6), (3, 2, 4)]))
    assert mirror.graft("a", make_chain(1, [(4, 0, token), (5, 4, 6)])) == 2
    assert q_ids(mirror) == [4, 5]
    # What hung on the old chain has no place any more.
    assert mirror.graft("a", make_chain(1, [(6, 3, 8)])) == 0
    assert mirror.graft("a", make_chain(1, [(7, 4, 6)])) == 1
    assert q_ids(mirror) == [4, 7]


def test_a_chain_survives_a_commit_that_follows_it_and_takes_late_growth():
    token_ids = [9]
    mirror = MirrorTree(token_ids, is_chain=True)
    mirror.graft("a", make_chain(1, [(1, 0, 5), (2, 1, 6), (3, 2, 7)]))
    commit(mirror, token_ids, [5, 6])
    assert mirror.graft("a", make_chain(1, [(4, 3, 8)])) == 1
    assert q_ids(mirror) == [3, 4]
    commit(mirror, token_ids, [1])
    assert mirror.graft("a", make_chain(1, [(5, 4, 8)])) == 0
    assert q_ids(mirror) == []
    mirror.graft("a", make_chain(4, [(6, 0, 2)]))
    assert q_ids(mirror) == [6]


def test_the_chain_goes_with_its_draft():
    mirror = MirrorTree([9], is_chain=True)
    mirror.graft("a", make_chain(1, [(1, 0, 5), (2, 1, 6)]))
    mirror.forget_worker("a")
    assert q_ids(mirror) == []
    mirror.graft("b", make_chain(1, [(1, 0, 5)]))
    assert q_ids(mirror) == [1]
