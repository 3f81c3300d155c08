"""What becomes of a session that its target has lost, refused, or has no room for."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.coordinator import clock
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.messages import FaultKind, SessionFault
from outrider.coordinator.session import Session
from outrider.coordinator.shared_places import SharedPlaces
from outrider.errors import FieldViolation, InvalidRequest, Overloaded, WeightsReplaced, WorkerUnavailable

if TYPE_CHECKING:
    from outrider.coordinator.totals import Totals

logger = logging.getLogger(__name__)

# A worker's error of a session (a lost state, say) is answered by opening it anew; the same again is given up.
MAX_REOPENINGS = 2
# How long a session that a full target turned away waits before it asks again.
_NO_ROOM_PAUSE_NS = 50_000_000


class SessionFaults:
    """Answers faults of sessions; what went wrong with one is forgotten when it has emitted tokens again.

    Args:
        config: see there.
        lanes: targets by worker id; a live view.
        places: at the targets, by worker id; a live view.
        totals: where reopenings are counted.
        move: takes sessions away from a lane, to be placed elsewhere.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        lanes: Mapping[str, TargetLane],
        places: Mapping[str, SharedPlaces],
        totals: "Totals",
        move: Callable[[TargetLane, Sequence[Session]], None],
    ) -> None:
        self._config, self._lanes, self._places, self._totals, self._move = config, lanes, places, totals, move
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
            self._reopen(session, fault.message)

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

    def _reopen(self, session: Session, reason: str) -> None:
        """It is opened anew with its next batch, unless that has not helped before."""
        count = self._reopenings[session.session_id] = self._reopenings.get(session.session_id, 0) + 1
        if count > MAX_REOPENINGS:
            message = f"the target worker cannot serve this request: {reason}"
            session.generation.abort(WorkerUnavailable(message))
            return
        self._totals.serving.reopened += 1
        logger.warning("session %d is opened anew: %s", session.session_id, reason, extra=session.ids)

    def _wait_for_room(self, session: Session, reason: str) -> None:
        """The target is full with others' sessions: this one rests for a moment, then asks again, or asks another."""
        lanes = list(self._lanes.values())
        others = any(held is not session for lane in lanes for held in lane.sessions.values()) or any(
            self._places[lane.worker_id].has_others for lane in lanes
        )
        now_ns = clock.now_ns()
        since_ns = self._without_room_since.setdefault(session.session_id, now_ns)
        if now_ns - since_ns > self._config.room_wait_s * 1e9 and not others:
            session.generation.abort(Overloaded(reason, retry_after_s=self._config.retry_after_s))
            return
        lane = next((lane for lane in lanes if session.session_id in lane.sessions), None)
        if lane is not None and (places := self._places[lane.worker_id]).is_shared:
            # Other coordinators' sessions have the room.
            is_borrowed = places.note_refusal(len(lane.sessions))
            if is_borrowed or any(other.has_room for other in lanes):
                self._move(lane, [session])
                self._without_room_since[session.session_id] = since_ns
                return
        session.rests_until_ns = now_ns + _NO_ROOM_PAUSE_NS
