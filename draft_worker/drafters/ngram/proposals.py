"""Proposals: a tree of candidates after a text, of what followed its suffixes in the trie.

Suffixes are taken longest first, each with all that is left of the budget: a text that repeats itself is followed far
along one branch, one that only resembles earlier texts gets many short branches. Below a suffix of m tokens, a node has
at most min_breadth + (max_breadth - min_breadth) * (D - m) / (D - 1) children. Below one suffix, nodes are taken

    bfs   level by level, the most recently used children first
    prob  most likely first: a node's share is count / sum of its siblings' counts, times its parent's share

(as in SGLang's n-gram speculation, whose test cases these pass; the code is our own). Only a node's most recently used
children are considered, so a node with thousands of them costs no more than others. The compiled loops take many arrays
as arguments: packing them into objects would cost more than the search.

Shapes: B texts of at most W tokens, P proposals of a text at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.draft_worker.drafters.ngram.options import MAX_BREADTH, MatchType
from outrider.draft_worker.drafters.ngram.trie import NgramTrie, Nodes, find
from outrider.kernels.compiled import compiled

# The share of a candidate that has been taken.
_TAKEN = -1.0


@dataclass(frozen=True, kw_only=True)
class ProposalConfig:
    """Settings of proposals, named as in SGLang's n-gram speculation, without its prefix."""

    draft_tokens: int = 12  # most proposals after a text
    min_match: int = 1  # shortest suffix that is matched, in tokens
    min_breadth: int = 1  # most children of a node below the longest suffix
    max_breadth: int = 10  # most children of a node below the shortest suffix; 1 makes a single branch
    match_type: MatchType = "prob"  # which children come first: prob, the most frequent; bfs, the most recently used

    def __post_init__(self) -> None:
        # Options have been checked under the names that users know.
        assert min(self.draft_tokens, self.min_match, self.min_breadth) >= 1
        assert self.min_breadth <= self.max_breadth <= MAX_BREADTH


@dataclass(slots=True)
class TextTails:
    """The last tokens of B texts."""

    tails: Any  # [B, W] int32; anything stands past a row's length
    lengths: Any  # [B] int32, tokens of each row

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], width: int) -> "TextTails":
        """Return the last `width` tokens of each text."""
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
class Proposals:
    """Candidates after each of B texts, a row a text, parents before their children."""

    tokens: Any  # [B, P] int32
    parents: Any  # [B, P] int32, indices in the row; -1 for the end of the text
    shares: Any  # [B, P] float64, the node's count divided by the sum of its siblings', in the trie
    counts: Any  # [B, P] int32, how often the trie has seen the node's path
    contexts: Any  # [B, P] int32, tokens before the node in that path
    found: Any  # [B, 2] int32, proposals in the row, and tokens of the longest suffix that continues in the trie


def propose(trie: NgramTrie, texts: TextTails, config: ProposalConfig) -> Proposals:
    """Return what may follow each text; tails of texts are `config.suffix_tokens` wide."""
    size = config.draft_tokens
    tokens, parents, counts, contexts = np.zeros((4, len(texts), size), np.int32)
    shares, found = np.zeros((len(texts), size)), np.zeros((len(texts), 2), np.int32)
    options = (config.min_match, config.min_breadth, config.max_breadth, config.match_type == "prob")
    _propose(trie.nodes, texts.tails, texts.lengths, options, (tokens, parents, shares, counts, contexts), found)
    return Proposals(tokens, parents, shares, counts, contexts, found)


@compiled
def _propose(nodes: Nodes, tails: Any, lengths: Any, options: Any, columns: Any, found: Any) -> None:
    """Fill the rows of the columns (tokens, parents, shares, counts, contexts) and of `found`.

    `options`: min_match, min_breadth, max_breadth, whether the most frequent come first.
    """
    _, min_breadth, max_breadth, by_frequency = options
    depth = tails.shape[1] + 1
    most = columns[0].shape[1] * max_breadth + max_breadth
    # Nodes of the trie that may come next, their parent's index, share of the path, share among siblings.
    waiting = (
        np.zeros(most, np.int32),
        np.zeros(most, np.int32),
        np.zeros(most, np.float32),
        np.zeros(most, np.float32),
    )
    order, matches = np.zeros(MAX_BREADTH, np.int32), np.zeros(len(tails), np.int64)
    _longest_matches(nodes.token, nodes.parent, nodes.chain, nodes.heads, nodes.suffix, tails, lengths, matches)
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
def _longest_matches(
    tokens: Any, parents: Any, chains: Any, heads: Any, suffixes: Any, tails: Any, lengths: Any, matches: Any
) -> None:
    """Write the node of each text's longest suffix that is in the trie (Aho and Corasick 1975) to `matches`, 0 before.

    Token by token over all texts, so that their waits for memory overlap.
    """
    for place in range(tails.shape[1]):
        for row in range(len(tails)):
            if place < lengths[row]:
                node, token = int(matches[row]), int(tails[row, place])
                child = find(tokens, parents, chains, heads, node, token)
                while child == 0 and node != 0:
                    node = int(suffixes[node])
                    child = find(tokens, parents, chains, heads, node, token)
                matches[row] = child


@compiled
def _grow(
    tokens: Any, counts: Any, firsts: Any, nexts: Any, suffixes: Any, depths: Any, suffix: int, options: Any, tree: Any,
    length: int, waiting: Any, order: Any,
) -> int:  # fmt: skip
    """Add what hangs below one suffix to the tree of `length` proposals; return the new length."""
    by_frequency = options[2]
    taken, offered = 0, _offer(counts, firsts, nexts, suffixes, depths, suffix, -1, 1.0, options, waiting, 0, order)
    while taken < offered and length < len(tree[0]):
        best = taken
        if by_frequency:
            best = 0
            for candidate in range(1, offered):
                if waiting[2][candidate] > waiting[2][best]:
                    best = candidate
        # Python's numbers, so that one compiled version serves all callers.
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
    """Return the index of the tree's child with this parent and token, or `length`."""
    for place in range(length):
        if tree[1][place] == parent and tree[0][place] == token:
            return place
    return length


@compiled
def _offer(
    counts: Any, firsts: Any, nexts: Any, suffixes: Any, depths: Any, node: int, place: int, of_path: float,
    options: Any, waiting: Any, offered: int, order: Any,
) -> int:  # fmt: skip
    """Add the first children of a node to those that may come next; return how many these are then."""
    depth, breadth, by_frequency = options
    if depths[node] == depth:
        # The longest path has no children in the trie; its suffix has.
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
            # Of equals the one that was seen first, which is last in the list.
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
