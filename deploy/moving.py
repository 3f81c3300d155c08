"""Starts elsewhere what ran on a machine that has died, and what Ray has given up."""

import asyncio
import logging
from collections.abc import Callable

from outrider.deploy.config import DeployConfig
from outrider.deploy.crew import Crew
from outrider.deploy.health import RoleHandle
from outrider.deploy.machines import Machines, Seen
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role

logger = logging.getLogger(__name__)


class Mover:
    """Watches the machines.

    Args:
        is_serving: whether the deployment serves: before and after that nothing is moved.
    """

    def __init__(self, config: DeployConfig, crew: Crew, *, is_serving: Callable[[], bool]) -> None:
        self._config, self._crew, self._is_serving = config, crew, is_serving
        self._machines = Machines(silence_s=config.node_timeout_s)
        # Of every node that was there, by id; ids of those that are not any more.
        self._addresses: dict[str, str] = {}
        self._dead = set[str]()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._config.ping_interval_s)
            try:
                await self._act(await self._machines.look())
            except Exception:
                # A cluster that loses machines may fail in many ways: the next look is in a second.
                logger.exception("the machines could not be looked at")

    async def _act(self, seen: Seen) -> None:
        self._crew.silent_nodes = set(seen.silent)
        self._tell_of_dead(seen)
        for handle in self._crew:
            if self._is_serving() and not handle.is_draining and self._has_to_move(handle, seen):
                await self._move(handle)

    def _tell_of_dead(self, seen: Seen) -> None:
        self._addresses |= seen.known
        dead = {node_id for node_id in self._addresses if node_id in seen.silent or node_id not in seen.known}
        for node_id in dead - self._dead:
            if names := [handle.name for handle in self._crew if handle.node_id == node_id]:
                lost = f"the machine at {self._addresses[node_id]} does not answer"
                self._crew.events.add(f"{lost}: {', '.join(names)} will start on another one")
        self._dead = dead

    def _has_to_move(self, handle: RoleHandle, seen: Seen) -> bool:
        """Whether Ray will not start an actor anew, or not soon, on one of the nodes that it knows of."""
        # Of a coordinator that has not reported yet it is known where it has to be.
        node_id = handle.node_id or (handle.placed_on if handle.role is Role.COORDINATOR else None)
        is_off = node_id is not None and node_id not in seen.known and handle.report is None
        if is_off or node_id in seen.silent:
            return True
        # One that `watch` has lost, Ray starts anew as a rule.
        is_lost = handle.report is None and handle.failure is not None
        handle.is_homeless = handle.is_homeless or (is_lost and self._crew.is_gone(handle))
        return handle.is_homeless

    async def _move(self, handle: RoleHandle) -> None:
        reason = "its actor has gone for good" if handle.is_homeless else "its machine does not answer"
        logger.warning("%s is started again: %s", handle.name, reason)
        try:
            await self._crew.move(handle)
            handle.failure = reason
        except WorkerUnavailable as error:
            logger.warning("%s has to wait: %s", handle.name, error)
            handle.failure = str(error)
