"""Growth of several sources, workers and sessions, against a plain reference: dictionaries from a token to a child."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pytest
from tests.coordinator.committing import Commitment, commit_together

from outrider.compiled import IS_COMPILED
from outrider.coordinator.forest import MOST_PASSED, Forest
from outrider.coordinator.messages import Growth, GrowthBatch
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.coordinator.node_ids import RING
from outrider.growth_source import GrowthSource

MODEL = GrowthSource.MODEL
TokenPath = tuple[int, ...]


class Grown(NamedTuple):
    """A node as a message has it."""

    node_id: int
    parent: int
    token: int
    acceptance: float
    source: GrowthSource


@dataclass(eq=False)
class Node:
    """A node of a tree, or a committed token: then `length` is how many are committed up to and with it."""

    parent: Self | None = None
    children: dict[int, "Node"] = field(default_factory=dict)
    acceptance: float = 0.0
    told: dict[GrowthSource, float] = field(default_factory=dict)
    is_expanded: bool = False
    length: int = 0
    is_there: bool = True


class Reference:
    """One session as its mirror should have it."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.root = Node(length=len(token_ids))
        self.nodes = [self.root]
        self.ids: dict[str, dict[int, tuple[int, Node]]] = {}
        self.as_of: dict[str, int] = {}
        self.counts = np.zeros((3, 4), dtype=np.int64)
        self.was_drafted = self.was_missed = False

    def graft(self, worker: str, as_of: int, grown: list[Grown], shift: dict[GrowthSource, float] | None) -> int:
        """How many found a place; `shift`: None where nothing is corrected."""
        if as_of > len(self.token_ids):
            return 0
        ids = self.ids.setdefault(worker, {})
        self.as_of[worker] = max(as_of, self.as_of.get(worker, 0))
        left = [node for node in grown if self._named(ids, node.node_id) is None]
        count, before = 0, -1
        while count > before:
            before = count
            for node in list(left):
                above = self._above(ids, as_of, node.parent)
                if above is None:
                    continue
                left.remove(node)
                if (placed := self._place(above, node, shift)) is not None:
                    ids[node.node_id % RING] = node.node_id, placed
                    count += 1
        return count

    @staticmethod
    def _named(ids: dict[int, tuple[int, Node]], node_id: int) -> Node | None:
        known, node = ids.get(node_id % RING, (None, None))
        return node if known == node_id and node is not None and node.is_there else None

    def _above(self, ids: dict[int, tuple[int, Node]], as_of: int, parent: int) -> Node | int | None:
        """The parent: a node of the tree, or a committed length that is not the last one; None: there is none."""
        node = self._named(ids, parent) if parent else None
        if parent and node is None:
            return None
        length = as_of if node is None else node.length
        return self.root if length == len(self.token_ids) else length or node

    def _place(self, above: Node | int, grown: Grown, shift: dict[GrowthSource, float] | None) -> Node | None:
        if isinstance(above, int):
            if above < len(self.token_ids) - MOST_PASSED or self.token_ids[above] != grown.token:
                return None
            node = Node(length=above + 1)
        elif grown.token in above.children:
            node = above.children[grown.token]
        else:
            node = above.children[grown.token] = Node(parent=above)
        self.nodes.append(node)
        if grown.source is not MODEL:
            self.counts[0, [0, grown.source]] += 1
        if not isinstance(above, int):
            told = min(max(grown.acceptance, 1e-6), 0.995)
            node.told[grown.source] = max(told, node.told.get(grown.source, 0.0))
            above.is_expanded |= grown.source is MODEL
            estimate = grown.acceptance
            if shift is not None:
                odds = math.exp(shift[grown.source])
                estimate = odds * told / (1 - told + odds * told)
            node.acceptance = max(min(max(estimate, 1e-6), 1.0), node.acceptance)
        return node

    def commit(self, new: list[int], *, keeps_tree: bool) -> None:
        """Tokens that stand in the list already."""
        length, node, reached = len(self.token_ids) - len(new), self.root, self.root
        for token in new:
            length += 1
            node = None if node is None else node.children.get(token)
            if node is not None:
                node.length, reached = length, node
        self.was_drafted, self.was_missed = node is not None, node is None and bool(reached.children)
        self.root = node if node is not None and keeps_tree else Node(length=length)
        self.nodes.append(self.root)
        known = min(self.as_of.values(), default=length)
        forgotten = max(min(known, length - 1), length - MOST_PASSED)
        alive = {id(node) for node in self.tree().values()}
        for node in self.nodes:
            node.is_there = id(node) in alive or node.length > forgotten
        self.nodes = [node for node in self.nodes if node.is_there]

    def tree(self) -> dict[TokenPath, Node]:
        """Its nodes by their paths from the root."""
        found: dict[TokenPath, Node] = {}
        left: list[tuple[TokenPath, Node]] = [((), self.root)]
        while left:
            path, node = left.pop()
            own = [((*path, token), child) for token, child in node.children.items()]
            found |= own
            left += own
        return found

    def value(self, path: TokenPath, tree: dict[TokenPath, Node]) -> float:
        """Of a node: the product along its path."""
        return math.prod(tree[path[:end]].acceptance for end in range(1, len(path) + 1))


class Session:
    """A mirror beside its reference."""

    def __init__(self, forest: Forest) -> None:
        self.token_ids = [1, 2, 3]
        self.mirror = TreeMirror(forest, self.token_ids)
        self.reference = Reference(self.token_ids)
        self.next_id = {"a": 1, "b": 1, "c": 1}

    def slots(self) -> dict[TokenPath, int]:
        """Of its nodes, by their paths."""
        forest = self.mirror.forest
        paths: dict[int, TokenPath] = {int(forest.root[self.mirror.row]): ()}
        own = np.flatnonzero((forest.row == self.mirror.row) & (forest.depth > 0))
        for slot in sorted(own.tolist(), key=lambda slot: int(forest.depth[slot])):
            paths[slot] = (*paths[int(forest.parent[slot])], int(forest.token[slot]))
        assert len(set(paths.values())) == len(paths)
        return {path: slot for slot, path in paths.items() if path}

    def check(self) -> None:
        """Nodes, their values, what each source said of them, and where a model would go on."""
        forest, tree, slots = self.mirror.forest, self.reference.tree(), self.slots()
        assert slots.keys() == tree.keys()
        order = np.array([*slots.values(), int(forest.root[self.mirror.row])])
        nodes = [*(tree[path] for path in slots), self.reference.root]
        for path, slot in slots.items():
            assert forest.acceptance[slot] == pytest.approx(tree[path].acceptance)
            assert forest.value[slot] == pytest.approx(self.reference.value(path, tree))
            assert forest.value[slot] <= forest.value[forest.parent[slot]]
            assert forest.depth[slot] == len(path)
        assert (forest.first_child[order] > 0).tolist() == [bool(node.children) for node in nodes]
        if forest.mix.is_active:
            told = forest.mix._estimates(forest, order)[:-1, MODEL:]
            wanted = [[node.told.get(source, 0.0) for source in GrowthSource] for node in nodes[:-1]]
            assert told.flatten().tolist() == pytest.approx(np.array(wanted).flatten().tolist())
            is_open = forest.mix.open_shares(forest, order, order[:0]) > 0
            known = [MODEL in node.told or node is self.reference.root for node in nodes]
            assert is_open.tolist() == [k and not node.is_expanded for k, node in zip(known, nodes, strict=True)]
        assert self.mirror.source_counts.tolist() == self.reference.counts.tolist()
        was = self.mirror.root_was_drafted, self.mirror.root_was_missed
        assert was == (self.reference.was_drafted, self.reference.was_missed)


class Play:
    """Sessions of one forest that messages, commits and rounds come to by dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.forest = Forest()
        self.sources: Sequence[GrowthSource] = (MODEL,)
        self.sessions = [Session(self.forest) for _ in range(3)]

    def message(self) -> None:
        """Of some sessions, as of any time, in order or not, some nodes twice, some below what is gone."""
        worker = self.dice.choice("abc")
        own = [session for session in self.sessions if self.dice.random() < 0.7] or self.sessions[:1]
        growths = [self._growth(session, worker) for session in own]
        wanted, is_mixed = [], self.forest.mix.is_active or any(source for growth in growths for source in growth[2])
        for session, (as_of, grown, _) in zip(own, growths, strict=True):
            shift = self.forest.mix.shift(session.mirror.row) if is_mixed else None
            wanted.append(session.reference.graft(worker, as_of, grown, shift))
        parts = [
            Growth(
                session_id=number,
                epoch=1,
                as_of=as_of,
                node_ids=[node.node_id for node in grown],
                parents=[node.parent for node in grown],
                tokens=[node.token for node in grown],
                acceptance=[node.acceptance for node in grown],
                sources=sources,
            )
            for number, (as_of, grown, sources) in enumerate(growths)
        ]
        assert graft(worker, GrowthBatch.of(parts), [session.mirror for session in own]) == wanted
        assert self.forest.mix.is_active == is_mixed

    def _growth(self, session: Session, worker: str) -> tuple[int, list[Grown], list[GrowthSource]]:
        dice, next_id = self.dice, session.next_id[worker]
        length = len(session.token_ids)
        grown: list[Grown] = []
        for _ in range(dice.randrange(1, 12)):
            # Some are sent again, some share a place among the worker's ids with one of another message.
            next_id += 1 if grown else dice.choice([1, 1, 1, -3, RING])
            next_id = max(next_id, 1)
            # A branch, or anywhere; now and then below what was committed for certain.
            parent = next_id - 1 if grown and dice.random() < 0.6 else max(0, next_id - dice.randrange(1, 30))
            estimate = dice.choice([0.0, 0.3, 0.8, 1.0, 1.5, dice.random()])
            grown.append(
                Grown(next_id, parent * (dice.random() < 0.9), dice.randrange(3), estimate, dice.choice(self.sources))
            )
        session.next_id[worker] = next_id
        if dice.random() < 0.3:
            dice.shuffle(grown)
        as_of = dice.choice([length, length, max(1, length - dice.randrange(6)), max(1, length - 400), length + 1])
        own = [node.source for node in grown]
        return as_of, grown, own if any(source is not MODEL for source in own) else []

    def round(self) -> None:
        """Some nodes are verified, and tokens committed that may have nodes or not."""
        commitments = []
        for session in self.sessions:
            if self.dice.random() < 0.4:
                continue
            slots, tree = session.slots(), session.reference.tree()
            path: TokenPath = ()
            while (below := [p for p in slots if p[:-1] == path]) and self.dice.random() < 0.7:
                path = self.dice.choice(sorted(below))
            accepted = [slots[path[:end]] for end in range(1, len(path) + 1)]
            if self.forest.mix.is_active:
                self.forest.mix.note_round(self.forest, np.array(accepted, int), np.array(accepted[:1], int))
                for number, end in enumerate(range(1, len(path) + 1)):
                    told = {source for source in tree[path[:end]].told if source is not MODEL}
                    columns = [*told, *([0] if MODEL not in tree[path[:end]].told else [])]
                    session.reference.counts[1, columns] += 1
                    session.reference.counts[2, columns] += number == 0
            many = 300 if self.dice.random() < 0.02 else self.dice.randrange(1, 4)
            new = [*path, *(self.dice.randrange(3) for _ in range(many))]
            keeps_tree = self.dice.random() < 0.9
            session.token_ids.extend(new)
            session.reference.commit(new, keeps_tree=keeps_tree)
            commitments.append(Commitment(session.mirror, new, accepted, keeps_tree))
        commit_together(*commitments)

    def leave(self) -> None:
        """A worker begins anew, or a session ends and another takes its place."""
        session = self.dice.choice(self.sessions)
        if self.dice.random() < 0.7:
            worker = self.dice.choice("abc")
            session.mirror.forget_worker(worker)
            session.reference.ids.pop(worker, None)
            session.reference.as_of.pop(worker, None)
            return
        session.mirror.close()
        self.sessions.remove(session)
        self.sessions.append(Session(self.forest))

    def run(self, turns: int) -> None:
        """Checks after about every other turn: what is looked at is noted by that."""
        for _ in range(turns):
            self.dice.choices([self.message, self.round, self.leave], weights=[12, 4, 1])[0]()
            for session in self.sessions:
                if self.dice.random() < 0.5:
                    session.check()


def play(seeds: range) -> None:
    """At first only models grow, and in every third play to its end."""
    for seed in seeds:
        game = Play(seed)
        game.run(20)
        if seed % 3:
            game.sources = (MODEL, MODEL, GrowthSource.NGRAM, GrowthSource.EAGLE)
        game.run(100)


def test_whatever_comes_trees_estimates_and_counts_are_those_of_the_reference():
    play(range(12))


@pytest.mark.skipif(not IS_COMPILED, reason="what runs without numba is what ran")
def test_they_are_without_numba_too():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from outrider.compiled import IS_COMPILED\n"
        "from test_grafting import play\n"
        "assert not IS_COMPILED\n"
        "play(range(4))"
    )
    folder = Path(__file__).parent
    command = [sys.executable, "-c", code, str(folder), str(folder.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
