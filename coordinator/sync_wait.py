"""How long a round of `sync` sessions waits for their fixed trees, and for which drafts it does not.

A sync round waits for its tree, up to a cap. What a draft cannot answer is not worth that. One that has left a
session's last commits unanswered (it still prefills, or has fallen behind) is waited for at every eighth only, as in
async mode; one that has said nothing to anybody for as long as a round waits is not waited for by anybody, until it
speaks again.
"""

from collections.abc import Iterable, Mapping

from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.messages import SpeculationMode
from outrider.coordinator.session import Session

# As in `outlooks`.
_RETRY_COMMITS = 8


class SyncWait:
    """Of one target's rounds.

    Args:
        cap_ms: longest that a round waits for its tree.
        drafts: by worker id; a live view.
    """

    def __init__(self, cap_ms: float, drafts: Mapping[str, DraftPeer]) -> None:
        self._cap_ns, self._drafts = cap_ms * 1e6, drafts

    def left_ns(self, session: Session, now_ns: int) -> float:
        """While a `sync` session's tree of this round is still growing, how long it is worth waiting for."""
        if session.mode is not SpeculationMode.SYNC or not session.draft_epochs or session.mirror.is_complete:
            return 0.0
        if session.sampling.max_new_tokens - session.output_length <= 1:
            return 0.0
        unanswered = session.unanswered_commits
        if (unanswered > 1 and unanswered % _RETRY_COMMITS) or all(peer.is_silent for peer in self._peers(session)):
            return 0.0
        return max(0.0, self._cap_ns - (now_ns - session.committed_ns))

    def note_fired(self, sessions: Iterable[Session], now_ns: int) -> None:
        """These sessions have waited, or not: whose draft has said nothing for all of that time is given up."""
        for session in sessions:
            if session.mode is not SpeculationMode.SYNC or session.mirror.is_complete:
                continue
            if now_ns - session.committed_ns < self._cap_ns:
                continue
            for peer in self._peers(session):
                if peer.last_growth_ns < session.committed_ns:
                    peer.given_up_ns = now_ns

    def _peers(self, session: Session) -> list[DraftPeer]:
        return [self._drafts[worker_id] for worker_id in session.draft_epochs if worker_id in self._drafts]
