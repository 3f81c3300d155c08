"""The target workers of a coordinator: each has a lane, a loop that keeps it busy, and a watch over its steps."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.shared_places import SharedPlaces
from outrider.coordinator.watchdog import watch_steps
from outrider.log_output import about

if TYPE_CHECKING:
    from outrider.coordinator.draft_peer import DraftPeer
    from outrider.coordinator.verify_loop import SessionOwner, VerifyLoop

logger = logging.getLogger(__name__)


class Targets:
    """Target workers.

    Args:
        config: see there.
        lanes: by worker id; they are added and removed here.
        loop_type: of their loops.
        drafts: by worker id; a live view.
        owner: of the sessions.

    Attributes:
        places: at them, by worker id.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        lanes: dict[str, TargetLane],
        loop_type: "type[VerifyLoop]",
        drafts: "Mapping[str, DraftPeer]",
        owner: "SessionOwner",
    ) -> None:
        self._config, self._loop_type, self._drafts, self._owner = config, loop_type, drafts, owner
        self._lanes = lanes
        self.places: dict[str, SharedPlaces] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def add(
        self,
        lane: TargetLane,
        places: SharedPlaces,
        *,
        on_failure: Callable[[str], None],
        on_hang: Callable[[str], None],
    ) -> None:
        """Begins a target's loop.

        Args:
            lane: of the target.
            places: at it.
            on_failure: called with the reason when the loop fails.
            on_hang: called with the reason when a step does not come back.
        """
        worker_id = lane.worker_id
        self._lanes[worker_id], self.places[worker_id] = lane, places
        verify = self._loop_type(lane, self._config, self._drafts, self._owner)
        loop = self._loops[worker_id] = asyncio.create_task(verify.run(), name=f"verify {worker_id}")
        loop.add_done_callback(functools.partial(self._on_loop_done, worker_id, on_failure))
        watch = watch_steps(lane, least_s=self._config.step_timeout_s, on_hang=on_hang)
        self._watches[worker_id] = asyncio.create_task(watch, name=f"watch {worker_id}")

    @staticmethod
    def _on_loop_done(worker_id: str, on_failure: Callable[[str], None], loop: "asyncio.Task[None]") -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            logger.error("the verify loop of %s failed", worker_id, exc_info=error, extra=about(worker_id=worker_id))
            on_failure(f"its verify loop failed: {error}")

    def remove(self, worker_id: str) -> TargetLane | None:
        """Ends a target's loop; its lane, if there is such a target."""
        lane = self._lanes.pop(worker_id, None)
        if lane is None:
            return None
        # A result that comes before the loop has ended is nobody's.
        lane.link.on_result = None
        loop = self._loops.pop(worker_id)
        if loop is not asyncio.current_task():
            loop.cancel()
        self._watches.pop(worker_id).cancel()
        del self.places[worker_id]
        return lane

    @property
    def tasks(self) -> list["asyncio.Task[None]"]:
        """All loops and watches."""
        return [*self._loops.values(), *self._watches.values()]
