"""A target worker as the scheduler sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from outrider.coordinator.sessions.session import Session
from outrider.coordinator.workers.links import TargetLink
from outrider.coordinator.workers.shared_places import SharedPlaces
from outrider.v1 import target_pb2

WITHOUT_BOUND = (1 << 31) - 1
"""`allow` of a session that may go as far as it can."""


class Turn(Enum):
    """Whose round it was: a suspect and all others that are under no suspicion take turns."""

    UNKNOWN = auto()
    TRIAL = auto()
    OTHERS = auto()


@dataclass(kw_only=True, eq=False)
class TargetPeer:
    """One target worker's link and its sessions.

    Attributes:
        places: sessions that it takes of this coordinator.
        suspects: of its sessions, those that are verified alone, one after the other.
        on_trial: the suspect whose turn it is; the others rest.
        last_turn: whose round of its trial was told of last.
    """

    worker_id: str
    link: TargetLink
    places: SharedPlaces
    sessions: dict[int, Session] = field(default_factory=dict)
    suspects: list[Session] = field(default_factory=list)
    on_trial: Session | None = None
    last_turn: Turn = Turn.UNKNOWN
    is_draining: bool = False

    @property
    def room(self) -> int:
        """Sessions that may still be placed here."""
        return 0 if self.is_draining else max(0, self.places.most_sessions - len(self.sessions))

    def open(self, session: Session, *, sync_wait_ms: float) -> None:
        """Give a session its place here, and open it, with the drafts that it has."""
        self.sessions[session.session_id] = session
        opening = session.opening(sync_wait_ms=sync_wait_ms)
        session.target_id, session.target_epoch, session.is_held = self.worker_id, opening.epoch, False
        self.link.open_session(opening)
        for place, drafter in enumerate(session.places):
            if drafter is not None:
                self.change_place(session, place, target_pb2.PLACE_CHANGE_TAKEN)
        if session.probation:
            self.suspects.append(session)
            self._bound(session)
            self._try_next()

    def change_place(self, session: Session, place: int, change: target_pb2.PlaceChange) -> None:
        """Tell what has become of a place in a session that is open here."""
        self.link.change_place(session.session_id, session.target_epoch, place, change)

    def hold(self, session: Session, *, is_held: bool) -> None:
        """Let a session rest until its client reads on, or go on."""
        if session.is_held == is_held:
            return
        session.is_held = is_held
        if self.on_trial is session:
            self.on_trial = None
        self._bound(session)
        self._try_next()

    def clear(self, session: Session) -> None:
        """Clear a suspect: it runs beside the others, and the next one is tried."""
        if session in self.suspects:
            self._remove_suspect(session)
            self._bound(session)
            self._try_next()

    def note_round(self, sessions: Sequence[Session]) -> None:
        """Note that a round has given sessions tokens."""
        if self.on_trial is not None and sessions:
            self.last_turn = Turn.TRIAL if self.on_trial in sessions else Turn.OTHERS

    @property
    def blamed(self) -> Sequence[Session]:
        """Sessions one of which is the reason if the worker crashes now.

        While a suspect is on trial that is the suspect, or the others, whose turn it was; all of them before either has
        come through a round.
        """
        others = [
            session
            for session in self.sessions.values()
            if session.target_id == self.worker_id and not session.is_held and session not in self.suspects
        ]
        if self.on_trial is None or (others and self.last_turn is Turn.TRIAL):
            return others
        if others and self.last_turn is Turn.UNKNOWN:
            return [self.on_trial, *others]
        return [self.on_trial]

    def _try_next(self) -> None:
        """Let the next suspect run, unless there is one that does."""
        if self.on_trial is None:
            self.on_trial = next((session for session in self.suspects if not session.is_held), None)
            self.last_turn = Turn.UNKNOWN
            if self.on_trial is not None:
                self._bound(self.on_trial)

    def _remove_suspect(self, session: Session) -> None:
        self.suspects.remove(session)
        if self.on_trial is session:
            self.on_trial = None

    def _bound(self, session: Session) -> None:
        is_suspect = session in self.suspects
        rests = session.is_held or (is_suspect and session is not self.on_trial)
        allow = 0 if rests else WITHOUT_BOUND
        self.link.bound(session.session_id, session.target_epoch, allow, alone=is_suspect)

    def lose(self, session: Session) -> None:
        """Note that the worker has lost or refused a session; its place here is kept."""
        session.target_id = None
        if session in self.suspects:
            self._remove_suspect(session)
            self._try_next()

    def let_go(self, session: Session) -> bool:
        """Take a session's place away and close it at the worker; return whether it had one."""
        if self.sessions.pop(session.session_id, None) is None:
            return False
        if session.target_id == self.worker_id:
            self.link.close_session(session.session_id, session.target_epoch)
        self.lose(session)
        return True
