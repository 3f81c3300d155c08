"""Which drafts grow which session's tree.

A session gets the drafts with the fewest sessions. `async` trees merge the growth of up to `drafts_per_session` of
them; a `sync` tree of a fixed shape has one, and so has a chain of rejection, each token of which was drawn from the q
that travels with it. Nobody has a second draft at the cost of a session without any. docs/several-drafts.md says when a
second one pays.
"""

from collections.abc import Iterable, Mapping

from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.messages import SpeculationMode
from outrider.coordinator.session import Session


class DraftPlaces:
    """Opens sessions at drafts.

    Args:
        config: see there.
        drafts: by worker id; a live view.
        sessions: by session id; a live view.
    """

    def __init__(
        self, config: CoordinatorConfig, drafts: Mapping[str, DraftPeer], sessions: Mapping[int, Session]
    ) -> None:
        self._config, self._drafts, self._sessions = config, drafts, sessions

    def assign(self, session: Session) -> None:
        """Gives a session the drafts that it lacks, as far as there is room."""
        while len(session.draft_epochs) < self._wanted(session):
            peers = self._open_to(session)
            if peers:
                peer = min(peers, key=lambda peer: len(peer.sessions))
            elif session.draft_epochs or (peer := self._reclaim(session)) is None:
                return
            opening = session.opening(max_live_nodes=self._config.max_live_nodes)
            session.draft_epochs[peer.worker_id] = opening.epoch
            peer.sessions.add(session.session_id)
            peer.link.open_session(opening)

    def assign_all(self, sessions: Iterable[Session]) -> None:
        """The same for many; those without any draft come first."""
        for session in sorted(sessions, key=lambda session: len(session.draft_epochs)):
            self.assign(session)
            if not session.draft_epochs and not session.refused_by and self._wanted(session):
                # There is no place anywhere: to look through all sessions once is enough.
                return

    def _wanted(self, session: Session) -> int:
        if session.mode is SpeculationMode.OFF:
            return 0
        if session.mode is SpeculationMode.SYNC or session.mirror.is_chain:
            return 1
        return self._config.drafts_per_session

    def _open_to(self, session: Session) -> list[DraftPeer]:
        return [
            peer
            for worker_id, peer in self._drafts.items()
            if peer.has_room and worker_id not in session.refused_by and worker_id not in session.draft_epochs
        ]

    def _reclaim(self, session: Session) -> DraftPeer | None:
        """A place for a session without any draft, of one that has several; None where there is none."""
        for worker_id, peer in self._drafts.items():
            if worker_id in session.refused_by:
                continue
            for session_id in peer.sessions:
                other = self._sessions[session_id]
                if len(other.draft_epochs) > 1:
                    peer.link.close_session(session_id, other.draft_epochs.pop(worker_id))
                    other.mirror.forget_worker(worker_id)
                    peer.sessions.discard(session_id)
                    return peer
        return None
