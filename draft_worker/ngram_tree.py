"""A tree of guesses out of the trie: the suffixes of the text that were seen before, and what came after them.

Suffixes are taken longest first, each with the whole of what is left of the budget, so that a text that repeats itself
is followed far along one branch, and one that only resembles what was seen gets many short ones. A node of a tree
below a suffix of m tokens has at most

    breadth(m) = min_breadth + (max_breadth - min_breadth) * (D - m) / (D - 1)

children. Below one suffix nodes are taken

    recency    level by level, children that were used last first
    frequency  most likely first: a node's share is count / sum of its siblings' counts, times its parent's share

(`bfs` and `prob` of SGLang's n-gram source, whose behaviour cases these pass; the code is our own.) Only the most
recently used children of a node are looked at, so that a node with thousands of them costs no more than others. What
is compiled takes columns in tuples, and many arguments: objects cost more than the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from outrider.compiled import compiled
from outrider.draft_worker.ngram_options import WEIGHED, MatchType
from outrider.draft_worker.ngram_trie import NgramTrie, Nodes, find

# The share of a path that is in the tree already.
_TAKEN = -1.0


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """How trees are made of the trie; names of SGLang's n-gram source, without its prefix.

    Attributes:
        draft_tokens: most nodes of a tree.
        min_match: shortest suffix that is looked for, in tokens.
        min_breadth: children of a node below the longest suffix.
        max_breadth: children of a node below the shortest; 1 makes a single branch.
        match_type: which children come first: prob, the most frequent; bfs, the most recent.

    Raises:
        ValueError: a value out of range.
    """

    draft_tokens: int = 12
    min_match: int = 1
    min_breadth: int = 1
    max_breadth: int = 10
    match_type: MatchType = "prob"

    def __post_init__(self) -> None:
        for name in ("draft_tokens", "min_match", "min_breadth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 needed")
        if not self.min_breadth <= self.max_breadth <= WEIGHED:
            needed = f"min_breadth ({self.min_breadth}) to {WEIGHED} needed"
            raise ValueError(f"max_breadth: {self.max_breadth} given, {needed}")
        if self.match_type not in ("prob", "bfs"):
            raise ValueError(f"match_type: {self.match_type!r} given, prob or bfs needed")


@dataclass(frozen=True, slots=True)
class GuessColumns:
    """Guesses after each of B texts, a row a text, at most S nodes, parents before their children.

    Attributes:
        tokens: int32 [B, S].
        parents: int32 [B, S] places in the row; -1 is the text's end.
        shares: float64 [B, S] each node's count by the sum of its siblings', in the trie.
        counts: int32 [B, S] how often the trie has seen the node's path.
        contexts: int32 [B, S] tokens before the node that the trie has counted it after.
        found: int32 [B, 2] nodes of the row, and tokens of the longest suffix that the trie can continue.
    """

    tokens: Any
    parents: Any
    shares: Any
    counts: Any
    contexts: Any
    found: Any


@dataclass(slots=True)
class TextTails:
    """The last tokens of B texts, at most W of each.

    Attributes:
        tails: int32 [B, W]; what is past a row's length is of no account.
        lengths: int32 [B] tokens of each row.
    """

    tails: Any
    lengths: Any

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], width: int) -> "TextTails":
        """The last `width` tokens of each text."""
        tails = np.zeros((len(texts), width), np.int32)
        for row, text in zip(tails, texts, strict=True):
            tail = text[-width:]
            row[: len(tail)] = tail
        return cls(tails, np.array([min(len(text), width) for text in texts], np.int32))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, chosen: Any) -> "TextTails":
        return TextTails(self.tails[chosen], self.lengths[chosen])


@dataclass(frozen=True, slots=True)
class NgramTree:
    """Guesses after a text, [n] nodes, parents before their children.

    Attributes:
        tokens: [n].
        parents: [n] places in this tree; -1 is the text's end.
        shares: [n] each node's count by the sum of its siblings', in the trie.
        counts: [n] how often the trie has seen the node's path.
        matched: tokens of the longest suffix that the trie can continue; 0 if none.
    """

    tokens: list[int]
    parents: list[int]
    shares: list[float]
    counts: list[int]
    matched: int


def guess(trie: NgramTrie, texts: Sequence[Sequence[int]], config: NgramConfig) -> list[NgramTree]:
    """What may follow each text, of which only the last D - 1 tokens are looked at; all texts in one call."""
    columns = guess_columns(trie, TextTails.of(texts, trie.max_trie_depth - 1), config)
    rows = (columns.tokens, columns.parents, columns.shares, columns.counts)
    tokens, parents, shares, counts = (cast("list[list[Any]]", column.tolist()) for column in rows)
    return [
        NgramTree(tokens[row][:n], parents[row][:n], shares[row][:n], counts[row][:n], matched)
        for row, (n, matched) in enumerate(columns.found.tolist())
    ]


def guess_columns(trie: NgramTrie, texts: TextTails, config: NgramConfig) -> GuessColumns:
    """`guess`, as columns; the texts' tails are D - 1 wide."""
    size = config.draft_tokens
    tokens, parents, counts, contexts = np.zeros((4, len(texts), size), np.int32)
    shares, found = np.zeros((len(texts), size)), np.zeros((len(texts), 2), np.int32)
    options = (config.min_match, config.min_breadth, config.max_breadth, config.match_type == "prob")
    build_all(trie.nodes, texts.tails, texts.lengths, options, (tokens, parents, shares, counts, contexts), found)
    return GuessColumns(tokens, parents, shares, counts, contexts, found)


@compiled
def build_all(nodes: Nodes, tails: Any, lengths: Any, options: Any, columns: Any, found: Any) -> None:  # noqa: PLR0917
    """Fills the rows of the columns (tokens, parents, shares, counts, contexts) and of `found` (nodes, longest match).

    `options` are those of the NgramConfig: (min_match, min_breadth, max_breadth, whether by frequency).
    """
    _, min_breadth, max_breadth, by_frequency = options
    depth = tails.shape[1] + 1
    most = columns[0].shape[1] * max_breadth + max_breadth
    # Nodes that may come next: of the trie, their parent's place in the tree, share of the path, share among siblings.
    waiting = (
        np.zeros(most, np.int32),
        np.zeros(most, np.int32),
        np.zeros(most, np.float32),
        np.zeros(most, np.float32),
    )
    order, matches = np.zeros(WEIGHED, np.int32), np.zeros(len(tails), np.int64)
    _longest_matches(
        nodes.token, nodes.parent, nodes.chain, nodes.heads, nodes.state, nodes.suffix, tails, lengths, matches
    )
    for row in range(len(tails)):
        tree = (columns[0][row], columns[1][row], columns[2][row], columns[3][row], columns[4][row])
        node, length = int(matches[row]), 0
        while nodes.depth[node] >= options[0] and length < len(tree[0]):
            if nodes.first[node] != 0:
                found[row, 1] = max(found[row, 1], nodes.depth[node])
                breadth = min_breadth + (max_breadth - min_breadth) * (depth - nodes.depth[node]) // (depth - 1)
                length = _grow(
                    nodes.token, nodes.count, nodes.first, nodes.next, nodes.suffix, nodes.depth, node,
                    (depth, breadth, by_frequency), tree, length, waiting, order,
                )  # fmt: skip
            node = int(nodes.suffix[node])
        found[row, 0] = length


@compiled
def _longest_matches(  # noqa: PLR0917
    tokens: Any, parents: Any, chains: Any, heads: Any, state: Any, suffixes: Any, tails: Any, lengths: Any,
    matches: Any,
) -> None:  # fmt: skip
    """The nodes of each text's longest suffix that is in the trie (Aho and Corasick 1975), into `matches`, which is 0.

    Token by token of all texts: what one of them has to wait for in memory the others wait for meanwhile.
    """
    for place in range(tails.shape[1]):
        for row in range(len(tails)):
            if place < lengths[row]:
                node, token = int(matches[row]), int(tails[row, place])
                child = find(tokens, parents, chains, heads, state, node, token)
                while child == 0 and node != 0:
                    node = int(suffixes[node])
                    child = find(tokens, parents, chains, heads, state, node, token)
                matches[row] = child


@compiled
def _grow(  # noqa: PLR0917
    tokens: Any, counts: Any, firsts: Any, nexts: Any, suffixes: Any, depths: Any, suffix: int, options: Any, tree: Any,
    length: int, waiting: Any, order: Any,
) -> int:  # fmt: skip
    """Adds what hangs below one suffix; returns how many nodes there are then.

    The trie's columns come one by one, as in `find`.
    """
    by_frequency = options[2]
    taken, offered = 0, _offer(counts, firsts, nexts, suffixes, depths, suffix, -1, 1.0, options, waiting, 0, order)
    while taken < offered and length < len(tree[0]):
        best = taken
        if by_frequency:
            best = 0
            for candidate in range(1, offered):
                if waiting[2][candidate] > waiting[2][best]:
                    best = candidate
        # As Python's own numbers: what is compiled is compiled for one kind of each.
        node, parent = int(waiting[0][best]), int(waiting[1][best])
        of_path, of_siblings = float(waiting[2][best]), float(waiting[3][best])
        waiting[2][best] = _TAKEN
        taken += 1
        place = _place_of(tree, length, parent, tokens[node])
        if place == length:
            tree[0][place], tree[1][place] = tokens[node], parent
            tree[2][place], tree[3][place], tree[4][place] = of_siblings, counts[node], depths[node] - 1
            length += 1
        if offered + options[1] <= len(waiting[0]):
            offered = _offer(
                counts, firsts, nexts, suffixes, depths, node, place, of_path, options, waiting, offered, order
            )
    return length


@compiled
def _place_of(tree: Any, length: int, parent: int, token: int) -> int:
    """Where the tree has that child already, or `length`."""
    for place in range(length):
        if tree[1][place] == parent and tree[0][place] == token:
            return place
    return length


@compiled
def _offer(  # noqa: PLR0917
    counts: Any, firsts: Any, nexts: Any, suffixes: Any, depths: Any, node: int, place: int, of_path: float,
    options: Any, waiting: Any, offered: int, order: Any,
) -> int:  # fmt: skip
    """Puts the first children of a node among those that may come next; returns how many these are then."""
    depth, breadth, by_frequency = options
    if depths[node] == depth:
        # Paths end here for want of room, not for want of what follows.
        node = suffixes[node]
    found, total = 0, 0
    child = firsts[node]
    while child != 0 and found < len(order):
        order[found] = child
        total += counts[child]
        found += 1
        child = nexts[child]
    for rank in range(min(breadth, found)):
        if by_frequency:
            # Of equals the one that was seen first, which stands last.
            best = found - 1
            for candidate in range(found - 2, rank - 1, -1):
                if counts[order[candidate]] > counts[order[best]]:
                    best = candidate
            chosen = order[best]
            for candidate in range(best, rank, -1):
                order[candidate] = order[candidate - 1]
            order[rank] = chosen
        share = int(counts[order[rank]]) / total
        waiting[0][offered], waiting[1][offered] = order[rank], place
        waiting[2][offered], waiting[3][offered] = of_path * share, share
        offered += 1
    return offered
