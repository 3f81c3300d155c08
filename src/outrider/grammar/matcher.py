"""Masks of the tokens that may follow the committed output, and each node of a tree below it.

A node's state is that of the grammar after the committed output and the node's path; one matcher visits the tree depth
first, consumes a token on the way down and takes it back on the way up. Rows of which nothing follows are full: nodes
below a token that breaks the grammar are never reached, for their parent's mask leaves that token out, and nothing
comes after an end-of-sequence token.

Shapes: n nodes, W words of 32 tokens.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.errors import GrammarUnsupported
from outrider.grammar.library import GrammarError, reason

Masks = npt.NDArray[np.int32]


class SessionGrammar:
    """The grammar of one session's output. Not thread-safe.

    Args:
        compiled: the matcher at the output's beginning, of `GrammarCompiler.start`.
    """

    def __init__(self, compiled: Future[Any], end_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._end_ids = frozenset(end_ids)
        self._matcher: Any = None
        # The committed output as far as it is looked at: to its end-of-sequence token, which the matcher never sees.
        self._output: list[int] = []
        self._has_ended = False
        self.fault: str | None = None  # why the committed output cannot be followed any further
        # Nodes of the last tree whose row says nothing, because following one of them became too costly. A walk has to
        # end with the first of them.
        self.unfollowed: frozenset[int] = frozenset()

    @property
    def is_ready(self) -> bool:
        """True if `follow` would not wait for the grammar to be compiled."""
        return self._compiled.done()

    def follow(self, output: Sequence[int]) -> bool:
        """Make `output` what is committed; return False, and set `fault`, if the grammar does not allow it.

        It waits until the grammar is compiled.
        """
        if self.fault is not None:
            return False
        if self._matcher is None:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except (GrammarError, GrammarUnsupported) as error:
                self.fault = str(error)
                return False
        output = list(output)
        if output[: len(self._output)] != self._output:
            self._take_back(_common_length(output, self._output))
        for token in output[len(self._output) :]:
            if self._has_ended or self.fault is not None:
                break
            self._commit(token)
        return self.fault is None

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> Masks:
        """Return masks of the tokens that may follow each node of a tree below the committed output.

        Args:
            tokens: [n] of nodes 1 to n.
            parents: [n] node numbers, 0 the root; a parent stands before its children.

        Returns:
            [n + 1, W] int32: bit v % 32 of word v // 32 of a row is set where token v may follow; the root's row first.
            All rows are full where the root's cannot be told, which is a `fault`.
        """
        self.unfollowed = frozenset()
        root = self._mask()
        masks = np.full((len(tokens) + 1, len(root)), -1, dtype=np.int32)
        if self._matcher.is_error():
            self._set_fault()
        if self.fault is not None or self._has_ended:
            return masks
        masks[0] = root
        children: list[list[int]] = [[] for _ in masks]
        for node, parent in enumerate(parents, start=1):
            children[parent].append(node)
        # Nodes to visit, each with its parent's depth; the matcher stands at `depth`.
        waiting, depth = [(node, 0) for node in reversed(children[0])], 0
        while waiting:
            node, above = waiting.pop()
            self._matcher.rollback(depth - above)
            depth = above
            if self._enter(tokens[node - 1]):
                depth += 1
                masks[node] = self._mask()
                waiting.extend((child, depth) for child in reversed(children[node]))
            if self._matcher.is_error():
                self.unfollowed = frozenset([node, *(each for each, _ in waiting), *_below(parents, node, waiting)])
                masks[list(self.unfollowed)] = -1
                self._begin_anew()
                return masks
        self._matcher.rollback(depth)
        return masks

    def mask_after(self, path: Sequence[int]) -> npt.NDArray[np.int32] | None:
        """[W] what may follow a path below the committed output; None where nothing does, or it cannot be told."""
        depth, mask = 0, None
        if self.fault is None and not self._has_ended:
            while depth < len(path) and self._enter(path[depth]):
                depth += 1
            if depth == len(path):
                mask = self._mask()
            if self._matcher.is_error():
                self._begin_anew()
                return None
            self._matcher.rollback(depth)
        return mask

    def _mask(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    def _enter(self, token: int) -> bool:
        return token not in self._end_ids and self._matcher.try_consume_tokens([token]) == 1

    def _commit(self, token: int) -> None:
        self._has_ended = token in self._end_ids
        if self._has_ended or self._enter(token):
            self._output.append(token)
        elif self._matcher.is_error():
            self._set_fault()
        else:
            self.fault = f"output token {len(self._output)} ({token}) does not match the grammar"

    def _take_back(self, length: int) -> None:
        consumed = len(self._output) - self._has_ended
        kept = min(length, consumed)
        self._matcher.rollback(consumed - kept)
        del self._output[kept:]
        self._has_ended = False

    def _begin_anew(self) -> None:
        """A matcher that has failed stays so: another takes its place."""
        self._matcher = self._compiled.result().deep_copy()
        consumed = len(self._output) - self._has_ended
        if self._matcher.try_consume_tokens(self._output[:consumed]) != consumed:
            self._set_fault()

    def _set_fault(self) -> None:
        self.fault = f"the grammar has become too costly to follow: {reason(self._matcher)}"


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _below(parents: Sequence[int], failed: int, waiting: Sequence[tuple[int, int]]) -> list[int]:
    """The nodes below those that were not visited."""
    unvisited = {failed, *(node for node, _ in waiting)}
    found = []
    for node, parent in enumerate(parents, start=1):
        if parent in unvisited:
            unvisited.add(node)
            found.append(node)
    return found
