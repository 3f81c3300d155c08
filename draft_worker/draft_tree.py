"""The draft's side of a token tree: which nodes have KV, which are next to be expanded, and what a commit leaves.

A node is *taken* to be expanded: it gets a place for its KV, in the session's row of the slot table at key index
`tree_start + key_offset`, where `tree_start` is the committed length. It is *expanded* once the forward over it has
given its children; until then it is in flight. The root's own KV belongs to the committed prefix.

A step's host time is one of its costs, so a child is a row of its parent's list until it is taken, and a commit touches
the taken nodes alone: values are those seen from the root the tree began with, and what they are worth from the present
one is a division; what hangs on a dead node leaves the frontier when it is met there.

The best child of a node in flight may be *promised* to the step behind it, before anybody but the device knows its
token: position, mask and a place for its KV follow from its parent. `DraftTree.grow` gives it its name, or ends it.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from outrider.draft_distribution import DraftDistribution

# `key_offset` of a node without KV (and of the root), and of one that is no longer in the tree.
_NO_KEY, _DEAD = -1, -2
# Values are products that only become smaller: below this they are made anew.
_SMALLEST_ROOT_VALUE = 1e-100
# Dead entries that the frontier may hold beside twice the live ones.
_FRONTIER_SLACK = 64
# What a best child is worth that nobody has seen: at first, and how much of the last one's estimate that takes on.
_FIRST_GUESS, _GUESS_RATE = 0.7, 0.05


class DraftNode:
    """A node that was taken, or looked at from outside.

    Attributes:
        token: its token; of one that is promised -1 - r, the best child of row r of the step before.
        parent: the node above; None for a root and for what is no longer in a tree.
        acceptance: estimate given the parent.
        value: product of the estimates from the root that the tree began with.
        node_id: unique in its session's epoch, from 1; 0 for a root that was never a node.
        position: index of the token in prompt + output.
        key_offset: where its KV lies in the tree region; negative without KV, and for the root.
        mask: bit j: attends to key offset j; itself and its ancestors below the root.
        child_tokens: tokens of all children that were considered, best first; None until it is expanded.
        child_buckets: [k] calibration buckets of `child_tokens`; None where nothing is learned from them; not set until
            the node is expanded.
        child_distribution: the q that the only child was drawn from, under rejection; not set until then.
        made: (-value, node id, parent, token, acceptance) of every child that is a node.
        taken: the children that are objects, by token; one that is promised among them.
    """

    __slots__ = (
        "acceptance", "child_buckets", "child_distribution", "child_tokens", "key_offset", "made", "mask", "node_id",
        "parent", "position", "taken", "token", "value",
    )  # fmt: skip

    child_buckets: npt.NDArray[np.int64] | None
    child_distribution: DraftDistribution | None

    def __init__(  # noqa: PLR0917 - made some ten thousand times a second
        self, token: int, parent: "DraftNode | None", acceptance: float, value: float, node_id: int, position: int
    ) -> None:
        self.token = token
        self.parent = parent
        self.acceptance = acceptance
        self.value = value
        self.node_id = node_id
        self.position = position
        self.key_offset = _NO_KEY
        self.mask = 0
        self.child_tokens: list[int] | None = None
        self.made: Sequence[_Entry] = ()
        self.taken: dict[int, DraftNode] = _NONE_TAKEN

    @property
    def distribution(self) -> DraftDistribution | None:
        """The q that the token was drawn from, under rejection."""
        return None if self.parent is None else self.parent.child_distribution

    @property
    def is_dead(self) -> bool:
        """Whether the tree has gone on without it."""
        return self.key_offset == _DEAD

    @property
    def has_kv(self) -> bool:
        """Whether it has a place for its KV in the tree region."""
        return self.key_offset >= 0

    @property
    def children(self) -> "dict[int, DraftNode]":
        """All children by token, made into objects."""
        for entry in self.made:
            if entry[3] not in self.taken:
                _take(entry)
        return {entry[3]: self.taken[entry[3]] for entry in self.made}

    @property
    def path_value(self) -> float:
        """Product of the estimates from below the present root."""
        return 1.0 if self.parent is None else self.parent.path_value * self.acceptance

    @property
    def depth(self) -> int:
        """Below the present root."""
        return 0 if self.parent is None else self.parent.depth + 1


# Ids break ties, so that equal values are expanded in the order they were made.
_Entry = tuple[float, int, DraftNode, int, float]
# Never written.
_NONE_TAKEN: dict[int, DraftNode] = {}


class DraftTree:
    """A token tree with a frontier: the nodes that can be expanded, best path value first.

    Args:
        root_token: the last committed token.
        position: its index in prompt + output.
        max_depth: deepest node below the root.
        max_children: most children of a node.
        last_position: index of the last token the session may have; nodes there have no children.
        final_tokens: tokens that end the session; nodes that hold one have no children.

    Attributes:
        root: the last committed token's node.
        size: live nodes, the root not counted.
        last_position: as given.
        new_id: gives the next node id.
        guess: what a best child's estimate should be, by those of late.
    """

    def __init__(
        self,
        root_token: int,
        position: int,
        *,
        max_depth: int,
        max_children: int,
        last_position: int,
        final_tokens: frozenset[int],
    ) -> None:
        self.last_position = last_position
        self.size = 0
        self._max_depth = max_depth
        self._max_children = max_children
        self._final_tokens = final_tokens
        self.new_id = count(1).__next__
        self.guess = _FIRST_GUESS
        self._frontier: list[_Entry] = []
        # What may be expanded once the root has come nearer.
        self._deep: list[_Entry] = []
        self.root = DraftNode(root_token, None, 1.0, 1.0, 0, position)

    @property
    def best_value(self) -> float:
        """Path value of the best node that can be expanded; 0 if there is none."""
        frontier = self._frontier
        while frontier:
            if _is_there(frontier[0]):
                return -frontier[0][0] / self.root.value
            heappop(frontier)
        return 0.0

    def may_expand(self, node: DraftNode) -> bool:
        """Whether the node may have children now, be they known or not."""
        return (
            node.token not in self._final_tokens
            and node.position < self.last_position
            and node.position - self.root.position < self._max_depth
        )

    def promise(self, parent: DraftNode, row: int) -> None:
        """Puts the best child of a node in flight into the frontier, unless it is there or may have no children.

        Args:
            parent: the node.
            row: of the rows of the step it is in whose children are ranked.
        """
        position = parent.position + 1
        if (
            parent.taken is _NONE_TAKEN
            and position < self.last_position
            and position - self.root.position < self._max_depth
        ):
            parent.taken = {}
            # No other entry has its id.
            heappush(self._frontier, (-parent.value * self.guess, -1 - parent.node_id, parent, -1 - row, self.guess))

    def grow(
        self,
        parent: DraftNode,
        tokens: list[int],
        acceptance: Sequence[float],
        buckets: npt.NDArray[np.int64] | None,
        *,
        distribution: DraftDistribution | None = None,
        min_acceptance: float = 0.0,
    ) -> int:
        """Gives an unexpanded node its children.

        Args:
            parent: the node.
            tokens: [k] best first; -1 past the last that may be chosen.
            acceptance: [k] estimates given the parent.
            buckets: [k] calibration buckets; None where nothing is to be learned from the children.
            distribution: the q that the only child was drawn from, under rejection.
            min_acceptance: children below it are remembered for the calibration alone.

        Returns:
            How many nodes were made.
        """
        assert parent.child_tokens is None, "a node is expanded twice"
        if tokens and tokens[-1] < 0:
            tokens = [token for token in tokens if token >= 0]
            buckets = None if buckets is None else buckets[: len(tokens)]
        parent.child_tokens, parent.child_buckets, parent.child_distribution = tokens, buckets, distribution
        if len(tokens) > self._max_children:
            tokens = tokens[: self._max_children]
        scale, new_id = -parent.value, self.new_id
        # Fewer children than estimates where the vocabulary or the credit is smaller than the branching.
        promised, parent.taken = parent.taken, {}
        parent.made = made = [
            (scale * estimate, new_id(), parent, token, estimate)
            for token, estimate in zip(tokens, acceptance)  # noqa: B905 - a tenth of a child's time
            if estimate >= min_acceptance
        ]
        self.size += len(made)
        unexpanded = self._keep_promise(promised, tokens, made) if promised else made
        if tokens:
            self.guess += _GUESS_RATE * (acceptance[0] - self.guess)
        position = parent.position + 1
        if position < self.last_position:
            final, frontier = self._final_tokens, self._frontier
            open_ones = [entry for entry in unexpanded if entry[3] not in final] if final else unexpanded
            if position - self.root.position < self._max_depth:
                for entry in open_ones:
                    heappush(frontier, entry)
            else:
                self._deep += open_ones
        return len(made)

    def take_best(self) -> DraftNode | None:
        """Removes the best node of the frontier, if there is one, for expansion."""
        frontier = self._frontier
        while frontier:
            entry = heappop(frontier)
            if _is_there(entry):
                return entry[2].taken.get(entry[3]) or _take(entry)
        return None

    def take(self, most: int, min_value: float = 0.0) -> list[DraftNode]:
        """Removes the best nodes of the frontier, at most `most` of at least `min_value`, for expansion."""
        frontier, highest, taken = self._frontier, -min_value * self.root.value, []
        while most > 0 and frontier and frontier[0][0] <= highest:
            entry = heappop(frontier)
            if _is_there(entry):
                taken.append(entry[2].taken.get(entry[3]) or _take(entry))
                most -= 1
        return taken

    def clear(self) -> None:
        """Drops every node below the root; ids go on counting."""
        root = self.root
        self._plant(root.token, root.node_id, root.position)

    def reroot(self, token_ids: Sequence[int]) -> tuple[list[int], list[DraftNode]]:
        """Moves the root along the committed tokens.

        Returns:
            The key offsets of the nodes on the way, as far as they have KV, and the nodes with KV that survive below
            the new root, parents before children.
        """
        position, node, offsets = self.root.position + len(token_ids), self.root, []
        for token in token_ids:
            below = node.taken.get(token)
            if below is None or not below.has_kv:
                # One that was not taken has nothing below it.
                self._plant(token_ids[-1], 0, position)
                return offsets, []
            offsets.append(below.key_offset)
            node = below
        survivors = self._settle(node) if token_ids else self._objects()
        return offsets, [below for below in survivors if below.key_offset >= 0]

    def nodes(self) -> Iterator[DraftNode]:
        """All nodes below the root, parents before children, made into objects."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def best(self, most: int, *, max_depth: int) -> list[DraftNode]:
        """At most `most` nodes of highest path value, best first; every node's parent stands before it."""
        frontier = list(self.root.made)
        heapify(frontier)
        last, chosen = self.root.position + max_depth, []
        while frontier and len(chosen) < most:
            entry = heappop(frontier)
            node = entry[2].taken.get(entry[3]) or _take(entry)
            chosen.append(node)
            if node.position < last:
                for below in node.made:
                    heappush(frontier, below)
        return chosen

    def path_values(self) -> list[float]:
        """Of all nodes below the root, in no order."""
        scale = -1 / self.root.value
        return [entry[0] * scale for node in (self.root, *self._objects()) for entry in node.made]

    def _keep_promise(self, promised: dict[int, DraftNode], tokens: Sequence[int], made: list[_Entry]) -> list[_Entry]:
        """Gives a promised node its name, or ends it where it is not to be expanded; the children that are not taken.

        Args:
            promised: the node, by the token that it has so far.
            tokens: of the children, best first.
            made: the children that are nodes.
        """
        (node,) = promised.values()
        if not made or made[0][3] != tokens[0] or tokens[0] in self._final_tokens:
            _kill(node)
            return made
        negative_value, node.node_id, parent, node.token, node.acceptance = made[0]
        node.value = -negative_value
        parent.taken[node.token] = node
        return made[1:]

    def _plant(self, token: int, node_id: int, position: int) -> None:
        """A new root in place of everything."""
        _kill(self.root)
        self.root = DraftNode(token, None, 1.0, 1.0, node_id, position)
        self.size = 0
        self._frontier, self._deep = [], []

    def _settle(self, node: DraftNode) -> list[DraftNode]:
        """Makes a node the root, and returns the objects below; what does not hang there is dead."""
        assert node.parent is not None
        del node.parent.taken[node.token]
        _kill(self.root)
        self.root = node
        node.parent, node.key_offset, node.mask = None, _NO_KEY, 0
        below = self._objects()
        self.size = len(node.made) + sum([len(other.made) for other in below])
        if node.value < _SMALLEST_ROOT_VALUE:
            self._value_anew()
        nearer, self._deep = self._deep, []
        for entry in nearer:
            if entry[2].key_offset != _DEAD:
                if entry[2].position + 1 - node.position < self._max_depth:
                    heappush(self._frontier, entry)
                else:
                    self._deep.append(entry)
        if len(self._frontier) > 2 * self.size + _FRONTIER_SLACK:
            self._frontier = [entry for entry in self._frontier if _is_there(entry)]
            heapify(self._frontier)
        return below

    def _objects(self) -> list[DraftNode]:
        """The nodes below the root that are objects, parents before children."""
        found = list(self.root.taken.values())
        for node in found:
            if node.taken:
                found += node.taken.values()
        return found

    def _value_anew(self) -> None:
        """The root's value is 1 again."""
        factor = 1 / self.root.value
        for node in (self.root, *self._objects()):
            node.value *= factor
            node.made = [(entry[0] * factor, *entry[1:]) for entry in node.made]
        for entries in (self._frontier, self._deep):
            entries[:] = [(entry[0] * factor, *entry[1:]) for entry in entries]


def _take(entry: _Entry) -> DraftNode:
    """The child as an object."""
    negative_value, node_id, parent, token, acceptance = entry
    node = parent.taken[token] = DraftNode(token, parent, acceptance, -negative_value, node_id, parent.position + 1)
    return node


def _is_there(entry: _Entry) -> bool:
    """Whether what the frontier has there is in the tree: its parent is, and where it was promised, not known yet."""
    parent = entry[2]
    return parent.key_offset != _DEAD and (entry[3] >= 0 or parent.child_tokens is None)


def _kill(root: DraftNode) -> None:
    """Marks the objects of a tree as dead; nothing holds them in circles then."""
    dead = [root]
    for node in dead:
        if node.taken:
            dead += node.taken.values()
        node.key_offset, node.parent, node.taken, node.made = _DEAD, None, _NONE_TAKEN, ()


def assign_keys(nodes: Sequence[DraftNode], first_offset: int) -> None:
    """Gives nodes consecutive key offsets and the masks that follow from their parents', parents before children."""
    bit = 1 << first_offset
    for offset, node in enumerate(nodes, start=first_offset):
        assert node.parent is not None
        node.key_offset = offset
        node.mask = node.parent.mask | bit
        bit <<= 1
