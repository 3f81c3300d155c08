"""Scheduling of sessions: admission, places at targets and drafts, recovery from lost workers.

What passes between the workers of a session is in `relay.py`, drafts are in `drafts.py`.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.admission import Admission, Occupancy
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import FaultKind, GenerationRequest, SessionFault
from outrider.coordinator.sessions.poison import DOUBT_S, LossKind, Suspects
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.totals import Totals
from outrider.coordinator.sessions.waiting import WaitingSessions
from outrider.coordinator.workers.drafts import Drafts
from outrider.coordinator.workers.links import TargetLink
from outrider.coordinator.workers.relay import Relay
from outrider.coordinator.workers.routing import PrefixRouter
from outrider.coordinator.workers.shared_places import SharedPlaces
from outrider.coordinator.workers.target_peer import TargetPeer
from outrider.errors import (
    FieldViolation,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PoisonRequest,
    WeightsReplaced,
    WorkerUnavailable,
)
from outrider.roles.log_output import about
from outrider.v1 import common_pb2, registry_pb2

logger = logging.getLogger(__name__)

# A worker's error of a session (a lost state, say) is answered by opening it anew; the same again is given up.
_MAX_REOPENINGS = 2
# How long a session that a full target turned away waits before it asks again.
_NO_ROOM_PAUSE_S = 0.05
# Longest that a choice waits for KV memory at targets that serve nobody else.
_ROOM_WAIT_S = 5.0


class WeightsGate:
    """Gate between requests and weights: versions in use, and requests that wait for a reload.

    A request is of the weights that the service runs with when it is placed at a target; from then on, wherever it goes
    on, it has to find the same. While the gate is held nothing is placed but what has begun: a request whose other
    choices run, or one that has lost its target.

    Attributes:
        version: that the targets run with; empty while nobody knows.
    """

    def __init__(self) -> None:
        self.version = ""
        self.is_held = False

    def fits(self, weights: str) -> bool:
        """True if a session that began with these weights may go on."""
        return not weights or not self.version or weights == self.version

    def refusal(self, weights: str) -> WeightsReplaced:
        """The message to a client whose session began with these weights."""
        return WeightsReplaced(
            f"weights were replaced: the service runs with {self.version}, and the request began with {weights}; the "
            "tokens delivered stay valid, ask anew for an answer of the new ones"
        )


class Scheduler:
    """Admits requests, places sessions at targets and drafts, and moves those whose worker is gone.

    It knows neither gRPC nor Ray: links are given to it.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._session_ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._waiting = WaitingSessions()
        self._targets: dict[str, TargetPeer] = {}
        self.totals = Totals()
        self.drafts = Drafts(config, self._sessions, self._targets)
        # pyright resolves the package's link: to it this file's class and the one imported by name are two.
        own: Any = self
        self.relay = Relay(self._sessions, self._targets, self.drafts, self.totals, own)
        self._router = PrefixRouter()
        self._admission = Admission(
            max_queue=config.max_queue, max_wait_s=config.max_queue_wait_s, retry_after_s=config.retry_after_s
        )
        self._suspects = Suspects()
        self.weights = WeightsGate()
        # By worker id, what is called once a target that drains is empty.
        self._drains: dict[str, Callable[[], None]] = {}
        self._is_draining = False
        self._places_nobody = False
        self._target_deadline: asyncio.TimerHandle | None = None

    # --------------------------------------------------------------------------------------------- requests in and out

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> Generation:
        """Start a request; `text_streams` has one entry a choice.

        Raises:
            Overloaded: the queue is full, or the wait too long.
            WorkerUnavailable: there is no target worker.
            PoisonRequest: targets have crashed of it.
            WeightsReplaced: it goes on where another ended, whose weights are gone.
            InternalError: what was received of a choice cannot be turned into text.
        """
        if self._is_draining:
            raise WorkerUnavailable("the coordinator is shutting down; try another one")
        if not self.has_target and not self._config.target_wait_s:
            raise WorkerUnavailable("no target worker is registered; start one, then try again")
        self._suspects.check(request)
        if not self.weights.fits(request.weights):
            raise self.weights.refusal(request.weights)
        self.check_room(request.n, entry=request.entry)
        generation = Generation(request, max_unread_rounds=self._config.max_buffered_events, release=self._release)
        for index, text_stream in enumerate(text_streams):
            generation.sessions.append(Session(next(self._session_ids), generation, index, text_stream))
        for session in generation.sessions:
            self._suspects.recall(session)
            if session.result is None:
                self._sessions[session.session_id] = session
                self._waiting.append(session)
        self.totals.requests += 1
        self.admit()
        self._expect_target()
        generation.finish_if_done()
        return generation

    def check_room(self, choices: int = 1, *, entry: str = "") -> None:
        """Look for room for a request of so many choices; that costs microseconds, and nothing is kept.

        Args:
            entry: its entry in the queue, which it may have already; empty for a new one.

        Raises:
            Overloaded: the queue is full, or the wait too long.
        """
        most = self._config.max_running_sessions
        at_targets = sum(target.room + len(target.sessions) for target in self._targets.values())
        free = sum(target.room for target in self._targets.values())
        occupancy = Occupancy(
            places=min(at_targets, most) if self._targets else most,
            free=min(free, most - self.running_sessions),
            waiting=len(self._waiting),
            entries=self._waiting.entries,
            tokens=self._waiting.tokens,
        )
        if not self._waiting.has_entry(entry):
            self._admission.check(choices, occupancy)

    def admit(self) -> None:
        """Place waiting sessions at targets that know how they begin or have least to do, and at drafts."""
        replaced: list[Session] = []
        while self._waiting and self.running_sessions < self._config.max_running_sessions:
            targets = [target for target in self._targets.values() if target.room]
            if not targets or (session := self._waiting.next(has_begun=self.weights.is_held)) is None:
                break
            if not self.weights.fits(session.generation.weights):
                replaced.append(session)
                continue
            session.generation.weights = self.weights.version or session.generation.weights
            target = self._router.choose(session.token_ids, targets)
            times = session.generation.times
            times.admitted_ns = times.admitted_ns or clock.now_ns()
            self._admission.note_start(session.session_id)
            session.generation.on_awaited = functools.partial(self.relay.serve_reader, session.generation)
            session.committed_ns = session.committed_ns or clock.now_ns()
            logger.debug("session %d goes to %s", session.session_id, target.worker_id, extra=session.ids)
            target.sessions[session.session_id] = session
            self._open(session)
            self.drafts.assign(session)
        if replaced:
            self.end(replaced, self.weights.refusal(replaced[0].generation.weights))
            self.admit()
        self._empty_draining()

    def _empty_draining(self) -> None:
        """Give sessions of targets that are to go the room that is left elsewhere."""
        room = sum(target.room for target in self._targets.values()) if self._drains else 0
        leaving = [target for worker_id in self._drains if (target := self._targets[worker_id]).sessions]
        if room and leaving:
            self._move(leaving[0], list(leaving[0].sessions.values())[:room])
            self._note_left(leaving[0])

    def _open(self, session: Session) -> None:
        """Open a session at the target that has its place; its drafts send their trees there."""
        target = self._target_with(session)
        assert target is not None
        target.open(session, sync_wait_ms=self._config.sync_wait_cap_ms)
        if session.generation.is_stalled:
            target.hold(session, is_held=True)
        self.drafts.ask_all_again(session)

    def finish_session(self, session: Session) -> None:
        """Finish a session that has emitted its last token."""
        self._release_session(session)
        session.generation.finish_if_done()

    def note_progress(self, sessions: Sequence[Session]) -> None:
        """Note that sessions have emitted tokens: earlier faults are no reason to give them up."""
        for session in sessions:
            session.reopenings, session.without_room_since_ns = 0, None
            if session.probation:
                self._suspects.note_result(session)
                if not session.probation and (target := self._targets.get(session.target_id or "")) is not None:
                    target.clear(session)

    def _release(self, generation: Generation) -> None:
        self.totals.note_end(generation)
        self.relay.forget(generation)
        if generation.request.spans is not None:
            generation.request.spans.end(generation)
        for session in generation.sessions:
            self._waiting.remove(session)
        for session in generation.sessions:
            self._release_session(session)

    def _release_session(self, session: Session) -> None:
        """Free what a session holds, here and at the workers."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        if not isinstance(session.generation.error, WorkerUnavailable | PoisonRequest):
            self._suspects.forget(session)
        if session.tap is not None:
            session.tap.note_end()
        self._admission.note_end(session.session_id)
        self._waiting.remove(session)
        for target in list(self._targets.values()):
            if target.let_go(session):
                self._note_left(target)
        # Behind the targets: where nobody verifies it, nobody needs to hear that its drafts leave.
        had_draft = self.drafts.let_go(session)
        if self._places_nobody:
            return
        if had_draft:
            self.drafts.assign_all()
        self.admit()

    # ---------------------------------------------------------------------------------------------------------- faults

    def take_fault(self, session: Session, fault: SessionFault) -> None:
        """Handle a session that a target has lost or refused; its faults are forgotten once it emits tokens again."""
        if (target := self._targets.get(session.target_id or "")) is not None:
            target.lose(session)
        match fault.kind:
            case FaultKind.REFUSED:
                session.generation.abort(InvalidRequest([FieldViolation("request", fault.message)]))
            case FaultKind.REPLACED:
                session.generation.abort(WeightsReplaced(f"{fault.message}; the tokens delivered stay valid"))
            case FaultKind.NO_ROOM:
                self._wait_for_room(session, fault.message)
            case FaultKind.LOST:
                self._open_anew(session, fault.message)

    def _open_anew(self, session: Session, reason: str) -> None:
        """Reopen a session, unless reopening has failed before."""
        session.reopenings += 1
        if session.reopenings > _MAX_REOPENINGS:
            message = f"the target worker cannot serve this request: {reason}"
            session.generation.abort(WorkerUnavailable(message))
            return
        self.totals.reopened += 1
        logger.warning("session %d is opened anew: %s", session.session_id, reason, extra=session.ids)
        self._open(session)

    def _wait_for_room(self, session: Session, reason: str) -> None:
        """Let a session rest while its target is full with others' sessions, then ask this or another target again."""
        targets = self._targets.values()
        others = any(
            target.places.has_others or any(held is not session for held in target.sessions.values())
            for target in targets
        )
        now_ns = clock.now_ns()
        since_ns = session.without_room_since_ns = session.without_room_since_ns or now_ns
        if now_ns - since_ns > _ROOM_WAIT_S * 1e9 and not others:
            session.generation.abort(Overloaded(reason, retry_after_s=self._config.retry_after_s))
            return
        target = self._target_with(session)
        if target is not None and target.places.is_shared:
            # Other coordinators' sessions have the room.
            is_borrowed = target.places.note_refusal(len(target.sessions) - 1)
            if is_borrowed or any(other.room for other in targets):
                self._move(target, [session])
                session.without_room_since_ns = since_ns
                return
        asyncio.get_running_loop().call_later(_NO_ROOM_PAUSE_S, self._ask_for_room, session)

    def _ask_for_room(self, session: Session) -> None:
        if self._target_with(session) is not None and session.target_id is None and not session.is_finished:
            self._open(session)

    def _target_with(self, session: Session) -> TargetPeer | None:
        """The target at which a session has its place, whether it is open there or not."""
        return next((target for target in self._targets.values() if session.session_id in target.sessions), None)

    # --------------------------------------------------------------------------------------------------------- workers

    def add_target(self, worker_id: str, link: TargetLink, limits: registry_pb2.WorkerLimits) -> None:
        """Add a target worker that is ready."""
        if self._target_deadline is not None:
            self._target_deadline.cancel()
            self._target_deadline = None
        self._targets[worker_id] = TargetPeer(worker_id=worker_id, link=link, places=SharedPlaces(limits.max_sessions))
        self.admit()

    def remove_target(self, worker_id: str, reason: str, *, kind: LossKind = LossKind.BROKEN) -> None:
        """Remove a lost target worker: its sessions go on elsewhere, or end when there is no other."""
        target = self._targets.pop(worker_id, None)
        if target is None:
            return
        if (on_empty := self._drains.pop(worker_id, None)) is not None:
            on_empty()
        sessions = list(target.sessions.values())
        if not target.is_draining:
            self._suspects.note_loss(worker_id, target.blamed, kind)
        self.totals.failovers += len(sessions)
        self._requeue([session for session in sessions if not self._suspects.condemns(session)])
        for session in sessions:
            if self._suspects.condemns(session):
                self._doubt(session)
        logger.warning("target %s is gone: %s", worker_id, reason, extra=about(worker_id=worker_id))
        self.admit()
        self._expect_target()

    def _requeue(self, sessions: Sequence[Session]) -> None:
        """Sessions whose target is gone, or not theirs any more, come first in the queue, as old as they are."""
        for session in reversed(sessions):
            session.deliver()
            logger.debug("session %d has lost its target", session.session_id, extra=session.ids)
            session.target_id = None
            # Whom its target had no room for has not asked another one yet.
            session.without_room_since_ns = None
            if session.result is not None:
                self.finish_session(session)
            elif not session.is_finished:
                self._waiting.put_first(session)

    def _doubt(self, session: Session) -> None:
        """Refuse a request suspected of two crashes, unless one of the targets turns out to be alive."""

        def decide() -> None:
            if self._suspects.condemns(session):
                session.generation.abort(self._suspects.refusal(session.request))
            elif not session.is_finished:
                self._requeue([session])
                self.admit()
                self._expect_target()

        session.deliver()
        session.target_id = None
        asyncio.get_running_loop().call_later(DOUBT_S, decide)

    def note_return(self, worker_id: str) -> None:
        """A worker registers, perhaps not for the first time."""
        self._suspects.note_return(worker_id)

    def drain_worker(self, worker_id: str, *, on_empty: Callable[[], None]) -> None:
        """A worker wants to go: it gets no new sessions, and `on_empty` is called once none of its own is left."""
        if self.drafts.drain(worker_id):
            on_empty()
        elif (target := self._targets.get(worker_id)) is not None:
            target.is_draining = True
            self._drains[worker_id] = on_empty
            self.admit()
            self._note_left(target)
        else:
            # It was told to go before it was connected.
            on_empty()

    def _note_left(self, target: TargetPeer) -> None:
        """Note that a session has left a target, which may be empty now."""
        if not target.sessions and (on_empty := self._drains.pop(target.worker_id, None)) is not None:
            on_empty()

    def _move(self, target: TargetPeer, sessions: Sequence[Session]) -> None:
        for session in sessions:
            target.let_go(session)
        self._requeue(sessions)
        self.admit()

    def note_load(self, worker_id: str, load: common_pb2.WorkerLoad) -> None:
        """A worker's heartbeat."""
        if (target := self._targets.get(worker_id)) is not None:
            if target.places.hear(load, len(target.sessions)):
                self.admit()
        else:
            self.drafts.hear(worker_id, load)

    def _expect_target(self) -> None:
        """Let requests wait for a new target as long as is configured, while there is none; then end them."""
        if not self._targets and self._waiting and self._target_deadline is None:
            loop = asyncio.get_running_loop()
            self._target_deadline = loop.call_later(self._config.target_wait_s, self._give_up_on_targets)

    def _give_up_on_targets(self) -> None:
        self._target_deadline = None
        if not self._targets:
            self._end_all(WorkerUnavailable("the last target worker is gone; the tokens delivered stay valid"))

    def _end_all(self, error: OutriderError) -> None:
        """End every request."""
        self._waiting.clear()
        self.end(list(self._sessions.values()), error)

    def end(self, sessions: Sequence[Session], error: OutriderError) -> None:
        """End requests. Nobody takes over what each frees: looking for takers every time would cost their square."""
        outer, self._places_nobody = self._places_nobody, True
        try:
            for session in sessions:
                session.generation.abort(error)
        finally:
            self._places_nobody = outer

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def sessions(self) -> Collection[Session]:
        """Running and waiting sessions, oldest first."""
        return self._sessions.values()

    @property
    def running_sessions(self) -> int:
        """Sessions placed at a target."""
        return sum(len(target.sessions) for target in self._targets.values())

    @property
    def waiting_requests(self) -> int:
        """Sessions in the queue."""
        return len(self._waiting)

    @property
    def has_target(self) -> bool:
        """True if a request can be served."""
        return any(not target.is_draining for target in self._targets.values())

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._is_draining = True

    def stop(self, error: OutriderError) -> None:
        """End all requests with `error`."""
        self.drain()
        if self._target_deadline is not None:
            self._target_deadline.cancel()
        self._end_all(error)
