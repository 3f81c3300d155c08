"""Which rows a step computes: the token budget first, then the slots.

A tree that does not fit is cut to its root before any session waits; a session that waits does so because its prefill
is not done or older sessions hold the slots. Slots go by age: whoever is older may take them from the youngest, which
is recomputed later. So the oldest session always goes on, and no two sessions take turns to displace each other.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.kv_slots import SlotTable
from outrider.target_worker.sessions import Session, TreeRequest

logger = logging.getLogger(__name__)

# Of the budget, what trees leave to prefills that this step cannot finish, so that these always move.
_PREFILL_SHARE = 4


@dataclass(kw_only=True, eq=False)
class Work:
    """One session's part of a step.

    Attributes:
        session: whose.
        tree: what to verify; None where only prefill goes on.
        prefill: tokens before the root to compute.
        verifies: whether the root is computed, so that tokens are emitted.
        nodes: tree nodes computed: all of the tree's, or 0 where it was cut to its root.
    """

    session: Session
    tree: TreeRequest | None
    prefill: int = 0
    verifies: bool = False
    nodes: int = 0

    @property
    def rows(self) -> int:
        """Query rows of the forward."""
        return self.prefill + self.verifies + self.nodes


class Planner:
    """Plans steps over one slot table.

    Args:
        slots: the table.
        max_tree_nodes: most nodes of a tree, root excluded.
    """

    def __init__(self, slots: SlotTable, *, max_tree_nodes: int) -> None:
        self._slots = slots
        self._max_tree_nodes = max_tree_nodes
        self.preemptions = 0

    def plan(
        self, asked: Sequence[tuple[Session, TreeRequest]], sessions: Iterable[Session], *, max_step_tokens: int
    ) -> list[Work]:
        """The work of one step, its slots reserved.

        Args:
            asked: sessions with a tree to verify, in the batch's order.
            sessions: all that are open, `asked` included.
            max_step_tokens: most rows.

        Returns:
            The asked ones in their order, then others whose prefill goes on; work of no rows is deferred.
        """
        sessions = list(sessions)
        works = [Work(session=session, tree=tree) for session, tree in asked]
        busy = {id(work.session) for work in works}
        works += [
            Work(session=session, tree=None)
            for session in sessions
            if id(session) not in busy and session.pending(self._slots) > 0
        ]
        self._share_budget(works, max_step_tokens)
        self._reserve(works, sessions)
        return works

    def _share_budget(self, works: list[Work], max_step_tokens: int) -> None:
        left = max_step_tokens
        unfinished: list[Work] = []
        # Roots of sessions that are ready come first: each costs one row and earns at least one token.
        for work in works:
            if work.tree is not None and work.session.pending(self._slots) == 0 and left > 0:
                work.verifies = True
                left -= 1
        for work in sorted(works, key=lambda work: work.session.order):
            pending = work.session.pending(self._slots)
            if pending > 0 and work.tree is not None and pending + 1 <= left:
                work.prefill, work.verifies = pending, True
                left -= pending + 1
            elif pending > 0:
                unfinished.append(work)
        held = max_step_tokens // _PREFILL_SHARE if unfinished else 0
        for work in works:
            if not work.verifies or work.tree is None:
                continue
            count = len(work.tree.tokens)
            if count <= min(self._max_tree_nodes, left - held):
                work.nodes = count
                left -= count
        for work in unfinished:
            work.prefill = min(work.session.pending(self._slots), left)
            left -= work.prefill

    def _reserve(self, works: list[Work], sessions: Sequence[Session]) -> None:
        for work in sorted(works, key=lambda work: work.session.order):
            needed = work.prefill + work.verifies
            if needed == 0 or not self._take(work, needed, sessions):
                work.prefill, work.verifies, work.nodes = 0, False, 0
        for work in works:
            if work.nodes and work.nodes <= self._slots.free:
                self._slots.extend(work.session.row, work.nodes)
            else:
                work.nodes = 0

    def _take(self, work: Work, count: int, sessions: Sequence[Session]) -> bool:
        """Extends the session's row by `count`, from the youngest sessions where nothing is free."""
        session = work.session
        younger = [other for other in sessions if other.order > session.order and self._slots.length(other.row)]
        within_reach = self._slots.free + sum(self._slots.length(other.row) for other in younger)
        # All that the session needs up to its root: a prefill that would stop half way holds slots for nothing. And a
        # session displaced in this very step needs more than it gave up, so its plan, now wrong, ends here as well.
        missing = len(session.tokens) - self._slots.length(session.row)
        if missing > within_reach:
            return False
        for victim in sorted(younger, key=lambda other: other.order, reverse=True):
            if self._slots.free >= count:
                break
            logger.info("session %d is preempted: out of KV slots", victim.key[1])
            self.preemptions += 1
            self._slots.truncate(victim.row, 0)
        self._slots.extend(session.row, count)
        return True
