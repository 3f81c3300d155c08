"""Which drafts grow which session's tree.

A session gets the drafts with the fewest sessions. `async` trees merge the growth of up to `drafts_per_session` of
them for each source (model, n-gram) that the session listens to and some draft has; a `sync` tree of a fixed shape has
one draft, and so has a chain of rejection, each token of which was drawn from the q that travels with it. Nobody has a
second draft of a source at the cost of a session without any. docs/sources.md says when another source pays.

Each source of a draft grows a tree of its own, with ids of its own, so it has a place of its own at the target, where
equal nodes become one. A draft is asked for the sources that have places, and for nothing else.
"""

from collections.abc import Collection, Iterable, Mapping

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.session import PLACES, Drafter, Session
from outrider.coordinator.workers.draft_peer import DraftPeer
from outrider.coordinator.workers.target_peer import TargetPeer
from outrider.drafting.growth_source import GrowthSource
from outrider.sampling import SpeculationMode
from outrider.v1 import target_pb2

# An EAGLE head grows where the target runs, and a chain is drawn by a model.
_DRAFT_SOURCES, _CHAIN_SOURCES = frozenset({GrowthSource.MODEL, GrowthSource.NGRAM}), frozenset({GrowthSource.MODEL})


class DraftPlaces:
    """Opens sessions at drafts.

    Args:
        config: see there.
        drafts: by worker id; a live view.
        sessions: by session id; a live view.
        targets: by worker id; a live view.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        drafts: Mapping[str, DraftPeer],
        sessions: Mapping[int, Session],
        targets: Mapping[str, TargetPeer],
    ) -> None:
        self._config, self._drafts, self._sessions, self._targets = config, drafts, sessions, targets

    def assign(self, session: Session) -> None:
        """Gives a session the drafts that it lacks, as far as there is room."""
        self._assign(session, self._kinds())

    def assign_all(self, sessions: Iterable[Session]) -> None:
        """The same for many; those without any draft come first."""
        kinds = self._kinds()
        for session in sorted(sessions, key=lambda session: len(session.draft_epochs)):
            self._assign(session, kinds)
            is_left_out = not session.draft_epochs and not session.refused_by and self._wanted(session)
            if is_left_out and self._sources(session) == _DRAFT_SOURCES:
                # There is no place anywhere: to look through all sessions once is enough.
                return

    def _kinds(self) -> set[frozenset[GrowthSource]]:
        """What drafts grow by, each combination once."""
        return {peer.sources for peer in self._drafts.values()}

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

    def leave(self, session: Session, worker_id: str) -> None:
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
        """Those of drafts that have something to say to it."""
        return session.request.sources & (_CHAIN_SOURCES if session.is_chain else _DRAFT_SOURCES)

    @staticmethod
    def _count(session: Session, source: GrowthSource) -> int:
        """Drafts that grow a session's tree by this source."""
        return sum(drafter is not None and drafter.source is source for drafter in session.places)

    def _open_to(self, session: Session, source: GrowthSource) -> list[DraftPeer]:
        return [
            peer
            for worker_id, peer in self._drafts.items()
            if source in peer.sources
            and peer.has_room
            and Drafter(worker_id, source) not in session.refused_by
            and worker_id not in session.draft_epochs
        ]

    def _reclaim(self, session: Session, source: GrowthSource) -> DraftPeer | None:
        """A place for a session without any draft of this source, of one that has several; None where there is none."""
        if self._config.drafts_per_session == 1:
            return None
        for worker_id, peer in self._drafts.items():
            if Drafter(worker_id, source) in session.refused_by or source not in peer.sources:
                continue
            for session_id in peer.sessions:
                other = self._sessions[session_id]
                own = {drafter.source for drafter in other.drafters_of(worker_id)}
                if source in own and all(self._count(other, each) > 1 for each in own):
                    peer.link.close_session(session_id, other.draft_epochs[worker_id])
                    self.leave(other, worker_id)
                    peer.sessions.discard(session_id)
                    return peer
        return None
