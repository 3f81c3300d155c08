"""The draft workers of a coordinator: which there are, which sessions they grow, and what comes from them.

Nobody waits for a draft: a slow, dead or absent one costs speed and nothing else.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.messages import FaultKind, SessionFault
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.workers.draft_peer import DraftPeer
from outrider.coordinator.workers.draft_places import DraftPlaces
from outrider.coordinator.workers.links import DraftLink
from outrider.coordinator.workers.shared_places import SharedPlaces
from outrider.coordinator.workers.target_peer import TargetPeer
from outrider.drafting.growth_source import GrowthSource, sources_from_proto
from outrider.v1 import common_pb2, registry_pb2

logger = logging.getLogger(__name__)


class Drafts:
    """Draft workers and their sessions.

    Args:
        config: see there.
        sessions: by session id; a live view.
        targets: by worker id; a live view.

    Attributes:
        peers: by worker id.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        sessions: Mapping[int, Session],
        targets: Mapping[str, TargetPeer],
    ) -> None:
        self.peers: dict[str, DraftPeer] = {}
        self._sessions, self._targets = sessions, targets
        self._shared: dict[str, SharedPlaces] = {}
        self._places = DraftPlaces(config, self.peers, sessions, targets)

    def add(self, worker_id: str, link: DraftLink, limits: registry_pb2.WorkerLimits, sources: Iterable[int]) -> None:
        """A draft worker is ready; sessions without one are given to it. `sources` as its introduction has them."""
        known = sources_from_proto(sources, default=(GrowthSource.MODEL,))
        places = self._shared[worker_id] = SharedPlaces(limits)
        self.peers[worker_id] = DraftPeer(worker_id=worker_id, link=link, limits=places.limits, sources=known)
        self.assign_all()

    def remove(self, worker_id: str) -> None:
        """A draft worker is gone: what it has grown stays, its sessions go to another if there is one."""
        peer = self.peers.pop(worker_id, None)
        if peer is None:
            return
        del self._shared[worker_id]
        self._take_from(peer, [self._sessions[session_id] for session_id in peer.sessions])

    def drain(self, worker_id: str) -> bool:
        """Whether this is a draft; if so it loses its sessions, and gets no new ones."""
        peer = self.peers.get(worker_id)
        if peer is None:
            return False
        peer.is_draining = True
        sessions = [self._sessions[session_id] for session_id in peer.sessions]
        for session in sessions:
            peer.link.close_session(session.session_id, session.draft_epochs[worker_id])
        self._take_from(peer, sessions)
        return True

    def _take_from(self, peer: DraftPeer, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._places.leave(session, peer.worker_id)
        peer.sessions.clear()
        self._places.assign_all(sessions)

    def hear(self, worker_id: str, load: common_pb2.WorkerLoad) -> None:
        """A worker's heartbeat; one that is no draft is not meant."""
        peer = self.peers.get(worker_id)
        if peer is not None and self._shared[worker_id].hear(load, len(peer.sessions)):
            self.assign_all()

    # ------------------------------------------------------------------------------------------------------- sessions

    def assign(self, session: Session) -> None:
        """Gives a session the drafts that it lacks, as far as there is room."""
        self._places.assign(session)

    def assign_all(self) -> None:
        """The same for all that are placed at a target."""
        self._places.assign_all(session for target in self._targets.values() for session in target.sessions.values())

    def let_go(self, session: Session) -> bool:
        """Takes a session's places away, and closes it at its drafts; whether it had one."""
        for worker_id, epoch in session.draft_epochs.items():
            peer = self.peers[worker_id]
            peer.sessions.discard(session.session_id)
            peer.link.close_session(session.session_id, epoch)
        had_draft = bool(session.draft_epochs)
        for worker_id in list(session.draft_epochs):
            self._places.leave(session, worker_id)
        return had_draft

    def speculating(self) -> tuple[int, int]:
        """Sessions at a target that some draft worker could grow, and those of them that nobody grows.

        Those whose sources a model is not one of count where there is a draft of theirs: another model would not help.
        """
        grown = frozenset({GrowthSource.MODEL}).union(*(peer.sources for peer in self.peers.values()))
        has_growth = [
            bool(session.draft_epochs)
            for target in self._targets.values()
            for session in target.sessions.values()
            if session.may_speculate and session.request.sources & grown
        ]
        return len(has_growth), has_growth.count(False)

    def ask_for_lost(self, session: Session, lost: int) -> None:
        """Have the drafts send their live trees again whose growth a target has lost: a bit set of places."""
        for place, drafter in enumerate(session.places):
            # Unless that is under way.
            if drafter is not None and lost >> place & 1 and drafter not in session.asked_again:
                self._ask_again(session, drafter.worker_id)

    def ask_all_again(self, session: Session) -> None:
        """Have all its drafts do so: another target serves it."""
        session.asked_again.clear()
        for worker_id in session.draft_epochs:
            self._ask_again(session, worker_id)

    def _ask_again(self, session: Session, worker_id: str) -> None:
        """Have a draft send its live trees again."""
        session.asked_again.update(session.drafters_of(worker_id))
        self.peers[worker_id].link.ask_again(session.session_id, session.draft_epochs[worker_id])

    def take_fault(self, worker_id: str, session_id: int, epoch: int, fault: SessionFault) -> None:
        """A draft has refused a session, or has no room for it: it goes on without this draft.

        A session that found no room may come back once the draft has places. Where a model and n-grams were to grow
        it, the model is taken for the one that refuses, since n-grams take sessions of any length.
        """
        session, peer = self._sessions.get(session_id), self.peers.get(worker_id)
        if session is None or peer is None or session.draft_epochs.get(worker_id) != epoch:
            return
        logger.info("draft %s gave up session %d: %s", worker_id, session_id, fault.message, extra=session.ids)
        peer.sessions.discard(session_id)
        if fault.kind is FaultKind.NO_ROOM:
            self._shared[worker_id].note_refusal(len(peer.sessions))
        else:
            session.refused_by.add(min(session.drafters_of(worker_id)))
        self._places.leave(session, worker_id)
        self._places.assign(session)
