"""The tree that a fake draft grows for one session: best first, children by the path model."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from benchmarks.simulation.path_model import Guess, PathModel

# Nodes less likely to be reached are not expanded.
_MIN_VALUE = 0.03


class GrownNode:
    """A node as its draft holds it."""

    __slots__ = ("acceptance", "children", "depth", "node_id", "path_hash", "token", "value")

    def __init__(
        self, node_id: int, token: int, *, acceptance: float, depth: int, value: float, path_hash: int | None
    ) -> None:
        self.node_id = node_id
        self.token = token
        self.acceptance = acceptance
        self.depth = depth
        self.value = value
        self.path_hash = path_hash
        self.children: list[GrownNode] | None = None

    def __lt__(self, other: "GrownNode") -> bool:
        return self.value > other.value


class GrowingTree:
    """One session at a fake draft.

    Args:
        key: of the session's path, its first prompt token.
        length: committed tokens.
        is_sync: every commit begins a new tree, which ends at `max_nodes` nodes or `max_depth`.
        max_nodes, max_depth: bounds of the tree below its root.
    """

    def __init__(
        self,
        model: PathModel,
        *,
        key: int,
        epoch: int,
        length: int,
        is_sync: bool,
        max_nodes: int,
        max_depth: int,
    ) -> None:
        self._model, self._key = model, key
        self.epoch, self.length, self.is_sync = epoch, length, is_sync
        self._max_nodes, self._max_depth = max_nodes, max_depth
        self._last_id = 0
        self._begin()

    def _begin(self) -> None:
        self.root = GrownNode(0, 0, acceptance=1.0, depth=0, value=1.0, path_hash=None)
        self.size = 0
        self._frontier = [self.root]
        self._next: list[GrownNode] = []
        self.is_complete = False

    @property
    def best_value(self) -> float:
        """Path value of the node to be expanded next; 0 when there is none, or no room for its children."""
        if self.is_complete or not self._frontier or self.size >= self._max_nodes:
            return 0.0
        best = self._frontier[0]
        return best.value if best.value >= _MIN_VALUE or best is self.root else 0.0

    def expand(self) -> tuple[GrownNode, Sequence[GrownNode]]:
        """Expands the best node: (it, its children), which may be expanded themselves after `end_step`."""
        parent = heappop(self._frontier)
        parent.children = []
        position = self.length + parent.depth
        for guess in self._model.guesses(self._key, position, parent.path_hash):
            if self.size >= self._max_nodes:
                break
            child = self._new_child(parent, guess)
            parent.children.append(child)
            self.size += 1
            if child.depth < self._max_depth:
                self._next.append(child)
        return parent, parent.children

    def _new_child(self, parent: GrownNode, guess: Guess) -> GrownNode:
        self._last_id += 1
        return GrownNode(
            self._last_id,
            guess.token,
            acceptance=guess.acceptance,
            depth=parent.depth + 1,
            value=parent.value * guess.acceptance,
            path_hash=guess.path_hash,
        )

    def end_step(self) -> None:
        """A step is one forward over nodes that were there before it: what it has made is the next one's to expand."""
        for child in self._next:
            heappush(self._frontier, child)
        self._next = []

    def finish_if_whole(self) -> bool:
        """Whether this step was the last of a `sync` round."""
        if self.is_sync and not self.is_complete and not self.best_value:
            self.is_complete = True
            return True
        return False

    def commit(self, token_ids: Sequence[int]) -> None:
        """Moves the root; what hangs elsewhere is dropped, and without a node for the tokens the tree begins anew."""
        node: GrownNode | None = self.root
        for token in token_ids:
            node = next((child for child in node.children or () if child.token == token), None) if node else None
        self.length += len(token_ids)
        if node is None or self.is_sync:
            self._begin()
            return
        self.root = node
        node.depth, node.value = 0, 1.0
        self.size, self._frontier, stack = 0, [], [node]
        while stack:
            parent = stack.pop()
            if parent.children is None:
                self._frontier.append(parent)
                continue
            for child in parent.children:
                child.depth, child.value = parent.depth + 1, parent.value * child.acceptance
                self.size += 1
                stack.append(child)
        heapify(self._frontier)
