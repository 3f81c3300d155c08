"""The heart of the coordinator: which sessions run where, and the loop that keeps every target busy.

    loop of a target:  runnable sessions -> wait for growth while that pays -> choose nodes -> verify -> commit

Growth arrives on its own (`take_growth`), commits leave for the drafts without an answer, so drafting overlaps
verification and a slow, dead or absent draft costs speed and nothing else.
"""

import asyncio
import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.firing import GrowthForecast, Latency, leaf_gain, patience_ns
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.messages import (
    Commit,
    FaultKind,
    GenerationRequest,
    Growth,
    SessionFault,
    SessionVerdict,
    SpeculationMode,
    VerifyResult,
)
from outrider.coordinator.session import Generation, Session
from outrider.coordinator.text_stream import TextStream
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, Overloaded, WorkerUnavailable
from outrider.v1 import registry_pb2

logger = logging.getLogger(__name__)

# A worker's error of a session (a lost state, say) is answered by opening it anew; the same again is given up.
MAX_REOPENINGS = 2
_DEFERRED_PAUSE_S = 0.005
# How long a session that a full target turned away waits before it asks again.
_NO_ROOM_PAUSE_NS = 50_000_000
# A draft that has answered none of a session's last commits is waited for at every so many of them only.
_RETRY_COMMITS = 8


@dataclass(kw_only=True)
class DraftPeer:
    """A draft worker as the scheduler sees it.

    Attributes:
        response: from a commit to the first growth that knows of it.
    """

    worker_id: str
    link: DraftLink
    limits: registry_pb2.WorkerLimits
    sessions: set[int] = field(default_factory=set)
    last_growth_ns: int = 0
    response: Latency = field(default_factory=Latency)


@dataclass(kw_only=True)
class Totals:
    """Counters since start."""

    requests: int = 0
    emitted_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    dropped_nodes: int = 0
    steps: int = 0


class Scheduler:
    """Admits requests, places sessions, and runs one verify loop per target.

    It knows neither gRPC nor protocol buffers nor Ray: links are given to it.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._session_ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._waiting: deque[Session] = deque()
        self._lanes: dict[str, TargetLane] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._drafts: dict[str, DraftPeer] = {}
        self._reopenings: dict[int, int] = {}
        self._without_room_since: dict[int, int] = {}
        self._is_draining = False
        self._target_deadline: asyncio.TimerHandle | None = None
        self.totals = Totals()

    # ------------------------------------------------------------------------------------------------- the verify loop

    async def _verify_rounds(self, lane: TargetLane) -> None:
        while True:
            sessions = lane.runnable()
            if not sessions:
                await lane.change()
                continue
            waited_ns = await self._wait_for_growth(lane)
            sessions = self._ready(lane)
            if not sessions:
                continue
            try:
                result = await lane.submit(sessions, waited_ns=waited_ns)
            except WorkerUnavailable as error:
                self.remove_target(lane.worker_id, str(error))
                return
            self._apply(lane, result)
            if not result.step_tokens:
                # All deferred and nothing computed: the target has no room, asking again at once would only spin.
                await asyncio.sleep(_DEFERRED_PAUSE_S)

    async def _wait_for_growth(self, lane: TargetLane) -> int:
        """Holds the round while more growth is worth more than it costs; returns the nanoseconds held."""
        began_ns = time.monotonic_ns()
        while (patience := self._patience_ns(lane, time.monotonic_ns() - began_ns)) > 0:
            if not await lane.change(timeout_s=patience / 1e9):
                break
        return time.monotonic_ns() - began_ns

    def _patience_ns(self, lane: TargetLane, waited_ns: int) -> float:
        sessions = lane.runnable()
        if sessions and all(session.mode is SpeculationMode.SYNC for session in sessions):
            return max(self._sync_wait_left_ns(session) for session in sessions)
        now_ns = time.monotonic_ns()
        outlooks = [
            (gain, forecast)
            for session in sessions
            if session.mode is SpeculationMode.ASYNC
            and (forecast := self._forecast(session)) is not None
            and (gain := self._gain(lane, session)) > 0
        ]
        left_ns = self._config.verify_wait_cap_ms * 1e6 - waited_ns
        return patience_ns(outlooks, rate=lane.rate, now_ns=now_ns, left_ns=left_ns)

    def _gain(self, lane: TargetLane, session: Session) -> float:
        room = session.sampling.max_new_tokens - session.output_length - 1
        depth = min(session.request.max_depth, room)
        return leaf_gain(session.mirror.tree.root, session.candidates(lane.limits.max_tree_nodes), max_depth=depth)

    def _forecast(self, session: Session) -> GrowthForecast | None:
        peers = [peer for worker_id in session.draft_epochs if (peer := self._drafts.get(worker_id)) is not None]
        if not peers or (session.unanswered_commits > 1 and session.unanswered_commits % _RETRY_COMMITS):
            return None
        peer = max(peers, key=lambda peer: peer.last_growth_ns)
        if session.unanswered_commits and not session.mirror.root_was_drafted:
            return GrowthForecast(since_ns=session.committed_ns, latency=peer.response)
        # The step that the draft is in expands the root, most likely, although it does not know yet that it is one.
        return GrowthForecast(since_ns=peer.last_growth_ns, latency=peer.link.step_latency)

    def _awaits_tree(self, session: Session) -> bool:
        """Whether a `sync` session's tree of this round is still growing, and is worth waiting for."""
        return self._sync_wait_left_ns(session) > 0

    def _sync_wait_left_ns(self, session: Session) -> float:
        if session.mode is not SpeculationMode.SYNC or not session.draft_epochs or session.mirror.is_complete:
            return 0.0
        if session.sampling.max_new_tokens - session.output_length <= 1:
            return 0.0
        waited_ns = time.monotonic_ns() - session.committed_ns
        return max(0.0, self._config.sync_wait_cap_ms * 1e6 - waited_ns)

    def _ready(self, lane: TargetLane) -> list[Session]:
        """The sessions of this round: while others can run, those whose fixed tree is still growing stay out of it."""
        sessions = lane.runnable()
        ready = [session for session in sessions if not self._awaits_tree(session)]
        return ready or sessions

    def _apply(self, lane: TargetLane, result: VerifyResult) -> None:
        """Commits a step's verdicts: drafts first, since they are what the next round waits for."""
        in_flight = {session.session_id: session for session in lane.in_flight}
        lane.in_flight = []
        emitted = 0
        for verdict in result.verdicts:
            session = in_flight.get(verdict.session_id)
            if session is None or session.is_finished or verdict.epoch != session.target_epoch:
                continue
            if verdict.fault is not None:
                self._take_fault(session, verdict.fault)
            elif verdict.deferred:
                session.submission = None
            else:
                emitted += self._commit(session, verdict, result)
        lane.learn(result, emitted=emitted)
        self.totals.steps += 1

    def _commit(self, session: Session, verdict: SessionVerdict, result: VerifyResult) -> int:
        position = len(session.token_ids)
        assert session.submission is not None
        drafted = len(session.submission.nodes)
        token_ids = session.commit(verdict, result)
        self._reopenings.pop(session.session_id, None)
        self._without_room_since.pop(session.session_id, None)
        self.totals.verify_steps += 1
        self.totals.drafted_tokens += drafted
        self.totals.accepted_tokens += min(len(verdict.accepted_nodes), len(token_ids))
        self.totals.emitted_tokens += len(token_ids)
        if session.is_finished:
            self._release_session(session)
            session.generation.finish_if_done()
            return len(token_ids)
        for worker_id, epoch in session.draft_epochs.items():
            commit = Commit(session_id=session.session_id, epoch=epoch, position=position, token_ids=token_ids)
            self._drafts[worker_id].link.commit(commit)
            session.unanswered_commits += 1
        return len(token_ids)

    # --------------------------------------------------------------------------------------------- requests in and out

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> Generation:
        """Starts a request; `text_streams` has one entry a choice.

        Raises:
            Overloaded: the queue is full.
            WorkerUnavailable: there is no target worker.
        """
        if self._is_draining:
            raise WorkerUnavailable("the coordinator is shutting down; try another one")
        if not self._lanes and not self._config.target_wait_s:
            raise WorkerUnavailable("no target worker is registered; start one, then try again")
        if len(self._waiting) + request.n > self._config.max_queue + self._room():
            message = f"the queue of {self._config.max_queue} requests is full; try again later"
            raise Overloaded(message, retry_after_s=self._config.retry_after_s)
        generation = Generation(request, max_buffered_events=self._config.max_buffered_events, release=self._release)
        for index, text_stream in enumerate(text_streams):
            session = Session(next(self._session_ids), generation, index, text_stream)
            generation.sessions.append(session)
            if session.result is None:
                self._sessions[session.session_id] = session
                self._waiting.append(session)
        self.totals.requests += 1
        self._admit()
        self._expect_target()
        generation.finish_if_done()
        return generation

    def _room(self) -> int:
        at_targets = sum(max(0, lane.limits.max_sessions - len(lane.sessions)) for lane in self._lanes.values())
        return min(at_targets, self._config.max_running_sessions - self.running_sessions)

    def _admit(self) -> None:
        """Places waiting sessions at the least loaded target, and at a draft."""
        while self._waiting and self.running_sessions < self._config.max_running_sessions:
            lanes = [lane for lane in self._lanes.values() if lane.has_room]
            if not lanes:
                return
            lane = min(lanes, key=lambda lane: len(lane.sessions))
            session = self._waiting.popleft()
            session.generation.note_admitted()
            session.generation.on_resume = self._notify_all
            session.committed_ns = time.monotonic_ns()
            lane.sessions[session.session_id] = session
            self._assign_draft(session)
            lane.notify()

    def _notify_all(self) -> None:
        for lane in self._lanes.values():
            lane.notify()

    def _assign_draft(self, session: Session) -> None:
        if session.mode is SpeculationMode.OFF or session.draft_epochs:
            return
        peers = [
            peer
            for worker_id, peer in self._drafts.items()
            if worker_id not in session.refused_by and len(peer.sessions) < peer.limits.max_sessions
        ]
        if not peers:
            return
        peer = min(peers, key=lambda peer: len(peer.sessions))
        opening = session.opening(max_live_nodes=self._config.max_live_nodes)
        session.draft_epochs[peer.worker_id] = opening.epoch
        peer.sessions.add(session.session_id)
        peer.link.open_session(opening)

    def _assign_drafts(self) -> None:
        """Gives a draft to the sessions that have none, as far as there is room."""
        for lane in self._lanes.values():
            for session in lane.sessions.values():
                self._assign_draft(session)

    def _release(self, generation: Generation) -> None:
        for session in generation.sessions:
            if session in self._waiting:
                self._waiting.remove(session)
        for session in generation.sessions:
            self._release_session(session)

    def _release_session(self, session: Session) -> None:
        """Frees what a session holds, here and at the workers."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        self._reopenings.pop(session.session_id, None)
        self._without_room_since.pop(session.session_id, None)
        if session in self._waiting:
            self._waiting.remove(session)
        for worker_id, epoch in session.draft_epochs.items():
            peer = self._drafts[worker_id]
            peer.sessions.discard(session.session_id)
            peer.link.close_session(session.session_id, epoch)
        had_draft = bool(session.draft_epochs)
        session.draft_epochs.clear()
        for lane in self._lanes.values():
            if lane.sessions.pop(session.session_id, None) is not None:
                if session.target_id == lane.worker_id:
                    lane.link.close_session(session.session_id, session.target_epoch)
                lane.notify()
        if had_draft:
            self._assign_drafts()
        self._admit()

    def _take_fault(self, session: Session, fault: SessionFault) -> None:
        """A worker has lost or refused a session."""
        session.submission, session.target_id = None, None
        if fault.kind is FaultKind.REFUSED:
            session.generation.abort(InvalidRequest([FieldViolation("request", fault.message)]))
        elif fault.kind is FaultKind.NO_ROOM:
            self._wait_for_room(session, fault.message)
        else:
            count = self._reopenings[session.session_id] = self._reopenings.get(session.session_id, 0) + 1
            if count > MAX_REOPENINGS:
                message = f"the target worker cannot serve this request: {fault.message}"
                session.generation.abort(WorkerUnavailable(message))
                return
            logger.warning("session %d is opened anew: %s", session.session_id, fault.message)

    def _wait_for_room(self, session: Session, reason: str) -> None:
        """The target is full with others' sessions: this one rests for a moment, then asks again."""
        others = any(held is not session for lane in self._lanes.values() for held in lane.sessions.values())
        now_ns = time.monotonic_ns()
        since_ns = self._without_room_since.setdefault(session.session_id, now_ns)
        if now_ns - since_ns > self._config.room_wait_s * 1e9 and not others:
            session.generation.abort(Overloaded(reason, retry_after_s=self._config.retry_after_s))
            return
        session.rests_until_ns = now_ns + _NO_ROOM_PAUSE_NS
        loop = asyncio.get_running_loop()
        for lane in self._lanes.values():
            if session.session_id in lane.sessions:
                loop.call_later(_NO_ROOM_PAUSE_NS / 1e9, lane.notify)

    # --------------------------------------------------------------------------------------------------------- workers

    def add_target(
        self,
        worker_id: str,
        link: TargetLink,
        limits: registry_pb2.WorkerLimits,
        *,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """A target worker is ready; `on_failure` is called with the reason when its loop fails."""
        if self._target_deadline is not None:
            self._target_deadline.cancel()
            self._target_deadline = None
        lane = self._lanes[worker_id] = TargetLane(worker_id, link, limits)
        loop = self._loops[worker_id] = asyncio.create_task(self._verify_rounds(lane), name=f"verify {worker_id}")
        loop.add_done_callback(functools.partial(self._on_loop_done, worker_id, on_failure))
        self._admit()

    def _on_loop_done(self, worker_id: str, on_failure: Callable[[str], None], loop: "asyncio.Task[None]") -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            logger.error("the verify loop of %s failed", worker_id, exc_info=error)
            reason = f"its verify loop failed: {error}"
            self.remove_target(worker_id, reason)
            on_failure(reason)

    def remove_target(self, worker_id: str, reason: str) -> None:
        """A target worker is gone: its sessions go on elsewhere, or end when there is no other."""
        lane = self._lanes.pop(worker_id, None)
        if lane is None:
            return
        loop = self._loops.pop(worker_id)
        if loop is not asyncio.current_task():
            loop.cancel()
        for session in reversed(lane.sessions.values()):
            session.submission, session.target_id = None, None
            self._waiting.appendleft(session)
        logger.warning("target %s is gone: %s", worker_id, reason)
        self._admit()
        self._expect_target()

    def _expect_target(self) -> None:
        """While there is no target: requests wait as long as is configured for a new one, then end."""
        if not self._lanes and self._waiting and self._target_deadline is None:
            loop = asyncio.get_running_loop()
            self._target_deadline = loop.call_later(self._config.target_wait_s, self._give_up_on_targets)

    def _give_up_on_targets(self) -> None:
        self._target_deadline = None
        if not self._lanes:
            error = WorkerUnavailable("the last target worker is gone; the tokens delivered stay valid")
            for session in list(self._waiting):
                session.generation.abort(error)

    def add_draft(self, worker_id: str, link: DraftLink, limits: registry_pb2.WorkerLimits) -> None:
        """A draft worker is ready; sessions without one are given to it."""
        self._drafts[worker_id] = DraftPeer(worker_id=worker_id, link=link, limits=limits)
        self._assign_drafts()

    def remove_draft(self, worker_id: str) -> None:
        """A draft worker is gone: what it has grown stays, its sessions go to another if there is one."""
        peer = self._drafts.pop(worker_id, None)
        if peer is None:
            return
        for session_id in peer.sessions:
            session = self._sessions[session_id]
            session.draft_epochs.pop(worker_id, None)
            session.mirror.forget_worker(worker_id)
            self._assign_draft(session)
        self._notify_all()

    def take_growth(self, worker_id: str, growth: Growth) -> None:
        """Growth has arrived; it may be late, for a session that has ended, or of an old epoch."""
        peer = self._drafts.get(worker_id)
        session = self._sessions.get(growth.session_id)
        if peer is None or session is None:
            self.totals.dropped_nodes += len(growth.node_ids)
            return
        peer.last_growth_ns = time.monotonic_ns()
        if growth.as_of == len(session.token_ids) and session.unanswered_commits:
            if session.unanswered_commits == 1:
                peer.response.observe(peer.last_growth_ns - session.committed_ns)
            session.unanswered_commits = 0
        self.totals.dropped_nodes += session.take_growth(worker_id, growth)
        for lane in self._lanes.values():
            if session.session_id in lane.sessions:
                lane.notify()

    def take_draft_error(self, worker_id: str, session_id: int, epoch: int, message: str) -> None:
        """A draft cannot serve a session: it goes on without this draft."""
        session, peer = self._sessions.get(session_id), self._drafts.get(worker_id)
        if session is None or peer is None or session.draft_epochs.get(worker_id) != epoch:
            return
        logger.info("draft %s gave up session %d: %s", worker_id, session_id, message)
        del session.draft_epochs[worker_id]
        session.mirror.forget_worker(worker_id)
        peer.sessions.discard(session_id)
        session.refused_by.add(worker_id)
        self._assign_draft(session)
        self._notify_all()

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def running_sessions(self) -> int:
        """Sessions placed at a target."""
        return sum(len(lane.sessions) for lane in self._lanes.values())

    @property
    def waiting_requests(self) -> int:
        """Sessions in the queue."""
        return len(self._waiting)

    @property
    def has_target(self) -> bool:
        """Whether a request can be served."""
        return bool(self._lanes)

    def drain(self) -> None:
        """From now on new requests are refused; those that run go on."""
        self._is_draining = True

    async def stop(self, error: OutriderError) -> None:
        """Ends all requests with `error`, and the loops."""
        self.drain()
        if self._target_deadline is not None:
            self._target_deadline.cancel()
        for session in list(self._sessions.values()):
            session.generation.abort(error)
        for loop in self._loops.values():
            loop.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)
