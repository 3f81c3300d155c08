"""Which rows a step computes: the budget first, then the slots.

Verification comes before prefill. A tree that does not fit is cut to its root before any session waits; a session that
waits does so because its prefill is not done, because another computes just what it needs, or because older sessions
hold the slots. Prefill takes what `StepCost` allows beside the verification, oldest session first.

Slots go by age: whoever is older may take them from the youngest, which is recomputed later, except from sessions
whose step is still in flight. So the oldest session always goes on, and no two sessions take turns to displace each
other.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.prefix_cache import common_length
from outrider.log_output import about
from outrider.target_worker.session_kv import SessionKv
from outrider.target_worker.sessions import Session, TreeRequest
from outrider.target_worker.step_cost import PrefillAllowance, StepCost, StepShape, prefill_pairs

logger = logging.getLogger(__name__)

# Of the budget, what trees leave to prefills that this step cannot finish, so that these always move.
_PREFILL_SHARE = 4
# Sizes of the CUDA graphs that steps run in, roughly (`outrider.engine.buckets`): past the bound they lie wider apart.
_SIZES, _SIZES_BOUND, _LARGE_SIZES = 64, 448, 128
# Another's prefill is waited for where it computes so many of the tokens that are missing, and such a part of them.
_SHARED_TOKENS, _SHARED_PART = 16, 4
# A session that sessions in flight keep from its slots is waited for by younger ones for so many plans.
_WAITING_PLANS = 3


@dataclass(kw_only=True, eq=False)
class Work:
    """One session's part of a step.

    Attributes:
        session: whose.
        tree: what to verify; None where only prefill goes on.
        context: tokens with KV before this step.
        prefill: tokens before the root to compute.
        verifies: whether the root is computed, so that tokens are emitted.
        nodes: tree nodes computed: all of the tree's, or 0 where it was cut to its root.
    """

    session: Session
    tree: TreeRequest | None
    context: int = 0
    prefill: int = 0
    verifies: bool = False
    nodes: int = 0

    @property
    def rows(self) -> int:
        """Query rows of the forward."""
        return self.prefill + self.verifies + self.nodes

    @property
    def pending(self) -> int:
        """Tokens before the root that had no KV before this step."""
        return self.session.root_index - self.context

    def drop(self) -> None:
        """Nothing of it is computed."""
        self.prefill, self.verifies, self.nodes = 0, False, 0


def step_shape(works: Iterable[Work]) -> StepShape:
    """What the works cost, as `StepCost` counts it."""
    works = list(works)
    return StepShape(
        verify_rows=sum(work.verifies + work.nodes for work in works),
        keys=sum(work.context for work in works if work.verifies),
        prefill_rows=sum(work.prefill for work in works),
        pairs=sum(prefill_pairs(work.prefill, work.context) for work in works),
    )


class Planner:
    """Plans steps over the KV of all sessions.

    Args:
        kv: who holds which slots.
        cost: what prefill beside a verification costs.
        max_tree_nodes: most nodes of a tree, root excluded.
        fills_graphs: whether steps run in sizes, so that rows up to the next one cost nothing.
    """

    def __init__(self, kv: SessionKv, cost: StepCost, *, max_tree_nodes: int, fills_graphs: bool = False) -> None:
        self._kv = kv
        self._cost = cost
        self._max_tree_nodes = max_tree_nodes
        self._fills_graphs = fills_graphs
        self._waiting_for: tuple[int, int] | None = None
        self.preemptions = 0

    @property
    def is_waited_for(self) -> bool:
        """Whether a session keeps younger ones from slots that it waits for."""
        return self._waiting_for is not None

    def plan(
        self,
        asked: Sequence[tuple[Session, TreeRequest]],
        sessions: Iterable[Session],
        *,
        max_rows: int,
        chunk_ns: float | None = None,
    ) -> list[Work]:
        """The work of one step, its slots reserved.

        Args:
            asked: sessions with a tree to verify, none of them in flight, in the batch's order.
            sessions: all that are open, `asked` included.
            max_rows: most rows.
            chunk_ns: how long a step without verification may take; None where nobody waits for it.

        Returns:
            The asked ones in their order, then others whose prefill goes on; work of no rows is deferred.
        """
        sessions = list(sessions)
        works = [Work(session=session, tree=tree) for session, tree in asked]
        busy = {id(work.session) for work in works}
        works += [
            Work(session=session, tree=None)
            for session in sessions
            if id(session) not in busy and not session.in_flight and self._kv.pending(session) > 0
        ]
        for work in works:
            self._kv.take(work.session)
            work.context = self._kv.length(work.session)
        moving = self._without_those_who_wait(works, sessions)
        self._share_budget(moving, max_rows, chunk_ns)
        self._reserve(moving, sessions)
        return works

    def _without_those_who_wait(self, works: Sequence[Work], sessions: Sequence[Session]) -> list[Work]:
        """Leaves out work that another session's prefill will save, and what starves an older session."""
        latest = None
        if self._waiting_for is not None:
            latest, plans = self._waiting_for
            self._waiting_for = (latest, plans - 1) if plans > 1 else None
        leaders = [
            session
            for session in sessions
            if self._kv.remembers and session.in_flight and session.reached < session.root_index
        ]
        moving = []
        for work in sorted(works, key=lambda work: work.session.order):
            session = work.session
            if latest is not None and session.order > latest:
                continue
            if any(_saves(leader, work) for leader in leaders):
                continue
            if self._kv.remembers and work.pending > 0 and not session.starved:
                leaders.append(session)
            moving.append(work)
        # In the batch's order again: it says who comes first where not all fit.
        chosen = {id(work) for work in moving}
        return [work for work in works if id(work) in chosen]

    def _share_budget(self, works: Sequence[Work], max_rows: int, chunk_ns: float | None) -> None:
        left = max_rows
        # Roots of sessions that are ready come first: each costs one row and earns at least one token.
        for work in works:
            if work.tree is not None and work.pending == 0 and left > 0:
                work.verifies = True
                left -= 1
        allowance = self._allowance(works, left, chunk_ns)
        unfinished: list[Work] = []
        for work in sorted(works, key=lambda work: work.session.order):
            if (pending := work.pending) <= 0:
                continue
            granted = allowance.rows(work.context)
            if unfinished:
                # Short prompts overtake a long one, but never take all that would move it.
                granted -= -(-granted // _PREFILL_SHARE)
            if work.tree is not None and pending <= granted and pending + 1 <= left:
                work.prefill, work.verifies = pending, True
                allowance.spend(pending, work.context)
                left -= pending + 1
            else:
                unfinished.append(work)
        held = min(max_rows // _PREFILL_SHARE, allowance.rows(unfinished[0].context)) if unfinished else 0
        for work in works:
            if not work.verifies or work.tree is None:
                continue
            count = len(work.tree.tokens)
            if count <= min(self._max_tree_nodes, left - held):
                work.nodes = count
                left -= count
        for work in unfinished:
            work.prefill = min(work.pending, left, allowance.rows(work.context))
            allowance.spend(work.prefill, work.context)
            left -= work.prefill
        if self._fills_graphs and unfinished:
            _fill_graph(works)

    def _allowance(self, works: Iterable[Work], left: int, chunk_ns: float | None) -> PrefillAllowance:
        verifying = [work for work in works if work.verifies]
        if not verifying:
            return self._cost.alone(most=left, time_ns=chunk_ns)
        counts = [len(work.tree.tokens) for work in verifying if work.tree is not None]
        nodes = sum(count for count in counts if count <= self._max_tree_nodes)
        keys = sum(work.context for work in verifying)
        return self._cost.beside(len(verifying) + min(nodes, left), keys, most=left)

    def _reserve(self, works: Sequence[Work], sessions: Sequence[Session]) -> None:
        slots = self._kv.slots
        if sum(work.rows for work in works) <= slots.free and not any(work.prefill for work in works):
            for work in works:
                slots.extend(work.session.row, work.rows)
            return
        displaced: set[int] = set()
        for work in sorted(works, key=lambda work: work.session.order):
            needed = work.prefill + work.verifies
            if (
                needed == 0
                or id(work.session) in displaced
                or not self._take(work.session, needed, sessions, displaced)
            ):
                work.drop()
        for work in works:
            if work.nodes and work.nodes <= slots.free:
                slots.extend(work.session.row, work.nodes)
            else:
                work.nodes = 0

    def _take(self, session: Session, count: int, sessions: Iterable[Session], displaced: set[int]) -> bool:
        """Extends the session's row by `count`, from the youngest sessions where nothing is free."""
        slots = self._kv.slots
        # All that the session needs up to its root: a prefill that would stop half way holds slots for nothing.
        missing = len(session.tokens) - slots.length(session.row)
        session.starved = False
        if missing > slots.free:
            younger = [other for other in sessions if other.order > session.order and slots.length(other.row)]
            within_reach = [other for other in younger if not other.in_flight]
            if missing > slots.free + self._kv.freed_by(within_reach):
                session.starved = True
                if missing <= slots.free + self._kv.freed_by(younger):
                    self._waiting_for = (session.order, _WAITING_PLANS)
                if self._kv.remembers:
                    # What it holds and cannot use is others' room; it stays remembered until somebody needs it.
                    self._kv.cut(session, 0)
                return False
            for victim in sorted(within_reach, key=lambda other: other.order, reverse=True):
                if slots.free >= count:
                    break
                ids = about(session_id=victim.key[1])
                logger.info("session %d is preempted: out of KV slots", victim.key[1], extra=ids)
                self.preemptions += 1
                self._kv.cut(victim, 0)
                displaced.add(id(victim))
        slots.extend(session.row, count)
        return True


def _fill_graph(works: Sequence[Work]) -> None:
    """Leaves out what of a prefill reaches a little into the next size; the rows would be paid for up to its end."""
    rows = sum(work.rows for work in works)
    over = rows % (_SIZES if rows < _SIZES_BOUND else _LARGE_SIZES)
    longest = max(works, key=lambda work: 0 if work.verifies else work.prefill)
    if not longest.verifies and longest.prefill >= 2 * over:
        longest.prefill -= over


def _saves(leader: Session, work: Work) -> bool:
    """Whether `leader` is computing so much of what the work's session needs that waiting pays."""
    enough = max(_SHARED_TOKENS, -(-work.pending // _SHARED_PART))
    if work.pending < enough:
        return False
    mine, theirs = work.session.token_ids()[:-1], leader.token_ids()[:-1]
    head = slice(work.context, work.context + _SHARED_TOKENS)
    if mine[head].tobytes() != theirs[head].tobytes():
        return False
    return common_length(mine, theirs) - work.context >= enough
