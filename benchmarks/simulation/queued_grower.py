"""What a fake draft whose steps overlap holds: trees some of whose nodes are in flight."""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from benchmarks.simulation.growing_tree import GrowingTree, GrownNode
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.tree_grower import GrownRows, TreeGrower

from outrider.coordinator import clock

# What a best child is worth that nobody has seen, as in `draft_tree`; nodes of one session that a step expands at most.
_GUESS, _SESSION_NODES = 0.7, 16
# Children that a node in flight may have, at most: path models with more rates overrun the credit.
_BRANCHING = 4


class QueuedTree(GrowingTree):
    """A tree that is grown in two parts: nodes are taken, and get their children later."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.flying: set[GrownNode] = set()
        super().__init__(*arguments, **options)  # pyright: ignore[reportArgumentType] - as there

    @property
    def room(self) -> int:
        """Nodes whose children there is credit for."""
        return min((self._max_nodes - self.size) // _BRANCHING - len(self.flying), _SESSION_NODES)

    def promise(self, nodes: Sequence[GrownNode]) -> None:
        """Lets the best children of nodes in flight compete, whoever they will be."""
        for node in nodes:
            if node in self.flying and node.promised is None and node.depth + 1 < self._max_depth:
                node.promised = GrownNode(
                    0, -1, acceptance=_GUESS, depth=node.depth + 1, value=node.value * _GUESS, path_hash=None
                )
                heappush(self._frontier, node.promised)

    def take(self) -> GrownNode:
        """The best node, in flight now."""
        node = heappop(self._frontier)
        self.flying.add(node)
        return node

    def grow(self, parent: GrownNode) -> Sequence[GrownNode]:
        """The children of a node in flight; none where a commit has left it behind."""
        if parent not in self.flying:
            return ()
        self.flying.remove(parent)
        parent.children = []
        for rank, guess in enumerate(self._model.guesses(self._key, self.length + parent.depth, parent.path_hash)):
            if self.size >= self._max_nodes:
                break
            child = self._new_child(parent, guess)
            promised = parent.promised
            if rank == 0 and promised is not None and promised in self.flying:
                # It keeps its place in the step that it is in.
                promised.node_id, promised.token, promised.acceptance = child.node_id, child.token, child.acceptance
                promised.value, promised.path_hash = child.value, child.path_hash
                child = promised
            elif child.depth < self._max_depth:
                heappush(self._frontier, child)
            parent.children.append(child)
            self.size += 1
        if parent.promised is not None and parent.promised in self._frontier:
            self._frontier.remove(parent.promised)
            heapify(self._frontier)
        parent.promised = None
        return parent.children

    def commit(self, token_ids: Sequence[int]) -> None:
        """See there; what is in flight below the new root stays so."""
        super().commit(token_ids)
        alive, stack = set(), [self.root]
        while stack:
            node = stack.pop()
            alive.add(node)
            stack.extend(node.children or ())
            if node.promised is not None:
                node.promised.depth, node.promised.value = node.depth + 1, node.value * _GUESS
                stack.append(node.promised)
        self.flying &= alive
        # Those without children that are in flight are not to be expanded again.
        self._frontier = [node for node in self._frontier if node not in self.flying]
        self._frontier += [
            node.promised for node in self.flying if node.promised is not None and node.promised not in self.flying
        ]
        heapify(self._frontier)


class QueuedGrower(TreeGrower):
    """The trees of one fake draft, with steps under way."""

    def __init__(self, model: PathModel, *, width: int) -> None:
        super().__init__(model, width=width)
        self._trees: dict[int, QueuedTree] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
        self._flights: deque[list[tuple[int, QueuedTree, list[GrownNode]]]] = deque()
        self._asked: dict[int, tuple[int, int]] = {}

    def open(
        self, session_id: int, *, key: int, epoch: int, length: int, is_sync: bool, max_nodes: int, max_depth: int
    ) -> None:
        """Begins a session's tree."""
        assert not is_sync, "steps of sync sessions do not overlap"
        self._trees[session_id] = QueuedTree(
            self._model, key=key, epoch=epoch, length=length, is_sync=False, max_nodes=max_nodes, max_depth=max_depth,
            min_value=0.003,
        )  # fmt: skip

    def commit(self, session_id: int, *, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Moves a root, and remembers when one was asked for that is not known."""
        super().commit(session_id, epoch=epoch, position=position, token_ids=token_ids)
        tree = self._trees.get(session_id)
        if tree is not None and tree.root.children is None:
            self._asked[session_id] = (clock.now_ns(), tree.length)

    def answered(self, grown: dict[int, GrownRows], now_ns: int) -> list[int]:
        """How long commits have waited that this growth answers."""
        found = []
        for session_id, part in grown.items():
            asked_ns, length = self._asked.get(session_id, (0, 1 << 60))
            if part.as_of >= length:
                found.append(now_ns - asked_ns)
                del self._asked[session_id]
        return found

    @property
    def best_value(self) -> float:
        """Of all that could be expanded."""
        return max((tree.best_value for tree in self._trees.values() if tree.room > 0), default=0.0)

    def begin(self) -> bool:
        """Takes the nodes of a step; False without any."""
        self._promise()
        taken: dict[int, list[GrownNode]] = {}
        best = [(-tree.best_value, session_id) for session_id, tree in self._trees.items() if tree.best_value]
        heapify(best)
        left = self._width
        while best and left > 0 and best[0][0] < 0:
            session_id = best[0][1]
            tree = self._trees[session_id]
            if tree.room <= 0 or len(taken.get(session_id, ())) >= _SESSION_NODES:
                heappop(best)
                continue
            taken.setdefault(session_id, []).append(tree.take())
            left -= 1
            heapreplace(best, (-tree.best_value, session_id))
        if not taken:
            return False
        self._flights.append([(number, self._trees[number], nodes) for number, nodes in taken.items()])
        return True

    def finish(self) -> dict[int, GrownRows]:
        """The children of the step that was begun first."""
        grown: dict[int, GrownRows] = {}
        for session_id, tree, nodes in self._flights.popleft():
            if self._trees.get(session_id) is not tree:
                continue
            part = GrownRows(epoch=tree.epoch, as_of=tree.length)
            for node in nodes:
                parent_id = 0 if node is tree.root else node.node_id
                part.rows.extend((child.node_id, parent_id, child.token, child.acceptance) for child in tree.grow(node))
            if part.rows:
                grown[session_id] = part
        return grown

    def _promise(self) -> None:
        if self._flights:
            for _, tree, nodes in self._flights[-1]:
                tree.promise(nodes)
