"""Which sessions run where: requests in and out, their places at targets and drafts, and what to do when one is lost.

Every target has a loop of its own (`targets.py`, `verify_loop.py`) that keeps it busy with the sessions placed there.
Drafts are in `drafts.py`; what becomes of a session that a target has lost or refused is in `session_faults.py`.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from outrider.coordinator import clock, draining
from outrider.coordinator.admission import Admission, Occupancy
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.drafts import Drafts
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.messages import GenerationRequest, GrowthBatch, SessionFault, SourceCounts
from outrider.coordinator.poison import DOUBT_S, LossKind, Suspects
from outrider.coordinator.routing import PrefixRouter
from outrider.coordinator.session import Session
from outrider.coordinator.session_faults import SessionFaults
from outrider.coordinator.shared_places import SharedPlaces
from outrider.coordinator.source_mix import by_source
from outrider.coordinator.targets import Targets
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.totals import Totals
from outrider.coordinator.verify_loop import VerifyLoop
from outrider.coordinator.warm_up import warm_up
from outrider.coordinator.weights_gate import WeightsGate
from outrider.errors import (
    InternalError,
    OutriderError,
    PoisonRequest,
    WorkerUnavailable,
)
from outrider.log_output import about
from outrider.v1 import common_pb2, registry_pb2

logger = logging.getLogger(__name__)


class Scheduler:
    """Admits requests, places sessions, and runs one verify loop per target.

    It knows neither gRPC nor protocol buffers nor Ray: links are given to it.

    Args:
        loop_type: of the targets' loops; another one decides otherwise, to be compared.
    """

    def __init__(self, config: CoordinatorConfig, *, loop_type: type[VerifyLoop] = VerifyLoop) -> None:
        self._config = config
        self._session_ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._waiting: deque[Session] = deque()
        self._lanes: dict[str, TargetLane] = {}
        self.totals = Totals()
        self._drafts = Drafts(config, self._sessions, self._lanes, self.totals)
        self._targets = Targets(config, self._lanes, loop_type, self._drafts.peers, self)
        self._faults = SessionFaults(config, self._lanes, self._targets.places, self.totals, self._move)
        warm_up()
        self._forest = Forest()
        self._router = PrefixRouter()
        self._admission = Admission(
            max_queue=config.max_queue, max_wait_s=config.max_queue_wait_s, retry_after_s=config.retry_after_s
        )
        self._suspects = Suspects()
        self.weights = WeightsGate()
        self._drains: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._places_nobody = False
        self._target_deadline: asyncio.TimerHandle | None = None

    # --------------------------------------------------------------------------------------------- requests in and out

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> Generation:
        """Starts a request; `text_streams` has one entry a choice.

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
        self.weights.check(request.weights)
        self.check_room(request.n)
        generation = Generation(request, max_buffered_events=self._config.max_buffered_events, release=self._release)
        try:
            for index, text_stream in enumerate(text_streams):
                session = Session(next(self._session_ids), generation, index, text_stream, self._forest)
                generation.sessions.append(session)
        except InternalError:
            # What was received of a choice has no text: nobody would read the choices before it.
            for session in generation.sessions:
                session.close()
            raise
        for session in generation.sessions:
            self._suspects.recall(session)
            if session.result is None:
                self._sessions[session.session_id] = session
                self._waiting.append(session)
            else:
                session.close()
        self.totals.requests += 1
        self.admit()
        self._expect_target()
        generation.finish_if_done()
        return generation

    def check_room(self, choices: int = 1) -> None:
        """Whether there is room for a request of so many choices; asking costs microseconds, and nothing is kept.

        Raises:
            Overloaded: the queue is full, or the wait too long.
        """
        most = self._config.max_running_sessions
        at_targets = sum(lane.room + len(lane.sessions) for lane in self._lanes.values())
        free = sum(lane.room for lane in self._lanes.values())
        occupancy = Occupancy(
            places=min(at_targets, most) if self._lanes else most,
            free=min(free, most - self.running_sessions),
            waiting=len(self._waiting),
        )
        self._admission.check(choices, occupancy)

    def admit(self) -> None:
        """Places waiting sessions at targets that know how they begin or have least to do, and at drafts."""
        replaced: list[Session] = []
        while self._waiting and self.running_sessions < self._config.max_running_sessions:
            lanes = [lane for lane in self._lanes.values() if lane.has_room]
            if not lanes or (session := self.weights.next_of(self._waiting)) is None:
                break
            if not self.weights.fits(session.generation.weights):
                replaced.append(session)
                continue
            session.generation.weights = self.weights.version or session.generation.weights
            lane = self._router.choose(session.token_ids, lanes)
            session.generation.note_admitted()
            self._admission.note_start(session.session_id)
            session.generation.on_resume = self._notify_all
            session.committed_ns = clock.now_ns()
            lane.place(session)
            logger.debug("session %d goes to %s", session.session_id, lane.worker_id, extra=session.ids)
            self._drafts.assign(session)
            lane.notify()
        if replaced:
            self.end(replaced, self.weights.refusal(replaced[0].generation.weights))
            self.admit()

    def _notify_all(self) -> None:
        for lane in self._lanes.values():
            lane.notify()

    def finish_session(self, session: Session) -> None:
        """The session has emitted its last token."""
        self._release_session(session)
        session.generation.finish_if_done()

    def note_progress(self, sessions: Sequence[Session]) -> None:
        """These sessions have emitted tokens: what went wrong before is no reason to give them up."""
        self._faults.note_progress(sessions)
        if not any(lane.suspects for lane in self._lanes.values()):
            return
        for session in sessions:
            if session.probation:
                self._suspects.note_result(session)
                if not session.probation:
                    for lane in self._lanes.values():
                        lane.suspects.discard(session.session_id)

    def _release(self, generation: Generation) -> None:
        self.totals.serving.note_end(generation)
        if generation.request.spans is not None:
            generation.request.spans.end(generation)
        for session in generation.sessions:
            if session in self._waiting:
                self._waiting.remove(session)
        for session in generation.sessions:
            self._release_session(session)

    def _release_session(self, session: Session) -> None:
        """Frees what a session holds, here and at the workers."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        if not isinstance(session.generation.error, WorkerUnavailable | PoisonRequest):
            self._suspects.forget(session)
        if session.tap is not None:
            session.tap.note_end()
        self._admission.note_end(session.session_id)
        self._faults.forget(session)
        if session in self._waiting:
            self._waiting.remove(session)
        had_draft = self._drafts.let_go(session)
        session.close()
        for lane in self._lanes.values():
            if lane.let_go(session):
                lane.notify()
        if self._places_nobody:
            return
        if had_draft:
            self._drafts.assign_all()
        self.admit()

    def take_fault(self, session: Session, fault: SessionFault) -> None:
        """The target has lost or refused a session."""
        self._faults.take(session, fault)

    # --------------------------------------------------------------------------------------------------------- workers

    def add_target(
        self,
        worker_id: str,
        link: TargetLink,
        limits: registry_pb2.WorkerLimits,
        *,
        on_failure: Callable[[str], None] = lambda reason: None,
        on_hang: Callable[[str], None] = lambda reason: None,
        one_graph: bool = False,
        ahead: bool = False,
    ) -> None:
        """A target worker is ready.

        Args:
            worker_id: of the worker.
            link: to it.
            limits: of it.
            on_failure: called with the reason when its loop fails.
            on_hang: called with the reason when a step of it does not come back.
            one_graph: it drafts in the graph that verifies.
            ahead: it takes a batch before the one before has ended.
        """
        if self._target_deadline is not None:
            self._target_deadline.cancel()
            self._target_deadline = None
        places = SharedPlaces(limits)
        lane = TargetLane(
            worker_id,
            link,
            places.limits,
            fair_slowdown=self._config.fair_slowdown,
            one_graph=one_graph,
            ahead=ahead and self._config.ahead,
            timing=self._config.rounds,
        )

        def fail(reason: str) -> None:
            # The defect is ours.
            self.remove_target(worker_id, reason, kind=LossKind.SILENT)
            on_failure(reason)

        self._targets.add(lane, places, on_failure=fail, on_hang=on_hang)
        self.admit()

    def remove_target(self, worker_id: str, reason: str, *, kind: LossKind = LossKind.BROKEN) -> None:
        """A target worker is gone: its sessions go on elsewhere, or end when there is no other."""
        lane = self._targets.remove(worker_id)
        if lane is None:
            return
        sessions = list(lane.sessions.values())
        for session in sessions:
            lane.forget_drafted(session)
        if not lane.is_draining:
            self._suspects.note_loss(worker_id, [own for own in sessions if own.flight is not None], kind)
        self.totals.serving.failovers += len(sessions)
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
            # Its loop tells clients no more.
            session.deliver()
            logger.debug("session %d has lost its target", session.session_id, extra=session.ids)
            session.flight, session.target_id, session.rests_until_ns = None, None, 0
            self._faults.note_place_lost(session)
            if not session.is_finished:
                self._waiting.appendleft(session)

    def _doubt(self, session: Session) -> None:
        """It crashed two targets, as it seems: it is refused unless one of these turns out to be alive."""

        def decide() -> None:
            if self._suspects.condemns(session):
                session.generation.abort(self._suspects.refusal(session.request))
            elif not session.is_finished:
                self._requeue([session])
                self.admit()
                self._expect_target()

        session.deliver()
        asyncio.get_running_loop().call_later(DOUBT_S, decide)

    def note_return(self, worker_id: str) -> None:
        """A worker registers, perhaps not for the first time."""
        self._suspects.note_return(worker_id)

    def drain_worker(self, worker_id: str, *, on_empty: Callable[[], None]) -> None:
        """A worker wants to go: it gets no new sessions, and `on_empty` is called once none of its own is left."""
        if self._drafts.drain(worker_id):
            on_empty()
        elif (lane := self._lanes.get(worker_id)) is not None:
            lane.is_draining = True
            task = asyncio.create_task(draining.empty(lane, self._lanes, move=self._move), name=f"drain {worker_id}")
            self._drains.add(task)
            task.add_done_callback(self._drains.discard)
            task.add_done_callback(lambda done: None if done.cancelled() else on_empty())
        else:
            # It was told to go before it was connected.
            on_empty()

    def _move(self, lane: TargetLane, sessions: Sequence[Session]) -> None:
        for session in sessions:
            lane.let_go(session)
        self._requeue(sessions)
        self.admit()

    def note_load(self, worker_id: str, load: common_pb2.WorkerLoad) -> None:
        """A worker's heartbeat."""
        if (lane := self._lanes.get(worker_id)) is not None:
            lane.is_preparing = load.preparing
            if self._targets.places[worker_id].hear(load, len(lane.sessions)):
                self.admit()
        else:
            self._drafts.hear(worker_id, load)

    def _expect_target(self) -> None:
        """While there is no target: requests wait as long as is configured for a new one, then end."""
        if not self._lanes and self._waiting and self._target_deadline is None:
            loop = asyncio.get_running_loop()
            self._target_deadline = loop.call_later(self._config.target_wait_s, self._give_up_on_targets)

    def _give_up_on_targets(self) -> None:
        self._target_deadline = None
        if not self._lanes:
            self._end_all(WorkerUnavailable("the last target worker is gone; the tokens delivered stay valid"))

    def _end_all(self, error: OutriderError) -> None:
        """Ends every request."""
        self._waiting.clear()
        self.end(list(self._sessions.values()), error)

    def end(self, sessions: Sequence[Session], error: OutriderError) -> None:
        """Ends requests. Nobody takes over what each frees: looking for takers every time would cost their square."""
        outer, self._places_nobody = self._places_nobody, True
        try:
            for session in sessions:
                session.generation.abort(error)
        finally:
            self._places_nobody = outer

    def add_draft(
        self, worker_id: str, link: DraftLink, limits: registry_pb2.WorkerLimits, *, sources: Iterable[int] = ()
    ) -> None:
        """A draft worker is ready; sessions without one are given to it. `sources` as its introduction has them."""
        self._drafts.add(worker_id, link, limits, sources)

    def remove_draft(self, worker_id: str) -> None:
        """A draft worker is gone: what it has grown stays, its sessions go to another if there is one."""
        self._drafts.remove(worker_id)

    def take_growth(self, worker_id: str, growth: GrowthBatch) -> None:
        """Growth has arrived; it may be late, for sessions that have ended, or of old epochs."""
        self._drafts.take_growth(worker_id, growth)

    def take_draft_error(self, worker_id: str, session_id: int, epoch: int, message: str) -> None:
        """A draft cannot serve a session: it goes on without this draft."""
        self._drafts.take_error(worker_id, session_id, epoch, message)

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def sessions(self) -> Collection[Session]:
        """Those that run or wait, oldest first."""
        return self._sessions.values()

    @property
    def running_sessions(self) -> int:
        """Sessions placed at a target."""
        return sum(len(lane.sessions) for lane in self._lanes.values())

    @property
    def drafts(self) -> Mapping[str, DraftPeer]:
        """By worker id."""
        return self._drafts.peers

    def source_counts(self) -> list[SourceCounts]:
        """What each source of growth has grown since the start, and what became of it."""
        totals = self.totals
        grafted = totals.serving.grown_nodes - totals.dropped_nodes
        return by_source((grafted, totals.drafted_tokens, totals.accepted_tokens), self._forest.mix.totals)

    def speculating_sessions(self) -> tuple[int, int]:
        """Sessions at a target that some draft worker could grow, and those of them that nobody grows.

        Those whose sources a model is not one of count where there is a draft of theirs: another model would not help.
        """
        return self._drafts.speculating()

    @property
    def waiting_requests(self) -> int:
        """Sessions in the queue."""
        return len(self._waiting)

    @property
    def has_target(self) -> bool:
        """Whether a request can be served."""
        return any(not lane.is_draining for lane in self._lanes.values())

    def drain(self) -> None:
        """From now on new requests are refused; those that run go on."""
        self._is_draining = True

    async def stop(self, error: OutriderError) -> None:
        """Ends all requests with `error`, and the loops."""
        self.drain()
        if self._target_deadline is not None:
            self._target_deadline.cancel()
        self._end_all(error)
        tasks = [*self._targets.tasks, *self._drains]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
