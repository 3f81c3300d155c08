"""What a deployment's coordinators say: who serves, and what there is to do."""

import asyncio

import ray
import ray.exceptions

from outrider.deploy.crew import Crew
from outrider.deploy.health import RoleHandle
from outrider.deploy.status import ServedBy
from outrider.security.roles import Role
from outrider.v1 import generation_pb2

INFO_TIMEOUT_S = 2.0


class CoordinatorView:
    """The latest answer of each coordinator.

    Attributes:
        infos: by endpoint; those that did not answer are missing.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.infos: dict[str, generation_pb2.ServerInfo] = {}

    async def ask(self) -> None:
        """Asks all of them."""
        handles = self._crew.of(Role.COORDINATOR)
        answers = await asyncio.gather(*(_server_info(handle) for handle in handles))
        self.infos = {
            handle.endpoint: info
            for handle, info in zip(handles, answers, strict=True)
            if info is not None and handle.endpoint is not None
        }

    def served(self) -> ServedBy:
        """What they said of the workers."""
        return ServedBy(self.infos, self._crew.endpoints)


async def _server_info(handle: RoleHandle) -> generation_pb2.ServerInfo | None:
    if handle.is_homeless:
        return None
    try:
        async with asyncio.timeout(INFO_TIMEOUT_S):
            packed = await handle.actor.server_info.remote()
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return None if packed is None else generation_pb2.ServerInfo.FromString(packed)
