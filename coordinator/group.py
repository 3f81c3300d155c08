"""What does not change of sessions from round to round, in columns.

A batch is mostly of the same sessions as the one before. What of them is asked in every round and stays what it was,
is looked up once for all rounds in which the list is the same.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.coordinator.forest import Forest
from outrider.coordinator.messages import SpeculationMode
from outrider.coordinator.mirror import Mirror, TreeMirror
from outrider.coordinator.rows import Ints, Rows
from outrider.coordinator.session import Session

Bools = npt.NDArray[np.bool_]


class Group:
    """S sessions.

    Attributes:
        sessions: [S]
        ids: [S]
        places: by session id.
        rows: [S]
        forest: of their trees; None where none has one.
        is_async: [S] whether its mode is.
        is_sync: [S] the same.
        has_sync: any is.
        is_tree: [S] whether it has a tree that rounds move.
        mirrors: [S]
        chains: places of those that have chains.
        keeps_tree: [S] whether what hangs below its new root is of use.
        careful: places of those whose tokens are looked at before the next batch leaves.
        stop_ids: that some of them end with.
        ends: [S] length at which it ends at the latest.
        most_nodes: [S] that it asked for.
        most_depth: [S]
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = list(sessions)
        self.ids = [session.session_id for session in sessions]
        self.places = {session_id: place for place, session_id in enumerate(self.ids)}
        self.rows: Ints = np.array([session.row for session in sessions], dtype=np.int64)
        self.forest: Forest | None = next(
            (session.mirror.forest for session in sessions if isinstance(session.mirror, TreeMirror)), None
        )
        modes = [session.mode for session in sessions]
        is_off = _column([mode is SpeculationMode.OFF for mode in modes])
        self.is_async = _column([mode is SpeculationMode.ASYNC for mode in modes])
        self.is_sync = _column([mode is SpeculationMode.SYNC for mode in modes])
        is_chain = _column([session.mirror.is_chain for session in sessions])
        self.is_tree = ~is_chain & ~is_off
        self.mirrors: list[Mirror] = [session.mirror for session in sessions]
        self.chains = np.flatnonzero(is_chain & ~is_off).tolist()
        self.has_sync = bool(self.is_sync.any())
        # Sync mode grows every tree afresh.
        self.keeps_tree: Bools = ~self.is_sync
        # A chain is a list beside the session's own, and how long a fixed tree is waited for hangs on what is left.
        self.careful = [
            place
            for place, session in enumerate(sessions)
            if not session.is_plain or session.mirror.is_chain or session.mode is SpeculationMode.SYNC
        ]
        self.stop_ids = frozenset[int]().union(*(session.stop_ids for session in sessions))
        self.ends: Ints = np.array([session.end for session in sessions], dtype=np.int64)
        nodes = np.array([session.request.max_nodes for session in sessions], dtype=np.int64)
        self.most_nodes: Ints = np.where(is_off, 0, nodes)
        self.most_depth: Ints = np.array([session.request.max_depth for session in sessions], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sessions)

    @property
    def states(self) -> Rows:
        """What does change, in columns over all rows."""
        return self.sessions[0].rows

    @property
    def is_drafted(self) -> bool:
        """Whether any has a draft that grows its tree."""
        return bool((self.states.draft[self.rows] != 0).any())

    def reaches(self, max_tree_nodes: int) -> tuple[Ints, Ints]:
        """[S] most nodes and greatest depth of a tree that is submitted: none past the last output token."""
        room = self.ends - 1 - self.states.length[self.rows]
        most = np.where(room > 0, np.minimum(self.most_nodes, max_tree_nodes), 0)
        return most, np.where(most > 0, np.minimum(self.most_depth, room), 0)


def _column(values: Sequence[bool]) -> Bools:
    return np.array(values, dtype=np.bool_)
