"""A target worker as the scheduler sees it."""

from dataclasses import dataclass, field

from outrider.coordinator.links import TargetLink
from outrider.coordinator.session import Session
from outrider.coordinator.shared_places import SharedPlaces
from outrider.v1 import registry_pb2, target_pb2

WITHOUT_BOUND = (1 << 31) - 1
"""`allow` of a session that may go as far as it can."""


@dataclass(kw_only=True, eq=False)
class TargetPeer:
    """One target worker's link and its sessions.

    Attributes:
        places: sessions that it takes of this coordinator.
        sessions: by session id.
        suspects: of its sessions, those that are verified alone.
        is_draining: it takes no new sessions.
        step_age_ms: how long its round has been running, by its last heartbeat.
        is_preparing: what it runs may be compiling, by its last heartbeat.
    """

    worker_id: str
    link: TargetLink
    places: SharedPlaces
    sessions: dict[int, Session] = field(default_factory=dict)
    suspects: set[int] = field(default_factory=set)
    is_draining: bool = False
    step_age_ms: int = 0
    is_preparing: bool = False

    @property
    def limits(self) -> registry_pb2.WorkerLimits:
        """Of the worker, with those places only that this coordinator may use now."""
        return self.places.limits

    @property
    def has_room(self) -> bool:
        """Whether one more session may be placed here."""
        return self.room > 0

    @property
    def room(self) -> int:
        """Sessions that may still be placed here."""
        return 0 if self.is_draining else max(0, self.limits.max_sessions - len(self.sessions))

    def open(self, session: Session, *, sync_wait_ms: float) -> None:
        """Give a session its place here, and open it, with the drafts that it has."""
        self.sessions[session.session_id] = session
        opening = session.opening(max_live_nodes=0, sync_wait_ms=sync_wait_ms)
        session.target_id, session.target_epoch, session.is_held = self.worker_id, opening.epoch, False
        self.link.open_session(opening)
        for place, worker_id in enumerate(session.places):
            if worker_id is not None:
                self.change_place(session, place, target_pb2.PLACE_CHANGE_TAKEN)
        if session.probation:
            self.suspects.add(session.session_id)
            self._bound(session)

    def change_place(self, session: Session, place: int, change: target_pb2.PlaceChange) -> None:
        """Tell what has become of a draft's place in a session that is open here."""
        self.link.change_place(session.session_id, session.target_epoch, place, change)

    def hold(self, session: Session, *, is_held: bool) -> None:
        """Let a session rest until its client reads on, or go on."""
        if session.is_held != is_held:
            session.is_held = is_held
            self._bound(session)

    def clear(self, session: Session) -> None:
        """A suspect has been cleared: it runs beside the others."""
        if session.session_id in self.suspects:
            self.suspects.discard(session.session_id)
            self._bound(session)

    def _bound(self, session: Session) -> None:
        allow = 0 if session.is_held else WITHOUT_BOUND
        self.link.bound(session.session_id, session.target_epoch, allow, alone=session.session_id in self.suspects)

    def let_go(self, session: Session) -> bool:
        """Take a session's place away, and close it at the worker; whether it had one."""
        self.suspects.discard(session.session_id)
        if self.sessions.pop(session.session_id, None) is None:
            return False
        if session.target_id == self.worker_id:
            self.link.close_session(session.session_id, session.target_epoch)
            session.target_id = None
        return True
