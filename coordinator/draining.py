"""Empties a target that is to go: its sessions move to others as these have room, or end where they are."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from outrider.coordinator import clock
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.session import Session

_LOOK_S = 0.005
# A session that may leave is in no further batch here; should its place elsewhere be taken meanwhile, it goes on here.
_KEPT_BACK_NS = 50_000_000


async def empty(
    lane: TargetLane, lanes: Mapping[str, TargetLane], *, move: Callable[[TargetLane, Sequence[Session]], None]
) -> None:
    """Returns when no session is left at the target, or the target itself is gone.

    Args:
        lane: of the target; it takes no new sessions already.
        lanes: of all targets; a live view.
        move: takes sessions that are not in flight away from a lane.
    """
    while lane.sessions and lanes.get(lane.worker_id) is lane:
        room = sum(other.room for other in lanes.values())
        leaving = list(lane.sessions.values())[:room]
        for session in leaving:
            session.rests_until_ns = clock.now_ns() + _KEPT_BACK_NS
        move(lane, [session for session in leaving if session.flight is None])
        await asyncio.sleep(_LOOK_S)
