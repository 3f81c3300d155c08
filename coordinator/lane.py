"""One target worker as the scheduler sees it: its link, its sessions, its batches in flight, what its steps cost."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from outrider.coordinator import clock
from outrider.coordinator.ahead import Lead
from outrider.coordinator.alarm import Alarm
from outrider.coordinator.config import RoundTiming
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.draft_demand import DraftDemand
from outrider.coordinator.firing import MissRates
from outrider.coordinator.group import Group
from outrider.coordinator.hopeless_ways import hopeless_ways
from outrider.coordinator.links import TargetLink
from outrider.coordinator.messages import SessionOpening, VerifyResult
from outrider.coordinator.one_graph import resident_flags
from outrider.coordinator.rounds import Flight, RoundPace, Step, Way, ways_of
from outrider.coordinator.session import Session
from outrider.coordinator.successor import can_follow, succeed
from outrider.coordinator.tree_choice import TreeChoice
from outrider.coordinator.trees import Submissions, Tree, Trees
from outrider.coordinator.trials import Trials
from outrider.coordinator.verdicts import Verdicts
from outrider.v1 import registry_pb2

# What was added to a batch that lies at the target is followed by so many times the time that it took, at least: growth
# comes more often than it could all be sent on beside whatever else there is to do.
_EXTENSION_PAUSE = 4
# A batch leaves so much of a step before it could begin, lest the target wait for it.
_EARLY_SHARE = 0.1


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
        self._sampled: set[int] = set()
        """Of its sessions, those at a temperature above 0."""
        self._probed: tuple[Session, int] | None = None
        self.applied_result_ns = 0
        """When the last result was applied; `learn` hears of it later."""
        self._extends_ns = 0
        """When something may be added again to a batch that lies at the target."""
        self.cost = StepCost()
        self.pace = RoundPace()
        self.misses = MissRates()
        self.trees = TreeChoice(
            limits, self.cost, self.pace, self.misses, fair_slowdown=fair_slowdown, one_graph=one_graph
        )
        self.lead = Lead()
        self.way = Trials(ways_of(timing, ahead=ahead))
        self.is_draining = False
        """It takes no new sessions."""
        self.is_preparing = False
        """Its last heartbeat said that what it runs may be compiling."""
        self._groups: list[Group] = []
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
        if _is_sampled(session):
            self._sampled.add(session.session_id)
        if session.probation:
            self.suspects.add(session.session_id)

    def let_go(self, session: Session) -> bool:
        """Takes its place away, and closes it at the worker; whether it had one."""
        self.suspects.discard(session.session_id)
        self._sampled.discard(session.session_id)
        if self.sessions.pop(session.session_id, None) is None:
            return False
        self._groups = []
        self.trees.forget_offer()
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
            early_ns = self.lead.ns(step_ns=step_ns, overhead_ns=overhead_ns)
        else:
            early_ns = overhead_ns + _EARLY_SHARE * step_ns
        return self._expected_result_ns(self.flights[-1], step_ns) - early_ns - now_ns

    def _expected_result_ns(self, flight: Flight, step_ns: float) -> float:
        """When a batch is answered, if its step takes so long; the one before it has been."""
        # A successor lies there when the step before it ends, or soon after.
        came_ns = 0.0 if flight.successor is not None else flight.submitted_ns + self.pace.overhead_ns
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
            max_total_nodes=self.trees.most_together(group),
            least_value=min(1.0, self.trees.price(len(group))),
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
            lead_ns=self._expected_result_ns(followed, step_ns) - now_ns,
            result=self.link.follow(successor, openings=openings),
        )
        for session in sessions:
            if session.flight is None:
                _board(session, flight)
        self.flights.append(flight)
        return flight

    def extend_ahead(self) -> None:
        """Growth has come: what a batch that lies at the target lacks of it is sent behind it, if there is time."""
        if len(self.flights) < 2 or (successor := self.flights[1].successor) is None or self.flights[0].result.done():
            return
        began_ns = clock.now_ns()
        if began_ns < self._extends_ns:
            return
        if (more := successor.grow(self.flights[0])) is not None:
            self.link.extend(more)
            now_ns = clock.now_ns()
            self._extends_ns = now_ns + _EXTENSION_PAUSE * (now_ns - began_ns)

    def begin_next(self, step: Step) -> None:
        """A step has ended and is committed: the batch that follows it, if there is one, runs with what that left."""
        if not self.flights:
            if self.way.current == Way.AHEAD:
                self._note_early(step)
            return
        flight = self.flights[0]
        if (successor := flight.successor) is None:
            return
        group = successor.group
        sessions = [
            session
            for session, epoch in zip(group.sessions, successor.epochs, strict=True)
            if (session.target_id, session.target_epoch) == (self.worker_id, epoch) and not session.is_finished
        ]
        ends, tokens = successor.outcomes(step.result.verdicts)
        additions = step.result.additions
        trees = successor.trees(group.forest, ends, tokens, additions)
        flight.begins(trees, sessions=len(sessions), at_ns=step.result_ns, additions=additions)
        for session in sessions:
            if session.flight is None:
                _board(session, flight)

    def _note_early(self, step: Step) -> None:
        """Nothing followed a step: where its result came before a batch was to leave, such have to leave sooner."""
        step_ns = self.cost.predict_ns(step.flight.rows)
        early_ns = self._expected_result_ns(step.flight, step_ns) - step.result_ns
        if early_ns > self.lead.ns(step_ns=step_ns, overhead_ns=self.pace.overhead_ns):
            self.lead.observe(early_ns, 0)

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
        if flight.successor is not None and not emitted:
            # All its sessions had ended with the step before.
            return
        self.cost.observe(result.step_tokens, result.step_ns)
        if flight.successor is not None:
            self.lead.observe(flight.lead_ns, result.ahead_ns)
        prices = self.trees.learn(rows=flight.rows, nodes=len(flight.trees.tokens), step_tokens=result.step_tokens)
        round_ns = self.pace.observe(flight, result.step_ns, tokens=emitted, result_ns=result_ns)
        if demand is not None:
            between_ns = max(0, round_ns - result.step_ns - flight.waited_ns)
            demand.note_target_round(
                round_ns=round_ns, plain_ns=result.step_ns * prices.bare_ns / prices.whole_ns + between_ns
            )
        # Prompts that are computed beside a batch are no way's doing, nor that their sessions emit nothing yet.
        deferred = sum(Verdicts.of(result.verdicts).deferred)
        prompts_ns = max(0.0, result.step_ns * (1 - prices.rows_ns / prices.whole_ns))
        placed, sampled = len(self.sessions), len(self._sampled)
        if placed < len(flight.sessions):
            # Those that have ended with it are gone by now, and were there.
            placed, sampled = len(flight.sessions), sum(map(_is_sampled, flight.sessions))
        sessions = placed - deferred
        self.way.observe(
            placed=placed,
            sampled=sampled,
            sessions=sessions,
            verified=len(flight.sessions) - deferred,
            tokens=emitted,
            # Results that were read late may stand closer together than steps do.
            round_ns=max(round_ns - prompts_ns, 0.5 * prices.rows_ns),
            hopeless=hopeless_ways(self.way.ways, flight.group, sessions, cost=self.cost, pace=self.pace),
        )


def _is_sampled(session: Session) -> bool:
    return session.sampling.temperature > 0


def _board(session: Session, flight: Flight) -> None:
    """The session is in the batch."""
    session.flight = flight
    if session.tap is not None:
        session.tap.note_sent()
