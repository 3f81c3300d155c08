"""What becomes of a session that its target has lost, refused, or has no room for."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.messages import FaultKind, SessionFault
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.workers.target_peer import TargetPeer
from outrider.errors import FieldViolation, InvalidRequest, Overloaded, WeightsReplaced, WorkerUnavailable

if TYPE_CHECKING:
    from outrider.coordinator.sessions.totals import Totals

logger = logging.getLogger(__name__)

# A worker's error of a session (a lost state, say) is answered by opening it anew; the same again is given up.
MAX_REOPENINGS = 2
# How long a session that a full target turned away waits before it asks again.
_NO_ROOM_PAUSE_S = 0.05


class SessionFaults:
    """Answers faults of sessions; what went wrong with one is forgotten when it has emitted tokens again.

    Args:
        config: see there.
        targets: by worker id; a live view.
        totals: where reopenings are counted.
        move: takes sessions away from a target, to be placed elsewhere.
        reopen: opens a session anew at the target where it has its place.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        targets: Mapping[str, TargetPeer],
        totals: "Totals",
        *,
        move: Callable[[TargetPeer, Sequence[Session]], None],
        reopen: Callable[[Session], None],
    ) -> None:
        self._config, self._targets, self._totals, self._move, self._reopen = config, targets, totals, move, reopen
        self._reopenings: dict[int, int] = {}
        self._without_room_since: dict[int, int] = {}

    def take(self, session: Session, fault: SessionFault) -> None:
        """The target has lost or refused a session."""
        if fault.kind is FaultKind.REFUSED:
            session.generation.abort(InvalidRequest([FieldViolation("request", fault.message)]))
        elif fault.kind is FaultKind.REPLACED:
            session.generation.abort(WeightsReplaced(f"{fault.message}; the tokens delivered stay valid"))
        elif fault.kind is FaultKind.NO_ROOM:
            self._wait_for_room(session, fault.message)
        else:
            self._open_anew(session, fault.message)

    def note_progress(self, sessions: Sequence[Session]) -> None:
        """These sessions have emitted tokens: what went wrong before is no reason to give them up."""
        for troubled in (self._reopenings, self._without_room_since):
            if troubled:
                for session in sessions:
                    troubled.pop(session.session_id, None)

    def note_place_lost(self, session: Session) -> None:
        """Whom its target had no room for has not asked another one yet."""
        self._without_room_since.pop(session.session_id, None)

    def forget(self, session: Session) -> None:
        """The session has ended."""
        self._reopenings.pop(session.session_id, None)
        self._without_room_since.pop(session.session_id, None)

    def _open_anew(self, session: Session, reason: str) -> None:
        """It is opened anew, unless that has not helped before."""
        count = self._reopenings[session.session_id] = self._reopenings.get(session.session_id, 0) + 1
        if count > MAX_REOPENINGS:
            message = f"the target worker cannot serve this request: {reason}"
            session.generation.abort(WorkerUnavailable(message))
            return
        self._totals.serving.reopened += 1
        logger.warning("session %d is opened anew: %s", session.session_id, reason, extra=session.ids)
        self._reopen(session)

    def _wait_for_room(self, session: Session, reason: str) -> None:
        """The target is full with others' sessions: this one rests for a moment, then asks again, or asks another."""
        targets = list(self._targets.values())
        others = any(
            target.places.has_others or any(held is not session for held in target.sessions.values())
            for target in targets
        )
        now_ns = clock.now_ns()
        since_ns = self._without_room_since.setdefault(session.session_id, now_ns)
        if now_ns - since_ns > self._config.room_wait_s * 1e9 and not others:
            session.generation.abort(Overloaded(reason, retry_after_s=self._config.retry_after_s))
            return
        target = next((target for target in targets if session.session_id in target.sessions), None)
        if target is not None and target.places.is_shared:
            # Other coordinators' sessions have the room.
            is_borrowed = target.places.note_refusal(len(target.sessions) - 1)
            if is_borrowed or any(other.has_room for other in targets):
                self._move(target, [session])
                if not session.is_finished:
                    self._without_room_since[session.session_id] = since_ns
                return
        asyncio.get_running_loop().call_later(_NO_ROOM_PAUSE_S, self._ask_for_room, session)

    def _ask_for_room(self, session: Session) -> None:
        has_place = any(session.session_id in target.sessions for target in self._targets.values())
        if has_place and session.target_id is None and not session.is_finished:
            self._reopen(session)
