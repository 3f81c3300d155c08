"""What was said before, as a trie of token sequences: the source of growth that needs no model.

Every run of up to D tokens of every text that was inserted is a path from the trie's root, and every node counts how
often its path occurred. A text that repeats an earlier one has a long suffix in the trie, and what hangs below that
suffix is what came next then. `ngram_tree.py` makes a tree of guesses of it.

    capacity  most nodes; beyond it, the path that was not used for longest loses its last node
    D         max_trie_depth, tokens of a path

Nothing takes long at once. Nodes are found by (parent, token) in a table that grows by one bucket a node (linear
hashing, Litwin 1980); the least recently used node is the end of a list in which no node stands before its parent, so
that it never has children; memory is reserved at the start and taken by the system as it is first used. Children stand
most recently used first.

These functions are compiled by numba; where it cannot be installed they are the same in plain Python, several times
slower. Parameters are named as in SGLang's n-gram source; the structure is our own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.compiled import IS_COMPILED, compiled, entries

ROOT = 0
# Entries of Nodes.state.
USED, LEVEL, SPLIT, EVICTED = 0, 1, 2, 3
# Numbers of a node, and one that fills up.
_ROW = 12
# Nodes whose memory is made ready at a time; a page of the largest kind holds 2^19 entries.
_READY = 1 << 15
_MASK = 0xFFFFFFFF
# What int32 holds: counts stay there.
_MOST_COUNTED = 2**31 - 1


class Nodes(NamedTuple):
    """The trie as columns of a table; entry 0 is the root, which is never evicted, and 0 stands for "none".

    Attributes:
        token: int32 [capacity + 1].
        parent: likewise, as all that follow but the last two.
        count: how often the path to the node occurred.
        first: the child that was used last.
        next: the sibling that was used next to last before.
        previous: the other way.
        newer: by use, over all nodes; a ring that begins and ends at the root.
        older: the other way.
        suffix: the node of the same path without its first token. It was used after this one whenever this one was,
            so it is evicted later and always there.
        depth: tokens of the node's path.
        mixed: a hash of its parent and its token.
        chain: the next node of the same bucket.
        heads: int32 [buckets] the first node of each.
        state: int64 [4] nodes used, level and split of the linear hashing, nodes evicted.
    """

    token: Any
    parent: Any
    count: Any
    first: Any
    next: Any
    previous: Any
    newer: Any
    older: Any
    suffix: Any
    depth: Any
    mixed: Any
    chain: Any
    heads: Any
    state: Any


class NgramTrie:
    """A trie of bounded size. Not safe for several threads at once: `NgramSource` holds a lock around it.

    Args:
        capacity: most nodes, at least 2 * max_trie_depth; some 50 bytes each once used.
        max_trie_depth: D, tokens of a path; a suffix of at most D - 1 tokens can be continued.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, *, capacity: int = 10_000_000, max_trie_depth: int = 18) -> None:
        if not 2 <= max_trie_depth <= 64:
            raise ValueError(f"max_trie_depth: {max_trie_depth} given, 2 to 64 needed")
        if not 2 * max_trie_depth <= capacity < 2**30:
            raise ValueError(f"capacity: {capacity} given, {2 * max_trie_depth} (twice max_trie_depth) to 2^30 needed")
        self.capacity = capacity
        self.max_trie_depth = max_trie_depth
        self.clear()

    def __len__(self) -> int:
        """Nodes in use, the root left out."""
        return int(self.nodes.state[USED])

    def insert(self, tokens: Sequence[int], *, start: int = 0) -> None:
        """Counts every run of up to D tokens that ends in tokens[start:].

        Args:
            tokens: of one text, at least the last D - 1 before `start` where it goes on from there.
            start: tokens before it were counted by an earlier call.
        """
        insert_runs(self.nodes, _tokens(tokens), start, self.max_trie_depth, self.capacity)

    @property
    def evicted(self) -> int:
        """Nodes that had to make room since the start."""
        return int(self.nodes.state[EVICTED])

    @property
    def reserved_bytes(self) -> int:
        """Of memory that nodes may take; the system gives it as nodes are first used."""
        return sum(table.nbytes for table in self._tables)

    def insert_many(self, texts: Sequence[tuple[Sequence[int], int]]) -> None:
        """`insert` for each (tokens, start), in one go.

        Args:
            texts: at least one; no tokens of one count for the next.
        """
        ends, starts = np.cumsum([len(tokens) for tokens, _ in texts]), np.array([start for _, start in texts])
        tokens = np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in texts])
        insert_texts(self.nodes, _tokens(tokens), _numbers(ends), _numbers(starts), self.max_trie_depth, self.capacity)

    def make_ready(self, nodes: int) -> None:
        """Has the system give the memory of so many nodes to come, which it does a page at a time and slowly.

        Only what no node uses yet is touched, so that others may read the trie meanwhile; whoever inserts calls it.
        """
        # Entry n of either table is first used by the n-th node.
        self._ready = max(self._ready, len(self) + 1)
        while self._ready < min(len(self) + 1 + nodes, self.capacity + 1):
            end = self._ready + _READY
            for table in self._tables:
                table[self._ready : end] = 0
            self._ready = end

    def clear(self) -> None:
        """Forgets everything."""
        # A node's numbers stand together, for whoever reads one reads the others: one line of the cache, not ten.
        rows = np.zeros((self.capacity + 1, _ROW), np.int32)
        heads = np.zeros(1 << self.capacity.bit_length(), np.int32)
        self._tables = (rows, heads)
        self._ready = 1
        arrays = [*rows.T[: len(Nodes._fields) - 2], heads, np.zeros(4, np.int64)]
        self.nodes = Nodes(*map(entries, arrays))


def _tokens(tokens: Any) -> Any:
    return np.asarray(tokens, np.int32) if IS_COMPILED else np.asarray(tokens).tolist()


def _numbers(numbers: Any) -> Any:
    return numbers.astype(np.int64) if IS_COMPILED else numbers.tolist()


@compiled
def find(  # noqa: PLR0917
    tokens: Any, parents: Any, chains: Any, heads: Any, state: Any, parent: int, token: int
) -> int:
    """The parent's child of that token, or 0.

    The trie's columns come one by one: a tuple of arrays costs a count of references each wherever it is passed on.
    """
    node = int(heads[_bucket(state, _hash(parent, token))])
    while node != 0 and (tokens[node] != token or parents[node] != parent):
        node = int(chains[node])
    return node


@compiled
def insert_texts(  # noqa: PLR0917
    nodes: Nodes, tokens: Any, ends: Any, starts: Any, depth: int, capacity: int
) -> None:
    """`insert_runs` for each of the texts, which stand one after the other and end at `ends`."""
    first = 0
    for number in range(len(ends)):
        insert_runs(nodes, tokens[first : ends[number]], starts[number], depth, capacity)
        first = ends[number]


@compiled
def insert_runs(nodes: Nodes, tokens: Any, start: int, depth: int, capacity: int) -> None:
    """Counts every run of up to `depth` tokens that ends in tokens[start:]."""
    path, path_before = np.zeros(64, np.int32), np.zeros(64, np.int32)
    length_before, new_before = 0, 0
    first, context = max(0, start - depth + 1), 0
    if nodes.state[USED] + (len(tokens) - start) * depth <= capacity:
        # Nothing is evicted meanwhile: runs go on from where they ended, if they are there.
        context = _node_of(nodes, tokens, first, start)
    for begin in range(first, len(tokens)):
        end = min(begin + depth, len(tokens))
        node, new = context, int(nodes.depth[context])
        context = int(nodes.suffix[context])
        place = new
        while begin + place < end:
            child = find(
                nodes.token, nodes.parent, nodes.chain, nodes.heads, nodes.state, node, int(tokens[begin + place])
            )
            if child == 0:
                break
            _use(nodes, node, child)
            if begin + place >= start and nodes.count[child] < _MOST_COUNTED:
                nodes.count[child] += 1
            node = child
            path[place] = node
            place += 1
        for later in range(place, end - begin):
            node = _add(nodes, node, int(tokens[begin + later]), capacity)
            path[later] = node
        for earlier in range(max(1, new_before), length_before):
            nodes.suffix[path_before[earlier]] = int(path[earlier - 1])
        length_before, new_before = end - begin, new
        path, path_before = path_before, path


@compiled
def _node_of(nodes: Nodes, tokens: Any, first: int, end: int) -> int:
    """The node of the path tokens[first:end], or 0."""
    node = 0
    for place in range(first, end):
        node = find(nodes.token, nodes.parent, nodes.chain, nodes.heads, nodes.state, node, int(tokens[place]))
        if node == 0:
            break
    return node


@compiled
def _hash(parent: int, token: int) -> int:
    """31 bits of both, the lower ones of which tell as much as any."""
    mixed = (parent * 0x9E3779B1 ^ token * 0x85EBCA6B) & _MASK
    return (mixed ^ mixed >> 15) & _MOST_COUNTED


@compiled
def _bucket(state: Any, mixed: int) -> int:
    level = state[LEVEL]
    bucket = mixed & ((1 << level) - 1)
    if bucket < state[SPLIT]:
        bucket = mixed & ((2 << level) - 1)
    return bucket


@compiled
def _add(nodes: Nodes, parent: int, token: int, capacity: int) -> int:
    """A new child, the most recent of its siblings; the least recently used node makes room for it."""
    if nodes.state[USED] < capacity:
        nodes.state[USED] += 1
        node = int(nodes.state[USED])
        _split_a_bucket(nodes)
    else:
        node = int(nodes.newer[ROOT])
        _evict(nodes, node)
    nodes.parent[node] = parent
    nodes.token[node] = token
    nodes.count[node] = 1
    nodes.first[node] = 0
    nodes.suffix[node] = ROOT
    nodes.depth[node] = nodes.depth[parent] + 1
    _link_sibling(nodes, node)
    # Next to its parent, on the older side: whoever is the oldest of all has no children.
    _link_older(nodes, parent, node)
    nodes.mixed[node] = _hash(parent, token)
    bucket = _bucket(nodes.state, int(nodes.mixed[node]))
    nodes.chain[node] = nodes.heads[bucket]
    nodes.heads[bucket] = node
    return node


@compiled
def _evict(nodes: Nodes, node: int) -> None:
    nodes.state[EVICTED] += 1
    _unlink_sibling(nodes, node)
    _unlink_use(nodes, node)
    bucket = _bucket(nodes.state, int(nodes.mixed[node]))
    if nodes.heads[bucket] == node:
        nodes.heads[bucket] = nodes.chain[node]
        return
    before = nodes.heads[bucket]
    while nodes.chain[before] != node:
        before = nodes.chain[before]
    nodes.chain[before] = nodes.chain[node]


@compiled
def _split_a_bucket(nodes: Nodes) -> None:
    """One bucket more, which takes its share from the one that is next to be split."""
    level, split = int(nodes.state[LEVEL]), int(nodes.state[SPLIT])
    node, other = int(nodes.heads[split]), split + (1 << level)
    if split + 1 == 1 << level:
        nodes.state[LEVEL], nodes.state[SPLIT] = level + 1, 0
    else:
        nodes.state[SPLIT] = split + 1
    of_split, of_other = 0, 0
    while node != 0:
        after = int(nodes.chain[node])
        if nodes.mixed[node] >> level & 1:
            nodes.chain[node] = of_other
            of_other = node
        else:
            nodes.chain[node] = of_split
            of_split = node
        node = after
    nodes.heads[split], nodes.heads[other] = of_split, of_other


@compiled
def _use(nodes: Nodes, parent: int, node: int) -> None:
    """The node was used, and its parent before it: first among its siblings, and next to its parent by use."""
    if nodes.previous[node] != 0:
        _unlink_sibling(nodes, node)
        _link_sibling(nodes, node)
    if nodes.newer[node] != parent:
        _unlink_use(nodes, node)
        _link_older(nodes, parent, node)


@compiled
def _link_older(nodes: Nodes, of: int, node: int) -> None:
    older = nodes.older[of]
    nodes.newer[node] = of
    nodes.older[node] = older
    nodes.older[of] = node
    nodes.newer[older] = node


@compiled
def _unlink_use(nodes: Nodes, node: int) -> None:
    newer, older = nodes.newer[node], nodes.older[node]
    nodes.older[newer] = older
    nodes.newer[older] = newer


@compiled
def _link_sibling(nodes: Nodes, node: int) -> None:
    parent = nodes.parent[node]
    first = nodes.first[parent]
    nodes.previous[node] = 0
    nodes.next[node] = first
    if first != 0:
        nodes.previous[first] = node
    nodes.first[parent] = node


@compiled
def _unlink_sibling(nodes: Nodes, node: int) -> None:
    before, after = nodes.previous[node], nodes.next[node]
    if before != 0:
        nodes.next[before] = after
    else:
        nodes.first[nodes.parent[node]] = after
    if after != 0:
        nodes.previous[after] = before
