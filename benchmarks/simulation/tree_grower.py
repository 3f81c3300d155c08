"""What a fake draft holds and does: trees of all sessions, grown by the best nodes of all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from benchmarks.simulation.growing_tree import GrowingTree
from benchmarks.simulation.path_model import PathModel

# Nodes of one `sync` session that a step expands, whatever the others do.
_SYNC_STEP_NODES = 8


@dataclass(kw_only=True)
class GrownRows:
    """One session's part of a step: (node id, its parent's, 0 for the root, token, acceptance) each."""

    epoch: int
    as_of: int
    rows: list[tuple[int, int, int, float]] = field(default_factory=list)
    complete: bool = False


class TreeGrower:
    """The trees of one fake draft.

    Args:
        width: nodes that one step expands, over all sessions.
    """

    def __init__(self, model: PathModel, *, width: int) -> None:
        self._model, self._width = model, width
        self._trees: dict[int, GrowingTree] = {}

    def open(
        self, session_id: int, *, key: int, epoch: int, length: int, is_sync: bool, max_nodes: int, max_depth: int
    ) -> None:
        """Begins a session's tree."""
        self._trees[session_id] = GrowingTree(
            self._model, key=key, epoch=epoch, length=length, is_sync=is_sync, max_nodes=max_nodes, max_depth=max_depth
        )

    def commit(self, session_id: int, *, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Moves a root.

        Raises:
            ValueError: the draft holds another length than the commit begins at.
        """
        tree = self._trees.get(session_id)
        if tree is not None and tree.epoch == epoch:
            if tree.length != position:
                raise ValueError(f"session {session_id}: commit at {position}, {tree.length} held")
            tree.commit(token_ids)

    def close(self, session_id: int, *, epoch: int) -> None:
        """Forgets a session."""
        if (tree := self._trees.get(session_id)) is not None and tree.epoch == epoch:
            del self._trees[session_id]

    def step(self) -> dict[int, GrownRows]:
        """What one step adds, by session; nothing where there is nothing to expand."""
        grown: dict[int, GrownRows] = {}
        best: list[tuple[float, int]] = []
        left = self._width
        for session_id, tree in self._trees.items():
            if not tree.is_sync:
                if value := tree.best_value:
                    best.append((-value, session_id))
                continue
            for _ in range(_SYNC_STEP_NODES):
                if not tree.best_value:
                    break
                self._expand(session_id, grown)
                left -= 1
        heapify(best)
        while best and left > 0:
            session_id = best[0][1]
            self._expand(session_id, grown)
            left -= 1
            # Without anything left it sinks below everybody, where it ends the round.
            heapreplace(best, (-self._trees[session_id].best_value, session_id))
            if not best[0][0]:
                break
        for session_id, part in grown.items():
            self._trees[session_id].end_step()
            part.complete = self._trees[session_id].finish_if_whole()
        return grown

    def _expand(self, session_id: int, grown: dict[int, GrownRows]) -> None:
        tree = self._trees[session_id]
        parent, children = tree.expand()
        parent_id = 0 if parent is tree.root else parent.node_id
        part = grown.setdefault(session_id, GrownRows(epoch=tree.epoch, as_of=tree.length))
        part.rows.extend((child.node_id, parent_id, child.token, child.acceptance) for child in children)
