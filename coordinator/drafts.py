"""The draft workers of a coordinator: which there are, which sessions they grow, and what comes from them.

Nobody waits for a draft: a slow, dead or absent one costs speed and nothing else.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.coordinator import growth_arrival
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.draft_places import DraftPlaces
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.links import DraftLink
from outrider.coordinator.messages import GrowthBatch
from outrider.coordinator.session import Session
from outrider.coordinator.shared_places import SharedPlaces
from outrider.growth_source import GrowthSource, sources_from_proto
from outrider.v1 import common_pb2, registry_pb2

if TYPE_CHECKING:
    from outrider.coordinator.totals import Totals

logger = logging.getLogger(__name__)


class Drafts:
    """Draft workers and their sessions.

    Args:
        config: see there.
        sessions: by session id; a live view.
        lanes: targets by worker id; a live view.
        totals: where growth is counted.

    Attributes:
        peers: by worker id.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        sessions: Mapping[int, Session],
        lanes: Mapping[str, TargetLane],
        totals: "Totals",
    ) -> None:
        self.peers: dict[str, DraftPeer] = {}
        self._sessions, self._lanes, self._totals = sessions, lanes, totals
        self._shared: dict[str, SharedPlaces] = {}
        self._places = DraftPlaces(config, self.peers, sessions, lanes)

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
            session.leave_draft(peer.worker_id)
        peer.sessions.clear()
        self._places.assign_all(sessions)
        self._notify_all()

    def _notify_all(self) -> None:
        for lane in self._lanes.values():
            lane.notify()

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
        self._places.assign_all(session for lane in self._lanes.values() for session in lane.sessions.values())

    def let_go(self, session: Session) -> bool:
        """Takes a session's places away, and closes it at its drafts; whether it had one."""
        for worker_id, epoch in session.draft_epochs.items():
            peer = self.peers[worker_id]
            peer.sessions.discard(session.session_id)
            peer.link.close_session(session.session_id, epoch)
        had_draft = bool(session.draft_epochs)
        for worker_id in list(session.draft_epochs):
            session.leave_draft(worker_id)
        return had_draft

    def speculating(self) -> tuple[int, int]:
        """Sessions at a target that some draft could grow, and those of them that nobody grows."""
        grown = frozenset({GrowthSource.MODEL}).union(*(peer.sources for peer in self.peers.values()))
        has_growth = [
            bool(session.draft_epochs) or session.is_target_drafted
            for lane in self._lanes.values()
            for session in lane.sessions.values()
            if session.may_speculate and session.request.sources & grown
        ]
        return len(has_growth), has_growth.count(False)

    # --------------------------------------------------------------------------------------------- what comes from them

    def take_growth(self, worker_id: str, growth: GrowthBatch) -> None:
        """Growth has arrived; it may be late, for sessions that have ended, or of old epochs."""
        peer = self.peers.get(worker_id)
        nodes = len(growth.node_ids)
        self._totals.serving.grown_nodes += nodes
        if peer is None:
            self._totals.dropped_nodes += nodes
            return
        sessions = growth_arrival.take_growth(peer, growth, self._sessions, drafts=self.peers, totals=self._totals)
        for lane in self._lanes.values():
            if any(session is not None and session.session_id in lane.sessions for session in sessions):
                lane.extend_ahead()
                lane.notify()

    def take_error(self, worker_id: str, session_id: int, epoch: int, message: str) -> None:
        """A draft cannot serve a session: it goes on without this draft."""
        session, peer = self._sessions.get(session_id), self.peers.get(worker_id)
        if session is None or peer is None or session.draft_epochs.get(worker_id) != epoch:
            return
        logger.info("draft %s gave up session %d: %s", worker_id, session_id, message, extra=session.ids)
        session.leave_draft(worker_id)
        peer.sessions.discard(session_id)
        session.refused_by.add(worker_id)
        self._places.assign(session)
        self._notify_all()
