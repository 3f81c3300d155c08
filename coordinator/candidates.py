"""The nodes that could go into a batch: of each session its best, in columns; and the trees of those that do.

A session's candidates are its nodes of highest path value, at most so many and so deep. Values fall along every path,
so every head of them is a tree: what is chosen of a session is a count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.compiled import IS_COMPILED
from outrider.coordinator.candidate_kernels import best_nodes, cut_trees
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.forest import Floats, Forest, Ints
from outrider.coordinator.group import Group
from outrider.coordinator.mirror import Mirror, TreeMirror
from outrider.coordinator.trees import Tree, Trees

_DEPTH_BITS = 6
_MOST_DEPTH = (1 << _DEPTH_BITS) - 1
_ONE = int(np.float32(1.0).view(np.int32))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Of S sessions, n nodes in all; each session's stand together, the best first, parents before children.

    Attributes:
        starts: [S + 1] session s has the entries from starts[s] to starts[s + 1].
        places: [n] the session of each.
        ranks: [n] how many of its session's stand before it.
        values: [n] path values.
        depths: [n] below the root, from 1.
        is_leaf: [n] whether nothing is known below it.
        slots: [n] where the forest has it; -1 for a chain's.
        chains: places of the sessions that have chains.
    """

    mirrors: Sequence[Mirror | None]
    starts: Ints
    places: Ints
    ranks: Ints
    values: Floats
    depths: Ints
    is_leaf: np.ndarray
    slots: Ints
    chains: Sequence[int]

    def trees(self, counts: Sequence[int] | Ints) -> Trees:
        """The trees of each session's first so many candidates, [S]."""
        counts = np.asarray(counts, dtype=np.int64)
        if not self.chains:
            return self._of_forest(counts)
        is_tree = np.ones(len(counts), dtype=np.int64)
        is_tree[list(self.chains)] = 0
        trees = list(self._of_forest(counts * is_tree))
        for place in self.chains:
            mirror = self.mirrors[place]
            assert isinstance(mirror, ChainMirror)
            trees[place] = _chain_tree(mirror, int(counts[place]))
        return Trees.of(trees)

    def _of_forest(self, counts: Ints) -> Trees:
        forest = _forest_of(self.mirrors)
        if forest is None or not counts.any():
            return Trees.of([Tree()] * len(counts))
        if IS_COMPILED:
            columns = cut_trees(forest.columns(0), self.starts, self.slots, self.values, self.depths, counts)
            slots, tokens, parents, values = columns
            return Trees(counts=counts, slots=slots, tokens=tokens.tolist(), parents=parents.tolist(), values=values)
        chosen = np.flatnonzero(self.ranks < counts[self.places])
        slots = self.slots[chosen]
        number = np.zeros(len(forest.row), dtype=np.int64)
        number[slots] = self.ranks[chosen] + 1
        parents = number[forest.parent[slots]]
        return Trees(
            counts=counts,
            slots=slots,
            tokens=forest.token[slots].tolist(),
            parents=parents.tolist(),
            values=self.values[chosen],
        )


def candidates(mirrors: Sequence[Mirror | None], *, most: Sequence[int], deepest: Sequence[int]) -> Candidates:
    """The candidates of sessions.

    Args:
        mirrors: [S] None has none.
        most: [S] how many of each.
        deepest: [S] nodes below that are left out; of a tree, those below depth 63 as well.
    """
    rows = np.array([mirror.row if isinstance(mirror, TreeMirror) else 0 for mirror in mirrors], dtype=np.int64)
    chains = [place for place, mirror in enumerate(mirrors) if isinstance(mirror, ChainMirror)]
    return _candidates(mirrors, rows, chains, np.array(most, dtype=np.int64), np.array(deepest, dtype=np.int64))


def group_candidates(group: Group, max_tree_nodes: int) -> Candidates:
    """The candidates of sessions, as far as their requests go and a tree of so many nodes."""
    return reaching_candidates(group, *group.reaches(max_tree_nodes))


def reaching_candidates(group: Group, most: Ints, deepest: Ints) -> Candidates:
    """`candidates` of a group's sessions; arguments as there."""
    return _candidates(group.mirrors, group.rows, group.chains, most, deepest)


def _candidates(
    mirrors: Sequence[Mirror | None], rows: Ints, chains: Sequence[int], most: Ints, deepest: Ints
) -> Candidates:
    forest = _forest_of(mirrors)
    if IS_COMPILED and forest is not None and not chains:
        found = best_nodes(forest.columns(0), len(forest.root), rows, most, deepest, _MOST_DEPTH)
        starts, places, ranks, slots, values, depths, is_leaf = found
        return Candidates(mirrors, starts, places, ranks, values, depths, is_leaf, slots, chains)
    places, slots, values, depths, is_leaf = (
        np.zeros(0, dtype=kind) for kind in (np.int64, np.int64, float, int, bool)
    )
    if forest is not None:
        places, slots = _best_slots(forest, rows, most, deepest)
        values, depths, is_leaf = forest.value[slots], forest.depth[slots], forest.first_child[slots] == 0
    if chains:
        parts = [_chain_columns(place, mirrors[place], int(min(most[place], deepest[place]))) for place in chains]
        columns = zip((places, slots, values, depths, is_leaf), *parts, strict=True)
        places, slots, values, depths, is_leaf = (np.concatenate(column) for column in columns)
        order = np.argsort(places, kind="stable")
        places, slots, values, depths, is_leaf = (column[order] for column in (places, slots, values, depths, is_leaf))
    starts = np.zeros(len(mirrors) + 1, dtype=np.int64)
    np.cumsum(np.bincount(places, minlength=len(mirrors)), out=starts[1:])
    ranks = np.arange(len(places)) - starts[places]
    return Candidates(mirrors, starts, places, ranks, values, depths, is_leaf, slots, chains)


def _forest_of(mirrors: Sequence[Mirror | None]) -> Forest | None:
    return next((mirror.forest for mirror in mirrors if isinstance(mirror, TreeMirror)), None)


def _best_slots(forest: Forest, rows: Ints, most: Ints, deepest: Ints) -> tuple[Ints, Ints]:
    """Places and slots of the tree mirrors' candidates, in their order; row 0 has none."""
    place_of = np.zeros(len(forest.root), dtype=np.int64)
    limit = np.zeros(len(forest.root), dtype=np.int64)
    place_of[rows] = np.arange(len(rows))
    limit[rows] = np.minimum(deepest, _MOST_DEPTH)
    limit[0] = 0
    slots = np.flatnonzero((forest.depth > 0) & (forest.depth <= limit.take(forest.row)))
    slots, places = _in_order(forest, slots, place_of.take(forest.row.take(slots)), len(rows))
    counts = np.bincount(places, minlength=len(rows))
    ranks = np.arange(len(places)) - (np.cumsum(counts) - counts).take(places)
    kept = ranks < most.take(places)
    return places[kept], slots[kept]


def _in_order(forest: Forest, slots: Ints, places: Ints, sessions: int) -> tuple[Ints, Ints]:
    """Slots and places by session, then falling value, then depth (a certain child is worth as much as its parent).

    One sort of one whole number each: session, value, depth and the number's own place, from high bits to low.
    """
    own_bits = len(slots).bit_length()
    value_bits = min(30, 63 - own_bits - sessions.bit_length() - _DEPTH_BITS)
    # The bits of a float of 0 to 1 are in its order.
    worth = forest.value.take(slots).astype(np.float32).view(np.int32)
    falling = (_ONE - worth).astype(np.int64) >> (30 - value_bits)
    keys = places << value_bits | falling
    keys = keys << _DEPTH_BITS | forest.depth.take(slots)
    keys = keys << own_bits | np.arange(len(slots))
    keys.sort()
    order = keys & ((1 << own_bits) - 1)
    return slots.take(order), places.take(order)


def _chain_columns(place: int, mirror: Mirror | None, most: int) -> tuple[np.ndarray, ...]:
    assert isinstance(mirror, ChainMirror)
    count = max(0, min(most, len(mirror.tokens)))
    is_leaf = np.zeros(count, dtype=bool)
    is_leaf[len(mirror.tokens) - 1 :] = True
    values = np.cumprod(mirror.acceptance[:count]) if count else np.zeros(0)
    return np.full(count, place), np.full(count, -1), values, np.arange(1, count + 1), is_leaf


def _chain_tree(mirror: ChainMirror, count: int) -> Tree:
    return Tree(
        tokens=mirror.tokens[:count],
        parents=range(count),
        values=np.cumprod(mirror.acceptance[:count]).tolist(),
        distributions=mirror.distributions[:count],
    )
