"""One target's rounds.

    results in -> commit -> who may run -> hold while growth is worth it -> choose nodes -> batch out
                                                                        -> drafts hear -> deltas out

A batch may also leave ahead of the result before it (`Way.AHEAD`): then it is held until that result is near, and what
of it is verified turns out with the commit.

Commits leave for the drafts without an answer and growth arrives on its own, so drafting overlaps verification.
docs/scheduling.md explains what is decided here, and has the formulas.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from outrider import collector
from outrider.compiled import entries
from outrider.coordinator import clock
from outrider.coordinator.chosen_wait import ChosenWait
from outrider.coordinator.commit_kernels import count_misses
from outrider.coordinator.commits import (
    Answered,
    Committed,
    commit,
    commit_trees,
    take_tokens,
    tell_drafts,
    whole_answer,
)
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.firing import patience_ns
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.messages import (
    FaultKind,
    GrowthBatch,
    SessionFault,
    SessionVerdict,
    VerifyResult,
)
from outrider.coordinator.one_graph import credit, is_resident
from outrider.coordinator.outlooks import outlooks
from outrider.coordinator.resident import graft_resident
from outrider.coordinator.rounds import Step, Way
from outrider.coordinator.session import Session
from outrider.coordinator.sync_wait import SyncWait
from outrider.coordinator.totals import Totals
from outrider.coordinator.trees import Tree
from outrider.coordinator.verdicts import Verdicts
from outrider.errors import WorkerUnavailable

# A target that computed nothing has no room; asking again at once would only spin.
_DEFERRED_PAUSE_NS = 5_000_000
# Sessions whose clients hear before the event loop looks for results and growth again: some 40 us each.
_DELIVERED_AT_ONCE = 8
_UNANSWERED = SessionFault(kind=FaultKind.LOST, message="the target left it out of its answer")


class SessionOwner(Protocol):
    """Who places sessions and ends them: the scheduler."""

    totals: Totals

    def finish_session(self, session: Session) -> None:
        """The session has emitted its last token."""

    def take_fault(self, session: Session, fault: SessionFault) -> None:
        """The target has lost or refused the session."""

    def note_progress(self, sessions: Sequence[Session]) -> None:
        """These sessions have emitted tokens, and go on."""

    def remove_target(self, worker_id: str, reason: str) -> None:
        """The target is gone."""


class VerifyLoop:
    """Keeps one target busy."""

    def __init__(
        self, lane: TargetLane, config: CoordinatorConfig, drafts: Mapping[str, DraftPeer], owner: SessionOwner
    ) -> None:
        self.lane = lane
        self._config = config
        self._drafts = drafts
        self._sync_wait = SyncWait(config.sync_wait_cap_ms, drafts)
        self._owner = owner
        self._free_since_ns: int | None = None
        self._chosen_wait = ChosenWait()
        self._undelivered: OrderedDict[int, Session] = OrderedDict()
        self._untold: list[Committed] = []
        """Commits of which drafts, counters and clients are still to hear."""
        self._uncounted: list[Committed] = []
        """Commits that nothing has been learned from yet."""
        self._has_fired = False
        self._error: Exception | None = None
        """What went wrong with a result that was taken at once."""

    async def run(self) -> None:
        """Rounds for ever, until the target is lost."""
        lane = self.lane
        lane.link.on_result = self._take_at_once
        try:
            lane.open()
            while True:
                if self._error is not None:
                    raise self._error
                if self._has_fired:
                    self._has_fired = False
                    await self._after_batch()
                    continue
                if lane.flights and (lane.is_full or lane.flights[0].result.done()):
                    await self._take_next()
                    continue
                now_ns = clock.now_ns()
                sessions, hold_s = self._fire_if_due(now_ns)
                if not sessions:
                    # Nobody waits for it now, and there may be no further batch for long.
                    self._learn()
                if hold_s:
                    await self._hold(sessions, now_ns, hold_s)
        except WorkerUnavailable as error:
            self._owner.remove_target(lane.worker_id, str(error))
        finally:
            lane.link.on_result = None
            lane.close()
            # Of a loop that ends while it holds a batch.
            self._tell()
            self._learn()

    async def _take_next(self) -> None:
        """Waits for the next result, and applies it unless that has been done at once."""
        self._tell()
        flights = self.lane.flights
        flight = flights[0]
        result = await flight.result
        if flights and flights[0] is flight:
            self._apply(result)

    def _take_at_once(self) -> None:
        """A result is in: it is applied, and the next batch sent if it is due, in the same turn of the event loop.

        Its next turns belong to whatever else has come, growth above all; the target has nothing to do meanwhile.
        """
        lane = self.lane
        result = lane.flights[0].result if lane.flights else None
        if self._error is not None or result is None or not result.done() or result.cancelled():
            return
        try:
            # The next batch is chosen by what the steps before have shown.
            self._learn()
            self._apply(result.result())
            if lane.is_full or lane.goes_ahead:
                # The next batch is at the target already: when one more is due, the loop finds in its own turn.
                self._tell()
            else:
                self._fire_if_due(clock.now_ns())
        except Exception as error:  # noqa: BLE001 - the loop ends of it, not the link
            self._error = error
        lane.notify()

    async def _hold(self, sessions: Sequence[Session], now_ns: int, hold_s: float) -> None:
        """Growth, a result, a session that comes or rests no more: all of them end the wait."""
        self._chosen_wait.hold(now_ns, hold_s)
        if self.lane.flights:
            # The target is busy: there is time.
            self._learn()
        if self._undelivered:
            await self._deliver(until_ns=now_ns + hold_s * 1e9)
        elif sessions and self.lane.goes_ahead:
            await self._until_due(now_ns + hold_s * 1e9)
        else:
            await self.lane.change(timeout_s=hold_s)

    async def _after_batch(self) -> None:
        """What has time until the batch is answered: the batch is written to its stream before."""
        await asyncio.sleep(0)
        self._learn()
        await self._deliver()
        if self.lane.flights and not self.lane.flights[0].result.done():
            collector.between_rounds()

    # ------------------------------------------------------------------------------------------------ when, who, what

    def _ready(self, now_ns: int) -> Sequence[Session]:
        """The next batch's sessions: while others can run, those whose fixed tree is still growing stay out of it."""
        sessions = self.lane.next_group(now_ns)
        if not self.lane.group(sessions).has_sync:
            return sessions
        return [session for session in sessions if self._sync_wait.left_ns(session, now_ns) <= 0] or sessions

    def _hold_s(self, sessions: Sequence[Session], now_ns: int) -> float:
        """How long the batch is held before the question is asked again: 0 is to fire."""
        # Asked anew after every wait: an event loop's timers may be a millisecond early, and then it goes on resting.
        if not sessions:
            self._free_since_ns = None
            return self.lane.rest_left_ns(now_ns) / 1e9
        if self._free_since_ns is None:
            self._free_since_ns = now_ns
        patience_ns = self.patience_ns(sessions, waited_ns=now_ns - self._free_since_ns)
        held_ns = max(self.lane.lead_ns(now_ns), patience_ns, 0.0)
        return min(held_ns, self.lane.rest_left_ns(now_ns)) / 1e9 if held_ns else 0.0

    async def _until_due(self, due_ns: float) -> None:
        """Holds a batch that goes ahead: of all that comes meanwhile only the result before it changes anything."""
        flights = self.lane.flights
        before = flights[0]
        while (
            (left_ns := due_ns - clock.now_ns()) > 0 and flights and flights[0] is before and not before.result.done()
        ):
            await self.lane.change(timeout_s=left_ns / 1e9)

    def _fire_if_due(self, now_ns: int) -> tuple[Sequence[Session], float]:
        """Sends the next batch if nothing is waited for; its sessions, and for how long it is held (0: it was sent)."""
        try:
            sessions = self._ready(now_ns)
            hold_s = self._hold_s(sessions, now_ns)
            if not hold_s:
                self._fire(sessions, held_ns=self._chosen_wait.end(now_ns))
        finally:
            self._tell()
        return sessions, hold_s

    def _fire(self, sessions: Sequence[Session], *, held_ns: int) -> None:
        if self.lane.goes_ahead:
            flight = self.lane.send_ahead(sessions)
        else:
            waited_ns = clock.now_ns() - (self._free_since_ns or clock.now_ns())
            flight = self.lane.submit(sessions, self.choose(sessions), waited_ns=waited_ns)
        flight.held_ns = held_ns
        flight.result.add_done_callback(self._note_result)
        if flight.group.has_sync:
            self._sync_wait.note_fired(sessions, clock.now_ns())
        self._free_since_ns = None
        self._has_fired = True

    def _note_result(self, result: "asyncio.Future[VerifyResult]") -> None:
        if not result.cancelled():
            # Of two batches that are lost together one is waited for; asyncio would complain of the other.
            result.exception()
        self.lane.notify()

    def choose(self, sessions: Sequence[Session]) -> Sequence[Tree]:
        """Each session's tree."""
        return self.lane.trees.choose(self.lane.group(sessions))

    # --------------------------------------------------------------------------------------------- waiting for growth

    def patience_ns(self, sessions: Sequence[Session], *, waited_ns: int) -> float:
        """How long the free target should wait for these sessions' drafts; 0 is not at all."""
        lane = self.lane
        group = lane.group(sessions)
        if group.has_sync and group.is_sync.all():
            now_ns = clock.now_ns()
            return max(self._sync_wait.left_ns(session, now_ns) for session in sessions)
        if lane.one_graph:
            # Those whose draft is the target's own have nothing to wait for.
            group = lane.group([session for session in sessions if not is_resident(session)])
        if lane.way.current != Way.WAIT or not len(group):
            return 0.0
        now_ns = clock.now_ns()
        return patience_ns(
            outlooks(lane.trees, group, self._drafts, now_ns),
            gains=lane.misses.level_gains(),
            rate=lane.pace.rate(len(group)),
            now_ns=now_ns,
            left_ns=self._config.verify_wait_cap_ms * 1e6 - waited_ns,
        )

    # --------------------------------------------------------------------------------------------------------- commits

    def _apply(self, result: VerifyResult) -> None:
        """Commits a step's verdicts: what the next batch waits for. It is told and counted when that has left."""
        step = Step(self.lane.flights.popleft(), result, clock.now_ns())
        # What a batch was held while the target was busy anyway is not counted.
        self._free_since_ns = None
        self._chosen_wait.end(step.result_ns)
        answered = whole_answer(step) or self._answered(step)
        is_looked_at = self._is_looked_at(result)
        committed = commit(step, answered) if is_looked_at else commit_trees(step, answered)
        if result.resident:
            credit(committed, result.resident)
        self._note_misses(committed)
        self._untold.append(committed)
        if is_looked_at or committed.is_watched or not committed.is_on.all():
            # Whoever comes in the place of sessions that have ended may be in the next batch.
            self._tell()
        self.lane.begin_next(step)
        if result.growth is not None:
            self._graft(result.growth)
        self._uncounted.append(committed)
        self.lane.applied_result_ns = step.result_ns

    def _is_looked_at(self, result: VerifyResult) -> bool:
        """Whether sessions' tokens are asked for before the next batch leaves: how many they are, or which."""
        lane = self.lane
        return bool(lane.flights or lane.suspects or lane.one_graph) or result.growth is not None

    def _tell(self) -> None:
        """Drafts hear of commits, sessions have their tokens, clients are to hear; who has ended goes.

        In the turn of the event loop in which they were applied: as soon as the next batch has left, or is held.
        """
        untold, self._untold = self._untold, []
        for committed in untold:
            try:
                tell_drafts(committed, self._drafts)
            finally:
                # Trees have moved: whatever goes wrong, a session is not to go on elsewhere without these.
                take_tokens(committed)
            self._owner.totals.note_nodes(committed)
            self._go_on(committed)

    def _answered(self, step: Step) -> Answered:
        """Whom a step gave tokens to; sessions without are seen to."""
        flight, result, _ = step
        places = dict(flight.group.places)
        answered: list[tuple[int, SessionVerdict]] = []
        for verdict in result.verdicts:
            place = places.get(verdict.session_id)
            if place is None:
                continue
            session = flight.sessions[place]
            if session.flight is not flight or session.is_finished or verdict.epoch != session.target_epoch:
                continue
            del places[verdict.session_id]
            if verdict.fault is not None:
                session.flight, session.target_id = None, None
                self._owner.take_fault(session, verdict.fault)
            elif verdict.deferred:
                session.flight = None
                self._owner.totals.serving.deferred += 1
                if not result.step_tokens:
                    session.rests_until_ns = step.result_ns + _DEFERRED_PAUSE_NS
            else:
                _check_tree(step, place, session)
                answered.append((place, verdict))
        # An answer has to name every session it was asked for, under its epoch: the others are lost there.
        for place in places.values():
            session = flight.sessions[place]
            # What the step before has closed is in no further one, although it was sent.
            if session.flight is flight and not session.is_finished:
                session.flight, session.target_id = None, None
                self._owner.take_fault(session, _UNANSWERED)
        # A fault of one choice ends its request, with choices that were answered before it.
        answered = [(place, verdict) for place, verdict in answered if not flight.sessions[place].is_finished]
        own = np.array([place for place, _ in answered], dtype=np.int64)
        sessions = [flight.sessions[place] for place, _ in answered]
        return Answered(own, sessions, Verdicts.of([verdict for _, verdict in answered]))

    def _note_misses(self, committed: Committed) -> None:
        """How the rounds of sessions ended that drafts run ahead of."""
        own = committed
        who = own.is_on, own.is_drafted, own.group.is_async, own.is_covered, own.is_wrong
        columns = map(entries, (*who, own.nodes, own.emitted))
        rounds, tokens, misses, wrong, tree_rounds, tree_misses = count_misses(*columns)
        self.lane.misses.observe_many(
            rounds, tokens=tokens, misses=misses, tree_rounds=tree_rounds, tree_misses=tree_misses
        )
        demand = self._owner.totals.demand
        demand.rounds += rounds
        demand.tokens += tokens
        demand.missed_rounds += wrong
        demand.starved_rounds += misses - wrong
        demand.bare_rounds += rounds - tree_rounds

    def _go_on(self, committed: Committed) -> None:
        """Clients are to hear; sessions that have ended go."""
        sessions = committed.sessions
        if not committed.is_on.all():
            finished = [session for session in sessions if session.is_finished]
            sessions = [session for session in sessions if not session.is_finished]
        else:
            finished = []
        self._undelivered.update((session.session_id, session) for session in sessions)
        self._owner.note_progress(sessions)
        if committed.is_watched:
            for session in sessions:
                if session.tap is not None:
                    session.tap.note_moved()
        for session in finished:
            session.deliver()
        for session in finished:
            self._owner.finish_session(session)

    def _graft(self, growth: GrowthBatch) -> None:
        """Takes what the target has drafted by itself."""
        grown, dropped = graft_resident(self.lane.worker_id, growth, self.lane.sessions)
        totals = self._owner.totals
        totals.serving.grown_nodes += grown
        totals.dropped_nodes += dropped

    def _learn(self) -> None:
        """What rounds that were applied have shown."""
        rounds, self._uncounted = self._uncounted, []
        totals = self._owner.totals
        for committed in rounds:
            emitted = totals.note_round(committed)
            flight, result, result_ns = committed.step
            self.lane.learn(flight, result, emitted=emitted, result_ns=result_ns, demand=totals.demand)

    async def _deliver(self, until_ns: float = math.inf) -> None:
        """Lets the clients have what was committed since the last time: a few at a time, behind results and growth."""
        waiting, flights = self._undelivered, self.lane.flights
        first = flights[0] if flights else None
        while waiting:
            for _ in range(min(len(waiting), _DELIVERED_AT_ONCE)):
                _, session = waiting.popitem(last=False)
                session.deliver()
            await asyncio.sleep(0)
            # A result that is in, or was taken at once: there is a batch to be sent, or to be held anew.
            if first is not (flights[0] if flights else None) or (first is not None and first.result.done()):
                break
            if clock.now_ns() >= until_ns:
                break


def _check_tree(step: Step, place: int, session: Session) -> None:
    """Of a batch that followed a step, the target has to have verified the tree that was found here.

    Raises:
        WorkerUnavailable: it has not: what it accepted stands for nothing.
    """
    flight, result, _ = step
    if result.verified is None:
        return
    expected, verified = int(flight.trees.counts[place]), result.verified[session.session_id]
    if verified != expected:
        message = (
            f"it verified {verified} nodes of session {session.session_id} where {expected} follow the step before"
        )
        raise WorkerUnavailable(message)
