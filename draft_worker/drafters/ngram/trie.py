"""A trie of token sequences: every run of up to D tokens of the texts inserted, with how often it occurred.

A run is a path from the trie's root. A text that repeats an earlier one ends in a long suffix that is in the trie, and
what hangs below that suffix is what came next then; `proposals.py` makes a tree of candidates of it.

    capacity  most nodes; beyond it, the least recently used path loses its last node
    D         max_trie_depth, tokens of a path

No insertion takes long. Nodes are found by (parent, token) in a hash table of fixed size. Nodes are listed by use,
parents before their children, so the least recently used node never has children; so are a node's children, the most
recently used first. The nodes' memory is reserved at the start; the system provides it as it is first used.

Parameters are named as in SGLang's n-gram speculation; the structure is our own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.draft_worker.drafters.ngram.options import MAX_DEPTH, MIN_DEPTH
from outrider.kernels.compiled import compiled

ROOT = 0
# Entries of Nodes.state.
USED, EVICTED = 0, 1
# int32 words of a node, padding included.
_ROW = 12
# Nodes whose memory is made ready at a time.
_READY = 1 << 15
# The largest int32, at which counts stay.
_MAX_COUNT = 2**31 - 1


class Nodes(NamedTuple):
    """The trie as columns, int32 [capacity + 1] but for the last two. Entry 0 is the root; as a link, 0 means none."""

    token: Any
    parent: Any
    count: Any  # how often the node's path occurred
    first: Any  # the most recently used child
    next: Any  # the sibling that was used before this one
    previous: Any  # the sibling that was used after this one
    newer: Any  # the node that was used after this one, of all nodes; a ring through the root
    older: Any  # the node that was used before this one
    suffix: Any  # the node of the path without its first token; whenever this node is used it is, later: it outlives it
    depth: Any  # tokens of the node's path
    chain: Any  # the next node of the same bucket
    heads: Any  # [buckets], the first node of each
    state: Any  # int64 [2], nodes used and nodes evicted


class NgramTrie:
    """A trie of bounded size. Not thread-safe: `SharedTrie` holds a lock around it.

    Args:
        capacity: most nodes, at least 2 * max_trie_depth; up to 8 bytes each at the start, 48 more once used.
        max_trie_depth: D, tokens of a path; suffixes of up to D - 1 tokens are matched.
    """

    def __init__(self, *, capacity: int = 10_000_000, max_trie_depth: int = 18) -> None:
        # Options have been checked under the names that users know.
        assert MIN_DEPTH <= max_trie_depth <= MAX_DEPTH and 2 * max_trie_depth <= capacity < 2**30
        self.capacity, self.max_trie_depth = capacity, max_trie_depth
        # A node's words are adjacent: they are read together, from one cache line.
        self._rows = np.zeros((capacity + 1, _ROW), np.int32)
        # Written, so that the system provides this memory now: the first nodes use any part of it.
        self._heads = np.full(1 << capacity.bit_length(), 0, np.int32)
        self._ready = 1
        arrays = [*self._rows.T[: len(Nodes._fields) - 2], self._heads, np.zeros(2, np.int64)]
        self.nodes = Nodes(*arrays)

    def __len__(self) -> int:
        """Nodes in use, without the root."""
        return int(self.nodes.state[USED])

    @property
    def evicted(self) -> int:
        """Nodes evicted so far."""
        return int(self.nodes.state[EVICTED])

    def insert(self, *texts: tuple[Sequence[int], int]) -> None:
        """Count every run of up to D tokens that ends in tokens[start:], for each (tokens, start) given.

        Runs that end before `start` have been counted earlier. The tokens before it are context: the last D - 1 of the
        text are enough.
        """
        ends, starts = np.cumsum([len(tokens) for tokens, _ in texts]), np.array([start for _, start in texts])
        tokens = np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in texts])
        _insert(self.nodes, tokens, ends, starts, self.max_trie_depth, self.capacity)

    def make_ready(self, nodes: int) -> None:
        """Have the system provide the memory of the next `nodes` nodes, which takes it long.

        Touches only memory that no node uses yet, so other threads may read the trie meanwhile, but not insert.
        """
        self._ready = max(self._ready, len(self) + 1)
        while self._ready < min(len(self) + 1 + nodes, self.capacity + 1):
            end = self._ready + _READY
            self._rows[self._ready : end] = 0
            self._ready = end


@compiled
def find(tokens: Any, parents: Any, chains: Any, heads: Any, parent: int, token: int) -> int:
    """Return the parent's child with this token, or 0.

    The columns are passed one by one: passing a tuple of arrays costs a reference count of each.
    """
    node = int(heads[_bucket(heads, parent, token)])
    while node != 0 and (tokens[node] != token or parents[node] != parent):
        node = int(chains[node])
    return node


@compiled
def _insert(nodes: Nodes, tokens: Any, ends: Any, starts: Any, depth: int, capacity: int) -> None:
    first = 0
    for number in range(len(ends)):
        _insert_text(nodes, tokens[first : ends[number]], starts[number], depth, capacity)
        first = ends[number]


@compiled
def _insert_text(nodes: Nodes, tokens: Any, start: int, depth: int, capacity: int) -> None:
    path, path_before = np.zeros(MAX_DEPTH, np.int32), np.zeros(MAX_DEPTH, np.int32)
    length_before, new_before = 0, 0
    first, context = max(0, start - depth + 1), 0
    if nodes.state[USED] + (len(tokens) - start) * depth <= capacity:
        # Nothing is evicted during this call, so runs continue from the node of the context, if it exists.
        context = _node_of(nodes, tokens, first, start)
    for begin in range(first, len(tokens)):
        end = min(begin + depth, len(tokens))
        node, new = context, int(nodes.depth[context])
        context = int(nodes.suffix[context])
        place = new
        while begin + place < end:
            child = find(nodes.token, nodes.parent, nodes.chain, nodes.heads, node, int(tokens[begin + place]))
            if child == 0:
                break
            _use(nodes, node, child)
            if begin + place >= start and nodes.count[child] < _MAX_COUNT:
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
    """Return the node of the path tokens[first:end], or 0."""
    node = 0
    for place in range(first, end):
        node = find(nodes.token, nodes.parent, nodes.chain, nodes.heads, node, int(tokens[place]))
        if node == 0:
            break
    return node


@compiled
def _bucket(heads: Any, parent: int, token: int) -> int:
    mixed = (parent * 0x9E3779B1 ^ token * 0x85EBCA6B) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) & (len(heads) - 1)


@compiled
def _add(nodes: Nodes, parent: int, token: int, capacity: int) -> int:
    """Add a child as the most recently used of its siblings; evict the least recently used node if the trie is full."""
    if nodes.state[USED] < capacity:
        nodes.state[USED] += 1
        node = int(nodes.state[USED])
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
    # Directly behind its parent in the list by use, so that the oldest node never has children.
    _link_older(nodes, parent, node)
    bucket = _bucket(nodes.heads, parent, token)
    nodes.chain[node] = nodes.heads[bucket]
    nodes.heads[bucket] = node
    return node


@compiled
def _evict(nodes: Nodes, node: int) -> None:
    nodes.state[EVICTED] += 1
    _unlink_sibling(nodes, node)
    _unlink_use(nodes, node)
    bucket = _bucket(nodes.heads, int(nodes.parent[node]), int(nodes.token[node]))
    if nodes.heads[bucket] == node:
        nodes.heads[bucket] = nodes.chain[node]
        return
    before = nodes.heads[bucket]
    while nodes.chain[before] != node:
        before = nodes.chain[before]
    nodes.chain[before] = nodes.chain[node]


@compiled
def _use(nodes: Nodes, parent: int, node: int) -> None:
    """Move a node to the front of its siblings, and directly behind its parent in the list by use."""
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
