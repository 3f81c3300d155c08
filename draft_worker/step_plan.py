"""What the next forward computes: pending chains, and the best frontier nodes of all sessions.

Slots are reserved here. Where they run out, trees wait, and pending tokens take the KV of the youngest sessions,
which start again once there is room.

A step may be planned while the one before it runs. Of its nodes in flight the best children, whose tokens nobody here
knows yet, compete with the nodes that are known; their siblings do at the step after.
"""

import logging
from collections.abc import Collection, Container
from heapq import heapify, heappop, heapreplace
from itertools import islice

from outrider.draft_worker.draft_tree import DraftNode, assign_keys
from outrider.draft_worker.growth_step import GrowthConfig
from outrider.draft_worker.session import DraftSession
from outrider.engine.draft_staging import MOST_PROMISED, GrowthRows
from outrider.engine.kv_slots import SlotTable
from outrider.log_output import about

logger = logging.getLogger(__name__)

# A session that lost its slots starts again when this many are free beyond what it needs; with fewer it would lose
# them to the next tokens of an older one.
_RESTART_MARGIN = 64


class StepPlan:
    """One forward in the making.

    Attributes:
        rows: what it computes.
        nodes: [R] the nodes whose children the R rows of logits give.
        spans: whose they are: sessions in the order of `nodes`, and how many of them each has.
        stuck: sync sessions whose round can go no further.
        is_ranked: whether every child is found by rank under log q + G, without a look at the logits.
    """

    def __init__(self) -> None:
        self.rows = GrowthRows()
        self.nodes: list[DraftNode] = []
        self.spans: list[tuple[DraftSession, int]] = []
        self.stuck: list[DraftSession] = []
        self.is_ranked = True
        self._chained: set[tuple[int, int]] = set()

    def add_chain(self, session: DraftSession, count: int) -> None:
        """The session's next pending tokens; the last one expands the root."""
        first, end = session.kv_len, session.kv_len + count
        whole = end == session.length
        self.rows.add_chain(session.row, session.tokens[first:end], first, session.sampling.record if whole else None)
        self._chained.add(session.key)
        session.kv_len = end
        if whole:
            self.nodes.append(session.tree.root)
            self._span(session, 1)

    def add_nodes(self, session: DraftSession, nodes: list[DraftNode], first_index: int) -> None:
        """Nodes of the session's tree, their KV at key indices from `first_index` on."""
        length = len(session.tokens)
        assign_keys(nodes, first_index - length)
        if len(nodes) == 1:
            # Most of them, where there are many sessions.
            (node,) = nodes
            token_ids, positions, masks = [node.token], [node.position], [node.mask]
        else:
            token_ids = [node.token for node in nodes]
            positions = [node.position for node in nodes]
            masks = [node.mask for node in nodes]
        self.rows.add_tree(
            session.row,
            tree_start=length,
            first_index=first_index,
            token_ids=token_ids,
            positions=positions,
            masks=masks,
            record=session.sampling.record,
        )
        self.nodes += nodes
        self._span(session, len(nodes))

    def holds_chain(self, session: DraftSession) -> bool:
        """Whether pending tokens of the session are in this forward."""
        return session.key in self._chained

    def parents(self) -> list[tuple[DraftSession, DraftNode]]:
        """`nodes`, each with its session."""
        owners = (session for session, count in self.spans for _ in range(count))
        return list(zip(owners, self.nodes, strict=True))

    def _span(self, session: DraftSession, count: int) -> None:
        self.spans.append((session, count))
        self.is_ranked = self.is_ranked and session.is_ranked


class StepPlanner:
    """Plans step after step over the open sessions.

    Args:
        sessions: the open sessions, oldest first; a live view.
        slots: where their KV lies.
        config: see there.
    """

    def __init__(self, sessions: Collection[DraftSession], slots: SlotTable, config: GrowthConfig) -> None:
        self._sessions = sessions
        self._slots = slots
        self._config = config
        self._turn = self._turn_of_levels = 0
        # Nodes that wait for their children, by their sessions' keys.
        self._in_flight: dict[tuple[int, int], int] = {}

    def plan(self, left_out: Container[tuple[int, int]] = (), before: StepPlan | None = None) -> StepPlan:
        """The next forward, perhaps empty.

        Args:
            left_out: keys of sessions that have no part in it.
            before: the one that runs, where one does: of sessions in async mode alone, its children ranked.
        """
        plan = StepPlan()
        self._in_flight.clear()
        if before is not None:
            self._promise(before)
        sessions = self._sessions
        if left_out:
            sessions = [session for session in sessions if session.key not in left_out]
        self._plan_chains(plan, sessions)
        self._plan_trees(plan, sessions)
        return plan

    def _promise(self, before: StepPlan) -> None:
        """Has the best children of the nodes in flight compete, and counts these nodes: their children need credit."""
        rows = enumerate(before.nodes)
        for session, count in before.spans:
            promise, waiting = session.tree.promise, 0
            for row, node in islice(rows, count):
                if not node.is_dead:
                    waiting += 1
                    if row < MOST_PROMISED:
                        promise(node, row)
            self._in_flight[session.key] = waiting

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

    def _plan_trees(self, plan: StepPlan, sessions: Collection[DraftSession]) -> None:
        growing, levels, least = [], [], self._config.min_path_value
        for session in sessions:
            # It may have lost its slots just now, and there may be no other step that would say so.
            if session.is_sync and session.level == 0 and (session.starved or not session.root_is_open):
                plan.stuck.append(session)
            # A chain that is in this forward has its KV counted, but its root no children yet, and nobody promised any.
            if session.kv_len < len(session.tokens) or plan.holds_chain(session):
                continue
            if session.is_sync:
                levels.append(session)
            elif (value := session.tree.best_value) > 0 and value >= least and (room := self._room(session)) > 0:
                growing.append((session, room))
        if levels:
            # Beside prompts and what grows by itself.
            self._plan_levels(
                levels, plan, self._config.max_step_rows - (self._config.max_step_nodes if growing else 0)
            )
        if growing:
            self._add_shares([share for share in self._share_out(growing) if share[1]], plan)

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
        nodes = session.tree.take(min(room, self._config.sync_step_nodes), session.least_value)
        self._add_nodes(session, nodes, plan)
        if not nodes:
            plan.stuck.append(session)

    def _room(self, session: DraftSession) -> int:
        """Nodes of the session that its credit, its row of slots and its share of a step allow to expand."""
        config, live, length = self._config, session.limits.max_live_nodes, self._slots.lengths[session.row]
        credit = (live - session.tree.size) // min(config.branching, live) - self._in_flight.get(session.key, 0)
        # Promises that were not kept hold their places until a commit, and masks have no bits beside those of a tree.
        places = config.max_live_nodes - (length - len(session.tokens))
        return min(credit, places, self._slots.max_row_len - length, config.max_session_nodes)

    def _share_out(self, growing: list[tuple[DraftSession, int]]) -> list[tuple[DraftSession, list[DraftNode]]]:
        """The step's width in nodes: everybody's minimum first, then the best of all sessions."""
        width, least = min(self._config.max_step_nodes, self._slots.free), self._config.min_path_value
        if len(growing) == 1:
            session, room = growing[0]
            return [(session, session.tree.take(min(room, width), least))]
        # Where there are more sessions than width, another one comes first at every step.
        self._turn = (self._turn + 1) % len(growing)
        growing = growing[self._turn :] + growing[: self._turn]
        shares: list[list[DraftNode]] = []
        for session, room in growing:
            share = session.tree.take(min(room, width, self._config.min_session_nodes), least)
            width -= len(share)
            shares.append(share)
        best = [
            (-value, index, session.tree, room - len(shares[index]))
            for index, (session, room) in enumerate(growing)
            if width > 0 and len(shares[index]) < room and (value := session.tree.best_value) >= least
        ]
        heapify(best)
        while width > 0 and best:
            _, index, tree, room = best[0]
            node = tree.take_best()
            if node is not None:
                shares[index].append(node)
                width -= 1
            if node is not None and room > 1 and (value := tree.best_value) >= least:
                heapreplace(best, (-value, index, tree, room - 1))
            else:
                heappop(best)
        return [(session, share) for (session, _), share in zip(growing, shares, strict=True)]

    def _add_shares(self, shares: list[tuple[DraftSession, list[DraftNode]]], plan: StepPlan) -> None:
        """Nodes of several sessions, whose slots are taken all at once."""
        if not shares:
            return
        rows = [session.row for session, _ in shares]
        firsts = [self._slots.lengths[row] for row in rows]
        has_room = self._slots.extend_rows(rows, firsts, [len(nodes) for _, nodes in shares])
        assert has_room, "more nodes were chosen than there is room for"
        for (session, nodes), first_index in zip(shares, firsts, strict=True):
            plan.add_nodes(session, nodes, first_index)

    def _add_nodes(self, session: DraftSession, nodes: list[DraftNode], plan: StepPlan) -> None:
        if nodes:
            first_index = self._slots.length(session.row)
            self._slots.extend(session.row, len(nodes))
            plan.add_nodes(session, nodes, first_index)
