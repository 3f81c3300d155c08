"""One session's guesses: what was sent of them and is still alive.

After every commit the text is matched anew. Most of what is found then hangs below what was guessed before: it is
followed, not made again, and only what is new is sent.

Estimates of siblings come from suffixes of different lengths and may add up to more than 1: whoever is guessed first,
from the longest suffix, keeps its estimate, and the others share what it leaves.
"""

from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from outrider.draft_worker.ngram_calibration import NgramCalibration


class GuessNode:
    """A node that was sent.

    Attributes:
        node_id: unique in its session's epoch; 0 for a root that was never a node.
        acceptance: estimate given the parent.
        bucket: of the calibration.
        children: by token.
        left: of the chance that the next token is a child's, what no child has yet.
    """

    __slots__ = ("acceptance", "bucket", "children", "left", "node_id")

    def __init__(self, node_id: int, acceptance: float, bucket: int) -> None:
        self.node_id = node_id
        self.acceptance = acceptance
        self.bucket = bucket
        self.children: dict[int, GuessNode] = {}
        self.left = 1.0


class GuessPath(NamedTuple):
    """A way down from the root.

    Attributes:
        node: at its end.
        tokens: of its nodes.
        value: chance that all of them are accepted.
    """

    node: GuessNode
    tokens: Sequence[int]
    value: float


class NewGuesses:
    """Nodes that are to be sent, [n], parents before their children.

    Attributes:
        node_ids: [n].
        parents: [n] node ids, or 0 for the root.
        tokens: [n].
        acceptance: [n].
    """

    def __init__(self) -> None:
        self.node_ids: list[int] = []
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.acceptance: list[float] = []


class GuessTree:
    """A tree of guesses, bounded as its session is.

    Args:
        position: index of the root's token in prompt + output.
        max_depth: deepest node below the root.
        max_nodes: most live nodes.
        last_position: index of the last token the session may have.
        final_tokens: that have no children.
        new_id: gives a node id; its own from 1 by default.

    Attributes:
        size: live nodes, the root not counted.
        position: as given, moved with the root.
    """

    def __init__(
        self,
        position: int,
        *,
        max_depth: int,
        max_nodes: int,
        last_position: int,
        final_tokens: frozenset[int],
        new_id: Callable[[], int] | None = None,
    ) -> None:
        self.size = 0
        self.position = position
        self._max_depth, self._max_nodes = max_depth, max_nodes
        self._last_position, self._final_tokens = last_position, final_tokens
        self._new_id = new_id or count(1).__next__
        self._root = GuessNode(0, 1.0, 0)
        self._root_is_final = False

    @property
    def is_open(self) -> bool:
        """Whether the committed tokens can be continued at all."""
        return self.position < self._last_position and not self._root_is_final

    @property
    def depth_limit(self) -> int:
        """The deepest that a node may be."""
        return min(self._max_depth, self._last_position - self.position)

    def likeliest_path(self) -> GuessPath | None:
        """From the root to a leaf that may have children, by the best child of each; None where there is none."""
        node, tokens, value = self._root, list[int](), 1.0
        while children := node.children:
            token = next(iter(children))
            if len(children) > 1:
                token = max(children, key=lambda token: children[token].acceptance)
            node = children[token]
            tokens.append(token)
            value *= node.acceptance
        if not 0 < len(tokens) < self.depth_limit or tokens[-1] in self._final_tokens:
            return None
        return GuessPath(node, tokens, value)

    def reach(self, depth: int) -> float:
        """Nodes that are accepted in the mean on the way down by the best child of each, no deeper than this."""
        node, value, nodes = self._root, 1.0, 0.0
        for _ in range(depth):
            if not node.children:
                break
            node = max(node.children.values(), key=attrgetter("acceptance"))
            value *= node.acceptance
            nodes += value
        return nodes

    def graft(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        estimates: Sequence[float],
        buckets: Sequence[int],
        *,
        min_value: float,
        below: GuessPath | None = None,
        new: NewGuesses | None = None,
    ) -> NewGuesses:
        """Adds what is not there yet.

        Args:
            tokens: [n] of guesses, parents before their children.
            parents: [n] places in these; negative for what they hang below.
            estimates: [n] that each is accepted, given its parent.
            buckets: [n] of the calibration.
            min_value: guesses less likely to be reached and accepted are left out, with what hangs below them.
            below: what they hang below; None: the root.
            new: what is returned: nodes that are to be sent with these. None: there are none.
        """
        new, final = NewGuesses() if new is None else new, self._final_tokens
        top = (self._root, 1.0, 0) if below is None else (below.node, below.value, len(below.tokens))
        # Of every place: its node (None where there is none), path value and depth.
        nodes: list[tuple[GuessNode | None, float, int]] = []
        above: GuessNode | None
        for token, place, estimate, bucket in zip(tokens, parents, estimates, buckets, strict=True):
            above, value, depth = top if place < 0 else nodes[place]
            node: GuessNode | None = None
            if above is not None and depth < self.depth_limit and not (place >= 0 and tokens[place] in final):
                node = above.children.get(token)
                if node is None:
                    acceptance = min(estimate, above.left)
                    if self.size < self._max_nodes and value * acceptance >= min_value:
                        node = self._add(above, token, acceptance, bucket, new)
            nodes.append((node, 0.0 if node is None else value * node.acceptance, depth + 1))
        return new

    def _add(self, above: GuessNode, token: int, acceptance: float, bucket: int, new: NewGuesses) -> GuessNode:
        node = above.children[token] = GuessNode(self._new_id(), acceptance, bucket)
        above.left -= acceptance
        self.size += 1
        new.node_ids.append(node.node_id)
        new.parents.append(0 if above is self._root else above.node_id)
        new.tokens.append(token)
        new.acceptance.append(acceptance)
        return node

    def commit(self, token_ids: Sequence[int], calibration: NgramCalibration) -> None:
        """Moves the root along tokens that the target has committed; what hangs elsewhere is dead.

        Args:
            token_ids: at least one.
            calibration: is told which guesses came true.
        """
        node: GuessNode | None = self._root
        for token in token_ids:
            if node is None:
                break
            for guessed, child in node.children.items():
                calibration.observe(child.bucket, child.acceptance, came_true=guessed == token)
            node = node.children.get(token)
        self._root = GuessNode(0, 1.0, 0) if node is None else node
        self.size = len(_all_below(self._root))
        self.position += len(token_ids)
        self._root_is_final = token_ids[-1] in self._final_tokens

    def clear(self) -> None:
        """Forgets every node below the root; ids go on counting."""
        self._root, self.size = GuessNode(0, 1.0, 0), 0


def _all_below(root: GuessNode) -> list[GuessNode]:
    found = list(root.children.values())
    for node in found:
        if node.children:
            found += node.children.values()
    return found
