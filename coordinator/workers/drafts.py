"""The draft workers of a coordinator: which there are, and which of them grow which session's tree.

A session gets the drafts with the fewest sessions. `async` trees merge the growth of up to `drafts_per_session` of
them for each source (model, n-gram) that the session listens to and some draft has; a `sync` tree of a fixed shape has
one draft, and so has a chain of rejection, each token of which was drawn from the q that travels with it. Nobody has a
second draft of a source at the cost of a session without any. docs/sources.md says when another source pays.

Each source of a draft grows a tree of its own, with ids of its own, so it has a place of its own at the target, where
equal nodes become one. A draft is asked for the sources that have places, and for nothing else. Nobody waits for a
draft: a slow, dead or absent one costs speed and nothing else.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.messages import FaultKind, SessionFault
from outrider.coordinator.sessions.session import PLACES, Drafter, Session
from outrider.coordinator.workers.links import DraftLink
from outrider.coordinator.workers.shared_places import SharedPlaces
from outrider.coordinator.workers.target_peer import TargetPeer
from outrider.drafting.growth_source import GrowthSource, sources_from_proto
from outrider.sampling import SpeculationMode
from outrider.v1 import common_pb2, registry_pb2, target_pb2

logger = logging.getLogger(__name__)

# An EAGLE head grows where the target runs, and a chain is drawn by a model.
_DRAFT_SOURCES, _CHAIN_SOURCES = frozenset({GrowthSource.MODEL, GrowthSource.NGRAM}), frozenset({GrowthSource.MODEL})


@dataclass(kw_only=True)
class DraftPeer:
    """One draft worker's link and its sessions; one that drains takes no new ones."""

    worker_id: str
    link: DraftLink
    places: SharedPlaces
    sources: frozenset[GrowthSource]
    sessions: set[int] = field(default_factory=set)
    is_draining: bool = False

    @property
    def has_room(self) -> bool:
        """True if one more session may be placed here."""
        return not self.is_draining and len(self.sessions) < self.places.most_sessions


class Drafts:
    """Draft workers by id (`peers`), and their sessions. Sessions and targets are live views, by id."""

    def __init__(
        self,
        config: CoordinatorConfig,
        sessions: Mapping[int, Session],
        targets: Mapping[str, TargetPeer],
    ) -> None:
        self.peers: dict[str, DraftPeer] = {}
        self._config, self._sessions, self._targets = config, sessions, targets

    # -------------------------------------------------------------------------------------------------------- workers

    def add(self, worker_id: str, link: DraftLink, limits: registry_pb2.WorkerLimits, sources: Iterable[int]) -> None:
        """Add a draft worker that is ready, and give it sessions without one; `sources` as in its introduction."""
        known = sources_from_proto(sources, default=(GrowthSource.MODEL,))
        places = SharedPlaces(limits.max_sessions)
        self.peers[worker_id] = DraftPeer(worker_id=worker_id, link=link, places=places, sources=known)
        self.assign_all()

    def remove(self, worker_id: str) -> None:
        """Remove a lost draft worker: its nodes stay, its sessions go to another if there is one."""
        peer = self.peers.pop(worker_id, None)
        if peer is not None:
            self._take_from(peer, [self._sessions[session_id] for session_id in peer.sessions])

    def drain(self, worker_id: str) -> bool:
        """Drain a draft worker and return True; return False for any other worker."""
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
            self._leave(session, peer.worker_id)
        peer.sessions.clear()
        self._assign_all(sessions)

    def hear(self, worker_id: str, load: common_pb2.WorkerLoad) -> None:
        """A worker's heartbeat; one that is no draft is not meant."""
        peer = self.peers.get(worker_id)
        if peer is not None and peer.places.hear(load, len(peer.sessions)):
            self.assign_all()

    # ------------------------------------------------------------------------------------------------------- sessions

    def assign(self, session: Session) -> None:
        """Give a session the drafts that it lacks, as far as there is room."""
        self._assign(session, self._kinds())

    def assign_all(self) -> None:
        """Give all sessions at a target the drafts that they lack, as far as there is room."""
        self._assign_all(session for target in self._targets.values() for session in target.sessions.values())

    def _assign_all(self, sessions: Iterable[Session]) -> None:
        """Assign drafts to all sessions, those without any first."""
        kinds = self._kinds()
        for session in sorted(sessions, key=lambda session: len(session.draft_epochs)):
            self._assign(session, kinds)
            is_left_out = not session.draft_epochs and not session.refused_by and self._wanted(session)
            if is_left_out and self._sources(session) == _DRAFT_SOURCES:
                # There is no place anywhere: to look through all sessions once is enough.
                return

    def _kinds(self) -> set[frozenset[GrowthSource]]:
        """The sources of drafts, each combination once."""
        return {peer.sources for peer in self.peers.values()}

    def _assign(self, session: Session, kinds: Collection[frozenset[GrowthSource]]) -> None:
        wanted = self._wanted(session)
        if not wanted or (len(kinds) == 1 and len(session.draft_epochs) >= wanted and not session.refused_by):
            return
        has_one = session.mode is SpeculationMode.SYNC or session.is_chain
        for source in sorted(self._sources(session) & frozenset().union(*kinds)):
            while self._count(session, source) < wanted and not (has_one and session.draft_epochs):
                if None not in session.places:
                    return
                peers = self._open_to(session, source)
                if peers:
                    peer = min(peers, key=lambda peer: len(peer.sessions))
                elif self._count(session, source) or (peer := self._reclaim(session, source)) is None:
                    break
                self._open(session, peer, source)

    def _open(self, session: Session, peer: DraftPeer, source: GrowthSource) -> None:
        """Have a draft grow a session by this source, and by others as far as there are places."""
        own = self._sources(session)
        ranked = sorted(
            (other for other in own & peer.sources if Drafter(peer.worker_id, other) not in session.refused_by),
            key=lambda other: (other is not source, other),
        )
        sources = ranked[: session.places.count(None)]
        # Together the places of a session hold no more than the target's pool.
        of_place = self._config.max_live_nodes // min(self._wanted(session) * len(own), PLACES)
        max_depth = session.request.max_depth
        if session.mode is SpeculationMode.ASYNC:
            # Growth goes on below a tree that is being verified, and below the target's own token after it: with a
            # tree's own depth a draft would stand still, once it is as deep as that, until the answer is there.
            max_depth = 2 * (max_depth + 1)
        opening = session.opening(max_live_nodes=max(of_place, 1) * len(sources), max_depth=max_depth, sources=sources)
        places = session.join_draft(peer.worker_id, opening.epoch, sources)
        peer.sessions.add(session.session_id)
        self._tell(session, places, target_pb2.PLACE_CHANGE_TAKEN)
        peer.link.open_session(opening)

    def _leave(self, session: Session, worker_id: str) -> None:
        """A draft grows a session's tree no more."""
        self._tell(session, session.leave_draft(worker_id), target_pb2.PLACE_CHANGE_LEFT)

    def _tell(self, session: Session, places: Iterable[int], change: target_pb2.PlaceChange) -> None:
        """Tell a session's target, if it is open at one, what has become of places."""
        if (target := self._targets.get(session.target_id or "")) is not None:
            for place in places:
                target.change_place(session, place, change)

    def _wanted(self, session: Session) -> int:
        """Drafts for each source."""
        if session.mode is SpeculationMode.OFF:
            return 0
        if session.mode is SpeculationMode.SYNC or session.is_chain:
            return 1
        return self._config.drafts_per_session

    @staticmethod
    def _sources(session: Session) -> frozenset[GrowthSource]:
        """Return the draft workers' sources that may grow a session's tree."""
        return session.request.sources & (_CHAIN_SOURCES if session.is_chain else _DRAFT_SOURCES)

    @staticmethod
    def _count(session: Session, source: GrowthSource) -> int:
        """Drafts that grow a session's tree by this source."""
        return sum(drafter is not None and drafter.source is source for drafter in session.places)

    def _open_to(self, session: Session, source: GrowthSource) -> list[DraftPeer]:
        return [
            peer
            for worker_id, peer in self.peers.items()
            if source in peer.sources
            and peer.has_room
            and Drafter(worker_id, source) not in session.refused_by
            and worker_id not in session.draft_epochs
        ]

    def _reclaim(self, session: Session, source: GrowthSource) -> DraftPeer | None:
        """A place for a session without any draft of this source, of one that has several; None where there is none."""
        if self._config.drafts_per_session == 1:
            return None
        for worker_id, peer in self.peers.items():
            if Drafter(worker_id, source) in session.refused_by or source not in peer.sources:
                continue
            for session_id in peer.sessions:
                other = self._sessions[session_id]
                own = {drafter.source for drafter in other.drafters_of(worker_id)}
                if source in own and all(self._count(other, each) > 1 for each in own):
                    peer.link.close_session(session_id, other.draft_epochs[worker_id])
                    self._leave(other, worker_id)
                    peer.sessions.discard(session_id)
                    return peer
        return None

    def let_go(self, session: Session) -> bool:
        """Take a session's places away and close it at its drafts; return whether it had a place."""
        for worker_id, epoch in session.draft_epochs.items():
            peer = self.peers[worker_id]
            peer.sessions.discard(session.session_id)
            peer.link.close_session(session.session_id, epoch)
        had_draft = bool(session.draft_epochs)
        for worker_id in list(session.draft_epochs):
            self._leave(session, worker_id)
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
        """Handle a session that a draft has refused or has no room for: it goes on without this draft.

        A session that found no room may come back once the draft has places. Where a model and n-grams were to grow
        it, the model is taken for the one that refuses, since n-grams take sessions of any length.
        """
        session, peer = self._sessions.get(session_id), self.peers.get(worker_id)
        if session is None or peer is None or session.draft_epochs.get(worker_id) != epoch:
            return
        logger.info("draft %s gave up session %d: %s", worker_id, session_id, fault.message, extra=session.ids)
        peer.sessions.discard(session_id)
        if fault.kind is FaultKind.NO_ROOM:
            peer.places.note_refusal(len(peer.sessions))
        else:
            session.refused_by.add(min(session.drafters_of(worker_id)))
        self._leave(session, worker_id)
        self.assign(session)
