"""The draft's side of a token tree: which nodes have KV, which are next to be expanded, and what a commit leaves.

A node is *taken* to be expanded: it gets a place for its KV, in the session's row of the slot table at key index
`tree_start + key_offset`, where `tree_start` is the committed length. It is *expanded* once the forward over it has
given its children; until then it is in flight. The root's own KV belongs to the committed prefix.

A step's host time is one of its costs, so the trees of a worker are columns (`draft_forest`), and a step's nodes are
taken and expanded over all of them at once. What is here is one tree of these, by itself, for whoever looks at one.

The best child of a node in flight may be *promised* to the step behind it, before anybody but the device knows its
token: position, mask and a place for its KV follow from its parent. `DraftTree.grow` gives it its name, or ends it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from outrider.draft_distribution import DraftDistribution
from outrider.draft_worker import tree_kernels as kernels
from outrider.draft_worker.draft_forest import FIRST_GUESS, DraftForest, Ints, TakingLimits
from outrider.draft_worker.tree_kernels import (
    ACCEPTANCE,
    COUNT,
    EXPANDED,
    FIELDS,
    FINALS,
    HEAP,
    IS_LEARNED,
    KEY,
    KEYS,
    LAST_POSITION,
    LEAF,
    MAX_CHILDREN,
    MAX_DEPTH,
    NEXT_ID,
    NODE_ID,
    PARENT,
    POSITION,
    PROMISED,
    ROOT,
    SERIAL,
    SIZE,
    TOKEN,
    VALUE,
)  # fmt: skip


class DraftNode:
    """A node as it is looked at from outside the columns.

    Args:
        tree: that it is in.
        row: of the columns.
        serial: tells it from other nodes that have had the row; the present one's by default.
    """

    __slots__ = ("_forest", "_row", "_serial", "_tree")

    def __init__(self, tree: "DraftTree", row: int, serial: int | None = None) -> None:
        self._tree, self._row, self._forest = tree, row, tree.forest
        self._serial = self._forest.nodes[row, SERIAL] if serial is None else serial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftNode) and (self._forest, self._row, self._serial) == (
            other._forest, other._row, other._serial,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self._serial)

    @property
    def row(self) -> int:
        """Of the columns."""
        return self._row

    @property
    def serial(self) -> int:
        """Of the node, and of no other."""
        return self._serial

    @property
    def is_dead(self) -> bool:
        """Whether the tree has gone on without it."""
        return self._forest.nodes[self._row, SERIAL] != self._serial

    @property
    def token(self) -> int:
        """Its token; of one that is promised -1 - r, the best child of row r of the step before."""
        return self._field(TOKEN)

    @property
    def node_id(self) -> int:
        """Unique in its session's epoch, from 1; 0 for a root that was never a node."""
        return self._field(NODE_ID)

    @property
    def position(self) -> int:
        """Index of the token in prompt + output."""
        return self._field(POSITION)

    @property
    def key_offset(self) -> int:
        """Where its KV lies in the tree region; negative without KV, and for the root."""
        return self._field(KEY)

    @property
    def has_kv(self) -> bool:
        """Whether it has a place for its KV in the tree region."""
        return self.key_offset >= 0

    @property
    def parent(self) -> "DraftNode | None":
        """The node above; None for a root and for what is no longer in a tree."""
        above = -1 if self.is_dead else self._field(PARENT)
        return None if above < 0 else DraftNode(self._tree, above)

    @property
    def acceptance(self) -> float:
        """Estimate given the parent."""
        return self._forest.values[self._row, ACCEPTANCE]

    @property
    def value(self) -> float:
        """Product of the estimates from the root that the tree began with."""
        return self._forest.values[self._row, VALUE]

    @property
    def mask(self) -> int:
        """Bit j: attends to key offset j; itself and its ancestors below the root."""
        masks = self._forest.masks
        words = [masks[self._row, word] % (1 << 64) for word in range(masks.shape[1])]
        return sum(bits << 64 * word for word, bits in enumerate(words))

    @property
    def path_value(self) -> float:
        """Product of the estimates from below the present root."""
        above = self.parent
        return 1.0 if above is None else above.path_value * self.acceptance

    @property
    def depth(self) -> int:
        """Below the present root."""
        return self.position - self._tree.root.position

    @property
    def child_tokens(self) -> list[int] | None:
        """Tokens of all children that were considered, best first; None until it is expanded."""
        return self._of_children(0) if self._field(kernels.STATE) == EXPANDED else None

    @property
    def child_buckets(self) -> npt.NDArray[np.int64] | None:
        """[k] calibration buckets of `child_tokens`; None where nothing is learned from them."""
        return np.array(self._of_children(1), dtype=np.int64) if self._field(IS_LEARNED) else None

    @property
    def child_distribution(self) -> DraftDistribution | None:
        """The q that the only child was drawn from, under rejection."""
        return self._tree.distributions.get(self._serial)

    @property
    def distribution(self) -> DraftDistribution | None:
        """The q that the token was drawn from, under rejection."""
        above = self.parent
        return None if above is None else above.child_distribution

    @property
    def children(self) -> "dict[int, DraftNode]":
        """All children by token."""
        below = [DraftNode(self._tree, row) for row in self._of_children(2) if row >= 0]
        return {node.token: node for node in below}

    @property
    def taken(self) -> "dict[int, DraftNode]":
        """The children that have been taken, by token; one that is promised among them."""
        below = list(self.children.values())
        if (promised := self._field(PROMISED)) >= 0:
            below.append(DraftNode(self._tree, promised))
        return {node.token: node for node in below if node._field(kernels.STATE) != LEAF}

    def _of_children(self, part: int) -> list[int]:
        nodes, begin = self._forest.nodes, FIELDS + part * self._forest.children
        return [nodes[self._row, place] for place in range(begin, begin + self._field(COUNT))]

    def _field(self, field: int) -> int:
        return self._forest.nodes[self._row, field]


class DraftTree:
    """A token tree with a frontier: the nodes that can be expanded, best path value first.

    Args:
        root_token: the last committed token.
        position: its index in prompt + output.
        max_depth: deepest node below the root.
        max_children: most children of a node, which is its session's credit.
        last_position: index of the last token the session may have; nodes there have no children.
        final_tokens: tokens that end the session; nodes that hold one have no children.
        forest: where it grows; by default one of its own.
        number: of the forest's trees, which is free.

    Attributes:
        forest: as given.
        number: as given.
        last_position: as given.
        distributions: under rejection, the q that a node's child was drawn from, by its serial number.
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
        forest: DraftForest | None = None,
        number: int = 0,
    ) -> None:
        self.forest = DraftForest(1) if forest is None else forest
        self.number, self.last_position = number, last_position
        self.distributions: dict[int, DraftDistribution] = {}
        self._final_tokens = final_tokens
        # Of a tree that is no more: whoever shares its ids goes on.
        self._ids_after = 0
        self.forest.reserve(rows=1, final=len(final_tokens))
        columns = self.forest.columns
        assert columns.trees[number, ROOT] < 0, f"tree {number} is taken"
        limits = {
            NEXT_ID: 1, MAX_DEPTH: max_depth, MAX_CHILDREN: max_children, LAST_POSITION: last_position,
            FINALS: len(final_tokens), HEAP: 0,
        }  # fmt: skip
        for field, value in limits.items():
            columns.trees[number, field] = value
        for place, token in enumerate(final_tokens):
            columns.finals[number, place] = token
        columns.guesses[number] = FIRST_GUESS
        kernels.plant(columns, number, root_token, 0, position)

    @property
    def root(self) -> DraftNode:
        """The last committed token's node."""
        return DraftNode(self, self.forest.trees[self.number, ROOT])

    @property
    def size(self) -> int:
        """Live nodes, the root not counted."""
        return self.forest.trees[self.number, SIZE]

    @property
    def position(self) -> int:
        """Of the root."""
        return self.forest.nodes[self.forest.trees[self.number, ROOT], POSITION]

    @property
    def guess(self) -> float:
        """What a best child's estimate should be, by those of late."""
        return self.forest.guesses[self.number]

    @property
    def best_value(self) -> float:
        """Path value of the best node that can be expanded; 0 if there is none."""
        return kernels.best_value(self.forest.columns, self.number)

    @property
    def waiting(self) -> int:
        """Entries of the frontier."""
        return self.forest.trees[self.number, HEAP]

    @property
    def held(self) -> list[DraftNode]:
        """All nodes with KV below the root, by their places; those that are promised among them."""
        keyed, used = self.forest.columns.keyed, self.forest.trees[self.number, KEYS]
        rows = [int(keyed[self.number, offset]) for offset in range(used)]
        return [DraftNode(self, row) for row in rows if row >= 0]

    def new_id(self) -> int:
        """The next node id, also when the tree is closed."""
        if self._ids_after:
            self._ids_after += 1
            return self._ids_after - 1
        trees = self.forest.trees
        trees[self.number, NEXT_ID] += 1
        return trees[self.number, NEXT_ID] - 1

    def may_expand(self, node: DraftNode) -> bool:
        """Whether the node may have children now, be they known or not."""
        return (
            node.token not in self._final_tokens
            and node.position < self.last_position
            and node.position - self.position < self.forest.trees[self.number, MAX_DEPTH]
        )

    @property
    def root_is_open(self) -> bool:
        """`may_expand` of the root."""
        nodes, root = self.forest.nodes, self.forest.trees[self.number, ROOT]
        return nodes[root, POSITION] < self.last_position and nodes[root, TOKEN] not in self._final_tokens

    def promise(self, parent: DraftNode, row: int) -> None:
        """Puts the best child of a node in flight into the frontier, unless it is there or may have no children.

        Args:
            parent: the node.
            row: of the rows of the step it is in whose children are ranked.
        """
        self.forest.reserve(rows=1, heap=1)
        kernels.promise(self.forest.columns, parent.row, row)

    def grow(
        self,
        parent: DraftNode,
        tokens: Sequence[int],
        acceptance: Sequence[float],
        buckets: npt.NDArray[np.int64] | None,
        *,
        distribution: DraftDistribution | None = None,
        min_acceptance: float = 0.0,
    ) -> int:
        """Gives an unexpanded node its children; how many nodes were made.

        Args:
            parent: the node.
            tokens: [k] best first; -1 past the last that may be chosen.
            acceptance: [k] estimates given the parent.
            buckets: [k] calibration buckets; None where nothing is to be learned from the children.
            distribution: the q that the only child was drawn from, under rejection.
            min_acceptance: children below it are remembered for the calibration alone.
        """
        assert parent.child_tokens is None, "a node is expanded twice"
        filed = np.zeros(len(tokens), np.int64) if buckets is None else buckets
        grown = self.forest.grow(
            np.array([[parent.row, parent.serial]]),
            [1],
            np.array([tokens], dtype=np.int64).reshape(1, -1),
            np.array([acceptance], dtype=np.float64).reshape(1, -1),
            filed[None].astype(np.int64),
            learned=np.array([buckets is not None], dtype=np.int64),
            least=min_acceptance,
        )
        if distribution is not None:
            self.distributions[parent.serial] = distribution
        return grown.counts[0]

    def take_best(self) -> DraftNode | None:
        """Removes the best node of the frontier, if there is one, for expansion."""
        return next(iter(self.take(1)), None)

    def take(self, most: int, min_value: float = 0.0) -> list[DraftNode]:
        """Removes the best nodes of the frontier, at most `most` of at least `min_value`, for expansion."""
        return [DraftNode(self, row) for row in self.take_rows(most, min_value).tolist()]

    def take_rows(self, most: int, min_value: float = 0.0) -> Ints:
        """`take`, as rows of the columns."""
        taken = np.empty(min(most, self.waiting), dtype=np.int64)
        return taken[: kernels.take(self.forest.columns, self.number, len(taken), min_value, taken)]

    def clear(self) -> None:
        """Drops every node below the root; ids go on counting."""
        root = self.root
        self.distributions.clear()
        kernels.plant(self.forest.columns, self.number, root.token, root.node_id, root.position)

    def close(self) -> None:
        """Gives its place in the forest back; of all else only `new_id` may be asked for afterwards."""
        self._ids_after = self.forest.trees[self.number, NEXT_ID]
        self.distributions.clear()
        kernels.uproot(self.forest.columns, self.number)

    def reroot(self, token_ids: Sequence[int]) -> tuple[npt.NDArray[np.int64], list[int], int]:
        """Moves the root along the committed tokens, at least one.

        Returns:
            What they say of the estimates, the key offsets that are kept, and how many of these are on the way: as
            `DraftForest.commit` says.
        """
        found = self.forest.commit(self.number, token_ids)
        if self.distributions:
            alive = {node.serial for node in (self.root, *self.nodes())}
            self.distributions = {serial: q for serial, q in self.distributions.items() if serial in alive}
        return found

    def nodes(self) -> Iterator[DraftNode]:
        """All nodes below the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def best(self, most: int, *, max_depth: int) -> list[DraftNode]:
        """At most `most` nodes of highest path value, best first; every node's parent stands before it."""
        return [DraftNode(self, row) for row in self.best_rows(most, max_depth=max_depth).tolist()]

    def best_rows(self, most: int, *, max_depth: int) -> Ints:
        """`best`, as rows of the columns."""
        arrays, rows = self.forest.arrays, self._below()
        rows = rows[arrays.nodes[rows, POSITION] <= self.position + max_depth]
        # No child is worth more than its parent, and ids break ties in the order that nodes were made.
        return rows[np.lexsort((arrays.nodes[rows, NODE_ID], -arrays.values[rows, VALUE]))[:most]]

    def path_values(self) -> npt.NDArray[np.float64]:
        """Of all nodes below the root, in no order."""
        return self.forest.arrays.values[self._below(), VALUE] / self.root.value

    def _below(self) -> Ints:
        found = np.empty(self.size, dtype=np.int64)
        kernels.below(self.forest.columns, self.number, found)
        return found


def assign_keys(forest: DraftForest, rows: Ints, first_offset: int) -> None:
    """Gives nodes of a tree consecutive key offsets and the masks that follow from their parents'.

    Args:
        forest: of the tree.
        rows: [n] of the columns, parents before children.
        first_offset: of the first node.
    """
    forest.reserve(keys=first_offset + len(rows))
    kernels.give_keys(forest.columns, rows, first_offset)


def warm_up() -> None:
    """Compiles the loops, or loads what was compiled, before anybody waits for them."""
    forest = DraftForest(1)
    tree = DraftTree(0, 0, max_depth=9, max_children=9, last_position=9, final_tokens=frozenset(), forest=forest)
    root = tree.root
    tree.promise(root, 0)
    tree.grow(root, [1, 2, 3], [0.5, 0.3, 0.2], None)
    assign_keys(forest, tree.take_rows(1), 0)
    limits = TakingLimits(
        branching=1,
        max_session_nodes=1,
        min_session_nodes=1,
        max_live_nodes=9,
        max_row_len=9,
        most_promised=1,
        min_path_value=0.0,
    )
    forest.take([0], [2], limits, width=1, turn=0, before=np.array([[root.row, root.serial]]))
    tree.reroot([1])
    assert tree.best_value == len(tree.path_values()) == 0
    tree.clear()
    tree.close()
