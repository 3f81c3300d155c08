"""Starts elsewhere what ran on a machine that has died, and what Ray has given up.

Which machines have died is asked of them: Ray itself takes some 15 seconds to notice.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.deploy import placement
from outrider.deploy.actor_group import ActorGroup
from outrider.deploy.config import DeployConfig
from outrider.deploy.health import RoleHandle
from outrider.deploy.placement import Probe
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role

logger = logging.getLogger(__name__)

# Of a node that refuses connections Ray's process has ended, and what comes after it is another node. One look may
# have met a process that was about to listen.
REFUSED_TIMEOUT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Outcome of a look at the machines."""

    known: Mapping[str, str]  # address by id of the nodes that Ray takes for alive
    silent: frozenset[str]  # of those, the ids of the ones that have not answered for too long


class Machines:
    """Looks at the machines, and remembers since when one has not answered."""

    def __init__(self, *, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s, self._clock = silence_s, clock
        self._silent_since: dict[str, float] = {}
        self._refused_since: dict[str, float] = {}

    async def look(self) -> Seen:
        """Ask every node that Ray takes for alive."""
        nodes = await asyncio.to_thread(placement.living_nodes)
        probes = await asyncio.gather(*(placement.probe(node) for node in nodes))
        found = dict(zip((node.node_id for node in nodes), probes, strict=True))
        self._note(self._silent_since, found, {Probe.SILENT, Probe.REFUSES})
        self._note(self._refused_since, found, {Probe.REFUSES})
        known = {node.node_id: node.address for node in nodes}
        return Seen(known=known, silent=frozenset(filter(self._is_dead, found)))

    def _note(self, since: dict[str, float], found: dict[str, Probe], kinds: set[Probe]) -> None:
        now_s = self._clock()
        for node_id in [node_id for node_id in since if found.get(node_id) not in kinds]:
            del since[node_id]  # it answers, or Ray has noticed too
        for node_id, probe in found.items():
            if probe in kinds:
                since.setdefault(node_id, now_s)

    def _is_dead(self, node_id: str) -> bool:
        now_s = self._clock()
        silent_s = now_s - self._silent_since.get(node_id, now_s)
        refused_s = now_s - self._refused_since.get(node_id, now_s)
        return silent_s > self._silence_s or refused_s > min(REFUSED_TIMEOUT_S, self._silence_s)


class NodeFailover:
    """Watches the machines.

    Args:
        is_serving: whether the deployment serves: before and after that nothing is moved.
    """

    def __init__(self, config: DeployConfig, actors: ActorGroup, *, is_serving: Callable[[], bool]) -> None:
        self._config, self._actors, self._is_serving = config, actors, is_serving
        self._machines = Machines(silence_s=config.node_timeout_s)
        # Of every node that was there, by id; ids of those that are not any more.
        self._addresses: dict[str, str] = {}
        self._dead = set[str]()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(self._config.ping_interval_s)
            try:
                seen = await self._machines.look()
                self._actors.silent_nodes = set(seen.silent)
                self._tell_of_dead(seen)
                for handle in self._actors:
                    if self._is_serving() and not handle.is_draining and self._has_to_move(handle, seen):
                        await self._move(handle)
            except Exception:
                # A cluster that loses machines may fail in many ways: the next look is in a second.
                logger.exception("the machines could not be looked at")

    def _tell_of_dead(self, seen: Seen) -> None:
        self._addresses |= seen.known
        dead = {node_id for node_id in self._addresses if node_id in seen.silent or node_id not in seen.known}
        for node_id in dead - self._dead:
            if names := [handle.name for handle in self._actors if handle.node_id == node_id]:
                lost = f"the machine at {self._addresses[node_id]} does not answer"
                self._actors.events.add(f"{lost}: {', '.join(names)} will start on another one")
        self._dead = dead

    def _has_to_move(self, handle: RoleHandle, seen: Seen) -> bool:
        """Return True if Ray will not, or not soon, restart an actor on a node that it knows of."""
        # Of a coordinator that has not reported yet it is known where it has to be.
        node_id = handle.node_id or (handle.placed_on if handle.role is Role.COORDINATOR else None)
        is_off = node_id is not None and node_id not in seen.known and handle.report is None
        if is_off or node_id in seen.silent:
            return True
        # One that `watch` has lost, Ray starts anew as a rule.
        is_lost = handle.report is None and handle.failure is not None
        handle.is_homeless = handle.is_homeless or (is_lost and self._actors.is_gone(handle))
        return handle.is_homeless

    async def _move(self, handle: RoleHandle) -> None:
        reason = "its actor has gone for good" if handle.is_homeless else "its machine does not answer"
        logger.warning("%s is started again: %s", handle.name, reason)
        try:
            await self._actors.move(handle)
            handle.failure = reason
        except WorkerUnavailable as error:
            logger.warning("%s has to wait: %s", handle.name, error)
            handle.failure = str(error)
