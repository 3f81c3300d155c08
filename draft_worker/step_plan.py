"""What the next forward computes: pending chains, and the best frontier nodes of all sessions.

Slots are reserved here. Where they run out, trees wait, and pending tokens take the KV of the youngest sessions,
which start again once there is room.

A step may be planned while the one before it runs. Of its nodes in flight the best children, whose tokens nobody here
knows yet, compete with the nodes that are known; their siblings do at the step after.
"""

import logging
from collections.abc import Collection, Container, Sequence

import numpy as np

from outrider.draft_worker.draft_forest import NO_NODES, DraftForest, Ints, TakenNodes, TakingLimits
from outrider.draft_worker.draft_tree import DraftNode, assign_keys
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.session import DraftSession
from outrider.draft_worker.tree_kernels import POSITION, SERIAL, TOKEN
from outrider.engine.draft_staging import MOST_PROMISED, GrowthRows
from outrider.engine.kv_slots import SlotTable
from outrider.log_output import about

logger = logging.getLogger(__name__)

# A session that lost its slots starts again when this many are free beyond what it needs; with fewer it would lose
# them to the next tokens of an older one.
_RESTART_MARGIN = 64
# Of a path: with less there is nothing.
_LEAST_VALUE = 1e-300


class StepPlan:
    """One forward in the making.

    Attributes:
        rows: what it computes.
        nodes: [R, 2] the nodes whose children the R rows of logits give: their rows of the forest, and serial numbers.
        spans: whose they are: sessions in the order of `nodes`, and how many of them each has.
        stuck: sync sessions whose round can go no further.
        is_ranked: whether every child is found by rank under log q + G, without a look at the logits.
    """

    def __init__(self) -> None:
        self.rows = GrowthRows()
        self.nodes: Ints = NO_NODES
        self.spans: list[tuple[DraftSession, int]] = []
        self.stuck: list[DraftSession] = []
        self.is_ranked = True
        self._added: list[tuple[int, int]] = []
        self._chained: set[tuple[int, int]] = set()

    def add_chain(self, session: DraftSession, count: int) -> None:
        """The session's next pending tokens; the last one expands the root."""
        first, end = session.kv_len, session.kv_len + count
        whole = end == session.length
        self.rows.add_chain(session.row, session.tokens[first:end], first, session.sampling.record if whole else None)
        self._chained.add(session.key)
        session.kv_len = end
        if whole:
            root = session.tree.root
            self._added.append((root.row, root.serial))
            self._span(session, 1)

    def add_nodes(self, session: DraftSession, nodes: Ints, first_index: int) -> None:
        """Nodes of the session's tree, rows of the forest, their KV at key indices from `first_index` on."""
        length, forest = len(session.tokens), session.tree.forest
        assign_keys(forest, nodes, first_index - length)
        columns = forest.arrays.nodes[nodes]
        self.rows.add_tree(
            session.row,
            tree_start=length,
            first_index=first_index,
            token_ids=columns[:, TOKEN].tolist(),
            positions=columns[:, POSITION].tolist(),
            masks=[int.from_bytes(words.tobytes(), "little") for words in forest.arrays.masks[nodes]],
            record=session.sampling.record,
        )
        self._added += zip(nodes.tolist(), columns[:, SERIAL].tolist(), strict=True)
        self._span(session, len(nodes))

    def add_trees(self, sessions: Sequence[DraftSession], taken: TakenNodes) -> None:
        """Nodes of several sessions' trees; nothing is added behind them.

        Args:
            sessions: whose they are.
            taken: the nodes.
        """
        for session, count in zip(sessions, taken.counts, strict=True):
            self._span(session, count)
        self.rows.add_trees(taken.rows)
        self.nodes = taken.nodes

    def seal(self) -> None:
        """Nothing more is added."""
        if self._added:
            self.nodes = np.concatenate([np.array(self._added), self.nodes])

    def holds_chain(self, session: DraftSession) -> bool:
        """Whether pending tokens of the session are in this forward."""
        return session.key in self._chained

    def parents(self) -> list[tuple[DraftSession, DraftNode]]:
        """`nodes`, each with its session."""
        owners = [session for session, count in self.spans for _ in range(count)]
        return [
            (session, DraftNode(session.tree, row, serial))
            for session, (row, serial) in zip(owners, self.nodes.tolist(), strict=True)
        ]

    def _span(self, session: DraftSession, count: int) -> None:
        self.spans.append((session, count))
        self.is_ranked = self.is_ranked and session.is_ranked


class StepPlanner:
    """Plans step after step over the open sessions.

    Args:
        sessions: the open sessions, oldest first; a live view.
        forest: their trees, by their rows of the slot table.
        slots: where their KV lies.
        config: see there.
    """

    def __init__(
        self, sessions: Collection[DraftSession], forest: DraftForest, slots: SlotTable, config: GrowthConfig
    ) -> None:
        self._sessions, self._forest = sessions, forest
        self._slots = slots
        self._config = config
        self._turn = self._turn_of_levels = 0
        self._limits = TakingLimits(
            branching=config.branching,
            max_session_nodes=config.max_session_nodes,
            min_session_nodes=config.min_session_nodes,
            max_live_nodes=config.max_live_nodes,
            max_row_len=slots.max_row_len,
            most_promised=MOST_PROMISED,
            min_path_value=config.min_path_value,
        )

    def plan(self, left_out: Container[tuple[int, int]] = (), before: StepPlan | None = None) -> StepPlan:
        """The next forward, perhaps empty.

        Args:
            left_out: keys of sessions that have no part in it.
            before: the one that runs, where one does: of sessions in async mode alone, its children ranked.
        """
        plan = StepPlan()
        sessions = self._sessions
        if left_out:
            sessions = [session for session in sessions if session.key not in left_out]
        self._plan_chains(plan, sessions)
        self._plan_trees(plan, sessions, NO_NODES if before is None else before.nodes)
        plan.seal()
        return plan

    def _plan_chains(self, plan: StepPlan, sessions: Collection[DraftSession]) -> None:
        """Pending tokens, the shortest chain first: a final token must not wait for somebody's prompt."""
        waiting = []
        for session in sessions:
            if session.starved:
                session.starved = not self._may_restart(session)
            if session.kv_len < len(session.tokens) and session.wants_prefill:
                waiting.append(session)
        if not waiting:
            return
        waiting.sort(key=lambda session: session.length - session.kv_len)
        budget = self._config.max_step_tokens
        for session in waiting:
            count = min(session.length - session.kv_len, budget)
            # It may have lost its slots to one before it.
            if count > 0 and not session.starved and self._reserve(session, count, plan):
                budget -= count
                plan.add_chain(session, count)

    def _may_restart(self, session: DraftSession) -> bool:
        """Whether a session that lost its slots has room again: with a margin, or all slots to itself."""
        free = self._slots.free
        return free >= session.length and free >= min(session.length + _RESTART_MARGIN, self._slots.num_slots)

    def _reserve(self, session: DraftSession, count: int, plan: StepPlan) -> bool:
        """Takes slots for pending tokens; the youngest session loses its own first, this one in its turn."""
        if self._slots.free < count:
            holders = [held for held in self._sessions if held is session or self._slots.length(held.row)]
            while self._slots.free < count and holders:
                victim = holders.pop()
                if plan.holds_chain(victim):
                    continue
                ids = about(session_id=victim.key[1])
                logger.info("session %d waits for slots: %d free", victim.key[1], self._slots.free, extra=ids)
                victim.starve()
                if victim is session:
                    return False
        if self._slots.free < count:
            return False
        self._slots.extend(session.row, count)
        return True

    def _plan_trees(self, plan: StepPlan, sessions: Collection[DraftSession], before: Ints) -> None:
        growing, levels = [], []
        for session in sessions:
            # It may have lost its slots just now, and there may be no other step that would say so.
            if session.is_sync and session.level == 0 and (session.starved or not session.root_is_open):
                plan.stuck.append(session)
            # A chain that is in this forward has its KV counted, but its root no children yet, and nobody promised any.
            if session.kv_len < len(session.tokens) or plan.holds_chain(session):
                continue
            (levels if session.is_sync else growing).append(session)
        if levels:
            # Beside prompts and what grows by itself.
            least = max(self._config.min_path_value, _LEAST_VALUE)
            grows = any(session.tree.best_value >= least for session in growing)
            self._plan_levels(levels, plan, self._config.max_step_rows - (self._config.max_step_nodes if grows else 0))
        if growing:
            self._take(growing, plan, before)

    def _plan_levels(self, sessions: list[DraftSession], plan: StepPlan, most: int) -> None:
        """Levels of sync sessions up to so many rows of the step; one at least. The next step begins with the others.

        Steps of more rows run without a graph, and take as long as two.
        """
        turn = self._turn_of_levels % len(sessions)
        self._turn_of_levels = 0
        for place, session in enumerate(sessions[turn:] + sessions[:turn]):
            if place and plan.rows.num_rows + self._config.sync_step_nodes > most:
                self._turn_of_levels = turn + place
                return
            self._plan_level(session, plan)

    def _plan_level(self, session: DraftSession, plan: StepPlan) -> None:
        """A sync session's next level whole, whatever the others do: its tree must not depend on them."""
        if session.level <= 0:
            return
        room = min(self._slots.max_row_len - self._slots.length(session.row), self._slots.free)
        nodes = session.tree.take_rows(min(room, self._config.sync_step_nodes), session.least_value)
        self._add_nodes(session, nodes, plan)
        if not len(nodes):
            plan.stuck.append(session)

    def _take(self, growing: list[DraftSession], plan: StepPlan, before: Ints) -> None:
        """Nodes of sessions in async mode, whose slots are taken all at once.

        Args:
            growing: whose nodes may be taken.
            plan: gets them.
            before: of the step that runs: their best children compete, and their children have credit set aside.
        """
        slots, by_row = self._slots, {session.row: session for session in growing}
        width = min(self._config.max_step_nodes, slots.free)
        taken, self._turn = self._forest.take(
            list(by_row), slots.lengths, self._limits, width=width, turn=self._turn, before=before
        )
        if not len(taken.nodes):
            return
        firsts = [slots.lengths[row] for row in taken.trees]
        has_room = slots.extend_rows(taken.trees, firsts, taken.counts)
        assert has_room, "more nodes were chosen than there is room for"
        plan.add_trees([by_row[row] for row in taken.trees], taken)

    def _add_nodes(self, session: DraftSession, nodes: Ints, plan: StepPlan) -> None:
        if len(nodes):
            first_index = self._slots.length(session.row)
            self._slots.extend(session.row, len(nodes))
            plan.add_nodes(session, nodes, first_index)
