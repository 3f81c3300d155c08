"""Coordinators' view of a deployment: who serves, and the demand."""

import asyncio
from typing import Any

import ray
import ray.exceptions

from outrider.deploy.actor_group import ActorGroup
from outrider.deploy.health import RoleHandle
from outrider.security.roles import Role
from outrider.v1 import generation_pb2

INFO_TIMEOUT_S = 2.0


class CoordinatorView:
    """The latest answer of each coordinator."""

    def __init__(self, actors: ActorGroup) -> None:
        self._actors = actors
        self.infos: dict[str, generation_pb2.ServerInfo] = {}  # by endpoint; those that did not answer are missing

    async def ask(self) -> None:
        """Ask all coordinators."""
        handles = self._actors.of(Role.COORDINATOR)
        answers = await asyncio.gather(*(_server_info(handle) for handle in handles))
        self.infos = {
            handle.endpoint: info
            for handle, info in zip(handles, answers, strict=True)
            if info is not None and handle.endpoint is not None
        }

    def answers(self, endpoint: str | None) -> bool:
        """True if a coordinator answered."""
        return endpoint in self.infos

    def of(self, address: str | None) -> list[generation_pb2.WorkerStatus]:
        """One entry a coordinator that knows the worker of this address: the newest, if it has left and come again."""
        known = ({worker.introduction.address: worker for worker in info.workers} for info in self.infos.values())
        return [workers[address] for workers in known if address in workers]

    def is_everywhere(self, address: str | None) -> bool:
        """True if every coordinator uses the worker of this address."""
        serving = [status for status in self.of(address) if status.state == "serving"]
        return 0 < len(self._actors.endpoints) == len(serving)

    def sessions(self, handle: RoleHandle) -> int:
        """Sessions that run at a worker, or of a coordinator."""
        if handle.role is Role.COORDINATOR:
            info = self.infos.get(handle.endpoint or "")
            return info.running_sessions if info is not None else 0
        address = handle.report and handle.report.address
        return max((status.load.sessions for status in self.of(address)), default=0)

    def totals(self) -> list[dict[str, Any]]:
        """Counters of each coordinator that answered."""
        return [
            {
                "endpoint": endpoint,
                "version": info.version,
                "uptime_s": info.uptime_s,
                "running_sessions": info.running_sessions,
                "waiting_requests": info.waiting_requests,
                "requests_total": info.requests_total,
                "emitted_tokens_total": info.emitted_tokens_total,
                "acceptance_length": info.speculation.acceptance_length,
            }
            for endpoint, info in self.infos.items()
        ]


async def _server_info(handle: RoleHandle) -> generation_pb2.ServerInfo | None:
    if handle.is_homeless:
        return None
    try:
        async with asyncio.timeout(INFO_TIMEOUT_S):
            packed = await handle.actor.server_info.remote()
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return None if packed is None else generation_pb2.ServerInfo.FromString(packed)
