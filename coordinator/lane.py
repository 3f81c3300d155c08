"""One target worker as the scheduler sees it: its link, its sessions, its batches in flight, what its steps cost."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.coordinator import clock
from outrider.coordinator.ahead import Lead
from outrider.coordinator.alarm import Alarm
from outrider.coordinator.candidates import Candidates, group_candidates
from outrider.coordinator.config import RoundTiming
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.draft_demand import DraftDemand
from outrider.coordinator.firing import MissRates
from outrider.coordinator.group import Group
from outrider.coordinator.hopeless_ways import hopeless_ways
from outrider.coordinator.links import TargetLink
from outrider.coordinator.messages import SessionOpening, VerifyResult
from outrider.coordinator.one_graph import resident_flags
from outrider.coordinator.open_leaves import Leaves, level_leaves
from outrider.coordinator.rounds import Flight, RoundPace, Step, Way, ways_of
from outrider.coordinator.selection import Ints, choose_counts
from outrider.coordinator.session import Session
from outrider.coordinator.successor import can_follow, succeed
from outrider.coordinator.trees import Submissions, Tree, Trees
from outrider.coordinator.trials import Trials
from outrider.coordinator.verdicts import Verdicts
from outrider.v1 import registry_pb2

# A batch leaves so much of a step before it could begin, lest the target wait for it.
_EARLY_SHARE = 0.1
# So often half of the nodes may go, where steps of that size have not been seen lately.
_PROBE_ROUNDS = 48
# The price of a row is read over so many, which is more than a rung of a small step.
_PRICE_ROWS = 32


class _Offer(NamedTuple):
    """The candidates of some sessions, as their forest was then; `version` is None where that does not tell."""

    group: Group
    version: int | None
    found: Candidates


class TargetLane:
    """A target's sessions and the state of its verify loop."""

    def __init__(
        self,
        worker_id: str,
        link: TargetLink,
        limits: registry_pb2.WorkerLimits,
        *,
        fair_slowdown: float = 1.5,
        one_graph: bool = False,
        ahead: bool = False,
        timing: RoundTiming = "learned",
    ) -> None:
        self.worker_id = worker_id
        self.one_graph = one_graph
        """It drafts in the graph that verifies, for sessions that let it."""
        self.link = link
        self.limits = limits
        self.sessions: dict[int, Session] = {}
        self.flights: deque[Flight] = deque()
        self.suspects: set[int] = set()
        """Of its sessions, those that are to be verified alone."""
        self._probed: tuple[Session, int] | None = None
        self.applied_result_ns = 0
        """When the last result was applied; `learn` hears of it later."""
        self.cost = StepCost()
        self.pace = RoundPace()
        self.misses = MissRates()
        self.lead = Lead()
        self.way = Trials(ways_of(timing, ahead=ahead))
        self.steps = 0
        self.is_draining = False
        """It takes no new sessions."""
        self.is_preparing = False
        """Its last heartbeat said that what it runs may be compiling."""
        self._fair_slowdown = fair_slowdown
        self._offer: _Offer | None = None
        self._groups: list[Group] = []
        self._row_ns = 0.0
        self._changed = asyncio.Event()
        self._alarm = Alarm(self._changed.set)

    @property
    def is_full(self) -> bool:
        """Whether no further batch may be sent before a result is in."""
        return len(self.flights) >= (2 if self.way.current in (Way.TWO_GROUPS, Way.AHEAD) else 1)

    @property
    def goes_ahead(self) -> bool:
        """Whether the next batch follows the one that is in flight."""
        return bool(self.flights) and self.way.current == Way.AHEAD

    def next_group(self, now_ns: int) -> Sequence[Session]:
        """The sessions of the next batch: all that may run, or that half of them that has waited longest."""
        if self.goes_ahead:
            return self._followers(now_ns)
        sessions = self.runnable(now_ns)
        if self.suspects:
            return self._apart(sessions)
        if self.way.current != Way.TWO_GROUPS:
            return sessions
        in_flight = sum(len(flight.sessions) for flight in self.flights)
        half = -(-(len(sessions) + in_flight) // 2)
        return sorted(sessions, key=lambda session: session.committed_ns)[:half]

    def _followers(self, now_ns: int) -> Sequence[Session]:
        """Those of the batch in flight that will go on after it, and those that may run beside it.

        None where one of them has its tree from elsewhere, or is to be verified alone.
        """
        flight = self.flights[0]
        sessions = [
            session
            for session in self._willing(now_ns)
            if session.flight is None or (session.flight is flight and len(session.token_ids) + 1 < session.end)
        ]
        return [] if self.suspects or not can_follow(self.group(sessions)) else sessions

    def _apart(self, sessions: Sequence[Session]) -> Sequence[Session]:
        """A suspect alone, in turn with all others together; nothing is in flight beside it.

        What a target computes of a prompt goes on beside whatever comes next, so a suspect keeps its turn until its
        first result is there.
        """
        if self.flights:
            return []
        suspects = [session for session in sessions if session.session_id in self.suspects]
        others = [session for session in sessions if session.session_id not in self.suspects]
        if self._probed is not None:
            session, length = self._probed
            if session in suspects and session.target_id is not None and len(session.token_ids) == length:
                return [session]
        if not suspects or (others and self._probed is not None):
            return others
        return [min(suspects, key=lambda session: session.committed_ns)]

    def place(self, session: Session) -> None:
        """Gives a session its place here."""
        self.sessions[session.session_id] = session
        if session.probation:
            self.suspects.add(session.session_id)

    def let_go(self, session: Session) -> bool:
        """Takes its place away, and closes it at the worker; whether it had one."""
        self.suspects.discard(session.session_id)
        if self.sessions.pop(session.session_id, None) is None:
            return False
        self._groups, self._offer = [], None
        self.forget_drafted(session)
        if session.target_id == self.worker_id:
            self.link.close_session(session.session_id, session.target_epoch)
        return True

    def lead_ns(self, now_ns: int) -> float:
        """How long a further batch would only wait at the target, for the end of the one that runs."""
        if not self.flights:
            return 0.0
        overhead_ns, step_ns = self.pace.overhead_ns, self.cost.predict_ns(self.flights[-1].rows)
        if self.goes_ahead:
            early_ns = self.lead.ns(step_ns=step_ns, overhead_ns=overhead_ns, grows=self.flights[-1].group.is_drafted)
        else:
            early_ns = overhead_ns + _EARLY_SHARE * step_ns
        return self._expected_result_ns(step_ns) - early_ns - now_ns

    def _expected_result_ns(self, step_ns: float) -> float:
        """When the last batch in flight is answered, if it takes so long."""
        last = self.flights[-1]
        # A successor lies there when the step before it ends, or soon after.
        came_ns = 0.0 if last.successor is not None else last.submitted_ns + self.pace.overhead_ns
        return max(came_ns, self.applied_result_ns) + step_ns

    @property
    def has_room(self) -> bool:
        """Whether one more session may be placed here."""
        return self.room > 0

    @property
    def room(self) -> int:
        """Sessions that may still be placed here."""
        return 0 if self.is_draining else max(0, self.limits.max_sessions - len(self.sessions))

    def runnable(self, now_ns: int) -> list[Session]:
        """Sessions that may be verified now, oldest first; those in flight and those whose reader stalls are not."""
        return [
            session
            for session in self.sessions.values()
            if session.flight is None
            and session.result is None
            and session.rests_until_ns <= now_ns
            and not (generation := session.generation).is_closed
            and not generation.is_stalled
        ]

    def _willing(self, now_ns: int) -> list[Session]:
        """Sessions that may be verified, now or behind what they have in flight."""
        return [
            session
            for session in self.sessions.values()
            if not session.is_finished and not session.generation.is_stalled and session.rests_until_ns <= now_ns
        ]

    def rest_left_ns(self, now_ns: int) -> float:
        """Until the next of those that `runnable` left out because they rest; inf where none rests."""
        return min(
            (until - now_ns for own in self.sessions.values() if (until := own.rests_until_ns) > now_ns),
            default=math.inf,
        )

    def notify(self) -> None:
        """Something has changed that the loop may be waiting for: growth, a new session, a reader that reads on."""
        self._changed.set()

    async def change(self, *, timeout_s: float) -> None:
        """Waits for the next `notify`, not longer than so many seconds (or for ever: inf)."""
        self._changed.clear()
        if timeout_s != math.inf:
            self._alarm.set(timeout_s)
        try:
            await self._changed.wait()
        finally:
            self._alarm.cancel()

    def open(self) -> None:
        """From now on changes are waited for: what that takes is taken at once, whatever comes."""
        self._alarm.open()

    def close(self) -> None:
        """Nobody waits for changes any more."""
        self._alarm.close()

    def group(self, sessions: Sequence[Session]) -> Group:
        """These sessions in columns; mostly they are those of the last batch, or of the one before."""
        for group in self._groups:
            if group.sessions == sessions:
                return group
        self._groups = [Group(sessions), *self._groups[:1]]
        return self._groups[0]

    def candidates(self, sessions: Sequence[Session]) -> Candidates:
        """The best nodes of each session, as far as its request and this target go."""
        group = self.group(sessions)
        # Of chains nobody counts the changes.
        version = None if group.forest is None or group.chains else group.forest.version
        offer = self._offer
        # Whether to wait and what to send are asked of the same sessions, with nothing in between.
        if offer is None or version is None or offer.group is not group or offer.version != version:
            offer = self._offer = _Offer(group, version, group_candidates(group, self.limits.max_tree_nodes))
        return offer.found

    def leaf_values(
        self,
        sessions: Sequence[Session],
        *,
        widths: Sequence[float] | npt.NDArray[np.floating],
        by_model: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
    ) -> Leaves:
        """The leaves that the next level of each session will hang from.

        Args:
            widths: [S] nodes that one step of the session's draft expands of it.
            by_model: [S] whether that is a model; asked where other sources grow too. None: all are.
        """
        return level_leaves(
            self.candidates(sessions),
            by_model,
            widths=np.asarray(widths, dtype=np.float64),
            most=self._most(sessions),
            hit=self.misses.hit,
            price=self.pace.rate(len(sessions)) * self._row_ns,
        )

    def _most(self, sessions: Sequence[Session]) -> Ints:
        """[S] nodes that a session may send."""
        return self.group(sessions).reaches(self.limits.max_tree_nodes)[0]

    def choose(self, sessions: Sequence[Session]) -> Trees:
        """The trees of all sessions together that promise the highest rate."""
        found = self.candidates(sessions)
        counts = self._best_counts(found, max_rows=self.limits.max_step_tokens)
        rows = len(sessions) + int(counts.sum()) // 2
        if self.steps % _PROBE_ROUNDS == _PROBE_ROUNDS - 1 and not self.cost.is_known(rows):
            # If smaller steps cost much less than the line through larger ones says, only a smaller one can show it.
            counts = self._best_counts(found, max_rows=rows)
        counts = self._with_fixed_trees(sessions, np.diff(found.starts), counts)
        if self.one_graph:
            counts = np.where(resident_flags(sessions), 0, counts)
        return found.trees(counts)

    def _best_counts(self, found: Candidates, *, max_rows: int) -> Ints:
        choice = choose_counts(
            found.values,
            found.places,
            sessions=len(found.mirrors),
            cost_ns=lambda rows: self.cost.predict_many_ns(rows) + self.pace.overhead_ns,
            max_rows=max_rows,
            fair_slowdown=self._fair_slowdown,
        )
        return choice.counts

    def _with_fixed_trees(self, sessions: Sequence[Session], offered: Ints, counts: Ints) -> Ints:
        """A fixed tree is what sync mode is for: it is submitted whole as long as the step has room for it."""
        group = self.group(sessions)
        if not group.has_sync:
            return counts
        fixed = np.flatnonzero(group.is_sync).tolist()
        counts = counts.copy()
        room = self.limits.max_step_tokens - len(sessions) - int(counts.sum())
        for place in fixed:
            more = int(offered[place] - counts[place])
            if 0 < more <= room:
                counts[place] += more
                room -= more
        return counts

    def submit(self, sessions: Sequence[Session], chosen: Sequence[Tree], *, waited_ns: int) -> Flight:
        """Sends one batch."""
        openings = [self._opening(session) for session in sessions if session.target_id != self.worker_id]
        trees = chosen if isinstance(chosen, Trees) else Trees.of(chosen)
        group = self.group(sessions)
        submissions = Submissions(
            session_ids=group.ids,
            epochs=[session.target_epoch for session in sessions],
            # Their lists may be shorter: tokens are appended when this has left (`VerifyLoop`).
            lengths=group.states.length[group.rows].tolist() if sessions else [],
            trees=trees,
            # A tree that was chosen all the same is a tree as any other.
            resident=(resident_flags(sessions) & (trees.counts == 0)).tolist() if self.one_graph else (),
        )
        now_ns = clock.now_ns()
        result = self.link.submit(submissions, openings=openings)
        if self.suspects:
            first = sessions[0]
            self._probed = (first, len(first.token_ids)) if first.session_id in self.suspects else None
        flight = Flight(
            sessions=group.sessions,
            group=group,
            trees=trees,
            rows=len(sessions) + len(trees.tokens),
            submitted_ns=now_ns,
            is_alone=not self.flights,
            result=result,
            waited_ns=waited_ns,
        )
        for session in sessions:
            _board(session, flight)
        self.flights.append(flight)
        return flight

    def send_ahead(self, sessions: Sequence[Session]) -> Flight:
        """Sends the batch that follows the one in flight."""
        followed, now_ns = self.flights[0], clock.now_ns()
        openings = [self._opening(session) for session in sessions if session.target_id != self.worker_id]
        group = self.group(sessions)
        successor = succeed(
            followed,
            group,
            max_tree_nodes=self.limits.max_tree_nodes,
            max_total_nodes=self._most_together(group),
            least_value=min(1.0, self.pace.rate(len(group)) * self._row_ns),
        )
        step_ns = self.cost.predict_ns(followed.rows)
        flight = Flight(
            sessions=group.sessions,
            group=group,
            trees=Trees.empty(len(group)),
            rows=len(group),
            submitted_ns=clock.now_ns(),
            is_alone=False,
            successor=successor,
            # Not as planned: what kept the loop so long would do so earlier, too.
            lead_ns=self._expected_result_ns(step_ns) - now_ns,
            result=self.link.follow(successor, openings=openings),
        )
        for session in sessions:
            if session.flight is None:
                _board(session, flight)
        self.flights.append(flight)
        return flight

    def _most_together(self, group: Group) -> int:
        """Nodes of all sessions that a step takes, and that slow nobody down too much who has none."""
        roots = len(group)
        most = min(self.limits.max_step_tokens - roots, int(self._most(group.sessions).sum()))
        costs_ns = self.cost.predict_many_ns(roots + np.arange(max(0, most) + 1))
        return int(np.searchsorted(costs_ns, self._fair_slowdown * costs_ns[0], side="right")) - 1

    def begin_next(self, step: Step) -> None:
        """A step has ended and is committed: the batch that follows it, if there is one, runs with what that left."""
        if not self.flights or (successor := self.flights[0].successor) is None:
            return
        flight, group = self.flights[0], successor.group
        sessions = [
            session
            for session, epoch in zip(group.sessions, successor.epochs, strict=True)
            if (session.target_id, session.target_epoch) == (self.worker_id, epoch) and not session.is_finished
        ]
        trees = successor.trees(group.forest, *successor.outcomes(step.result.verdicts))
        flight.begins(trees, sessions=len(sessions), at_ns=step.result_ns)
        for session in sessions:
            if session.flight is None:
                _board(session, flight)

    def _opening(self, session: Session) -> SessionOpening:
        opening = session.opening(max_live_nodes=0)
        session.target_id, session.target_epoch = self.worker_id, opening.epoch
        self.forget_drafted(session)
        return opening

    def forget_drafted(self, session: Session) -> None:
        """What the target has drafted by itself of a session is numbered anew if it ever goes on; the nodes stay."""
        if not session.mirror.is_chain:
            session.mirror.forget_worker(self.worker_id)

    def learn(
        self, flight: Flight, result: VerifyResult, *, emitted: int, result_ns: int, demand: DraftDemand | None = None
    ) -> None:
        """Takes a round's times into the cost model, the rate and the trials; `result_ns`: when its result came."""
        self.steps += 1
        if flight.successor is not None and not emitted:
            # All its sessions had ended with the step before.
            return
        self.cost.observe(result.step_tokens, result.step_ns)
        if flight.successor is not None:
            self.lead.observe(flight.lead_ns, result.ahead_ns)
        # The price of a row, where steps are now; and this step with its nodes and without.
        rows, nodes = flight.rows, len(flight.trees.tokens)
        whole = max(result.step_tokens, rows)
        asked = np.array([rows, rows + _PRICE_ROWS, whole, whole - nodes])
        low_ns, high_ns, whole_ns, bare_ns = self.cost.predict_many_ns(asked).tolist()
        self._row_ns = (high_ns - low_ns) / _PRICE_ROWS
        round_ns = self.pace.observe(flight, result.step_ns, tokens=emitted, result_ns=result_ns)
        if demand is not None:
            between_ns = max(0, round_ns - result.step_ns - flight.waited_ns)
            demand.note_target_round(round_ns=round_ns, plain_ns=result.step_ns * bare_ns / whole_ns + between_ns)
        # Prompts that are computed beside a batch are no way's doing, nor that their sessions emit nothing yet.
        deferred = sum(Verdicts.of(result.verdicts).deferred)
        prompts_ns = max(0.0, result.step_ns * (1 - low_ns / whole_ns))
        # Those that have ended with it are gone by now, and were there.
        placed = max(len(self.sessions), len(flight.sessions))
        sessions = placed - deferred
        self.way.observe(
            placed=placed,
            sessions=sessions,
            verified=len(flight.sessions) - deferred,
            tokens=emitted,
            # Results that were read late may stand closer together than steps do.
            round_ns=max(round_ns - prompts_ns, 0.5 * low_ns),
            hopeless=hopeless_ways(self.way.ways, flight.group, sessions, cost=self.cost, pace=self.pace),
        )


def _board(session: Session, flight: Flight) -> None:
    """The session is in the batch."""
    session.flight = flight
    if session.tap is not None:
        session.tap.note_sent()
