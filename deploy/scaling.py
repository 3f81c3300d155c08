"""Number of actors of each role: adding, draining and replacing, one at a time."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from outrider.deploy.actor_group import ActorGroup
from outrider.deploy.config import DeployConfig
from outrider.deploy.coordinator_view import CoordinatorView
from outrider.deploy.health import RoleHandle, watch
from outrider.deploy.status import worker_status
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
_END_SLACK_S = 2.0
FIELDS = {Role.COORDINATOR: "coordinators", Role.TARGET: "targets", Role.DRAFT: "draft_workers"}
"""The configuration's fields that count each role."""


class RoleScaler:
    """Changes a deployment's roles; who calls sees to it that one change follows the other.

    Args:
        save: called when something has changed that a successor has to know.
    """

    def __init__(
        self, config: DeployConfig, actors: ActorGroup, view: CoordinatorView, save: Callable[[], None]
    ) -> None:
        self._config, self._actors, self._view, self._save = config, actors, view, save
        self.wanted = {role: getattr(config, field) for role, field in FIELDS.items()}
        self.draft_model: Path | None = None  # checkpoint folder of drafts that are added; None for the configured one
        # Checkpoint folder of all targets since a reload; None for the configured one.
        self.target_model: Path | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}

    def state(self) -> dict[str, Any]:
        """Return the state that `recover` needs, as plain values."""
        return {
            "wanted": {str(role): count for role, count in self.wanted.items()},
            "draft_model": self.draft_model and str(self.draft_model),
            "target_model": self.target_model and str(self.target_model),
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a dead controller."""
        self.wanted = {Role(role): count for role, count in state["wanted"].items()}
        self.draft_model = state["draft_model"] and Path(state["draft_model"])
        self.target_model = state["target_model"] and Path(state["target_model"])

    def check_count(self, role: Role, count: int) -> None:
        """Raise ValueError if this count of a role is too small, or above the configuration's limit."""
        least, most = (0, None) if role is Role.DRAFT else (1, None)
        if role is Role.DRAFT and self._config.max_drafts is not None:
            least, most = self._config.min_drafts, self._config.max_drafts
        if count < least or (most is not None and count > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(f"{role}: {count} asked for, {bounds} needed")

    def look_after(self, handle: RoleHandle) -> None:
        """Watch an actor from now on."""
        self._watches[handle.name] = asyncio.create_task(watch(handle, self._config))

    async def resize(self, role: Role, count: int) -> None:
        """Have so many of a role; WorkerUnavailable, and as many as before, where no node has what one more needs."""
        before, self.wanted[role] = self.wanted[role], count
        present = self._actors.of(role)
        try:
            while len(self._actors.of(role)) < count:
                self.look_after(await self._actors.add(role, model=self.draft_model if role is Role.DRAFT else None))
        except WorkerUnavailable:
            self.wanted[role] = before
            raise
        # Those with the least to do go first, of these the youngest.
        present.reverse()
        idle_first = sorted(present, key=self._view.sessions)
        await asyncio.gather(*(self.end(handle) for handle in idle_first[: max(0, len(present) - count)]))
        self._save()

    async def settle(self) -> None:
        """End or add the workers that an unfinished or failed change has left over."""
        for role, count in self.wanted.items():
            try:
                if len(self._actors.of(role)) != count:
                    await self.resize(role, count)
            except WorkerUnavailable as error:
                logger.warning("there should be %d of %s: %s", count, role, error)

    async def succeed(self, old: RoleHandle, model: Path | None) -> RoleHandle:
        """A new worker in the place of `old`, which goes when the new one serves, or before where there is no room.

        Raises:
            WorkerUnavailable: the new one does not serve; it has been taken away again.
        """
        has_room = self._actors.has_room(old.role)
        if not has_room and old.role is Role.TARGET and len(self._actors.of(Role.TARGET)) == 1:
            raise WorkerUnavailable(f"{old.name} is the only target, and there is no room for another beside it")
        if not has_room:
            await self.end(old)
        new = None
        try:
            new = await self._actors.add(old.role, model=model)
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._serving(new)
        except (TimeoutError, WorkerUnavailable) as error:
            if new is not None:
                await self._actors.end(new, timeout_s=self._config.stop_timeout_s)
            if not has_room:
                self.look_after(await self._actors.add(old.role, model=old.model))
            reason = str(error) or f"not serving after {self._config.start_timeout_s:g} s"
            raise WorkerUnavailable(f"{old.name} was not replaced: {reason}") from error
        self.look_after(new)
        if has_room:
            await self.end(old)
        return new

    async def end(self, handle: RoleHandle, *, timeout_s: float | None = None) -> None:
        """Let a worker finish its work, and end it, by default within a little more than `stop_timeout_s`."""
        if timeout_s is None:
            timeout_s = self._config.stop_timeout_s + _END_SLACK_S
        if (watching := self._watches.pop(handle.name, None)) is not None:
            watching.cancel()
        await self._actors.end(handle, timeout_s=timeout_s)
        self._save()

    async def listening(self, handle: RoleHandle) -> None:
        """Wait until an actor's server listens; raise as `refresh` does."""
        await self.refresh(handle)
        while handle.report is None or handle.report.address is None:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.refresh(handle)

    async def _serving(self, handle: RoleHandle) -> None:
        await self.listening(handle)
        while worker_status(handle, self._view)["state"] != "serving":
            await asyncio.sleep(POLL_INTERVAL_S)
            # One that listened may still be refused by a coordinator, and then says why.
            await asyncio.gather(self.refresh(handle), self._view.ask())

    async def refresh(self, handle: RoleHandle) -> None:
        """Ask an actor how it is; WorkerUnavailable where it failed, with its reason."""
        full = f"{self._config.name}/{handle.name}"
        try:
            handle.note(await handle.actor.report.remote())
        except ray.exceptions.RayError as error:
            raise WorkerUnavailable(f"{full} could not be started: {error}") from error
        assert handle.report is not None
        if handle.report.failure is not None:
            raise WorkerUnavailable(f"{full} could not serve: {handle.report.failure}")


def role_named(name: str) -> Role:
    """Return the role that an operator means; ValueError where a deployment has none of this name."""
    try:
        role = Role(name)
    except ValueError:
        role = Role.CLIENT
    if role not in FIELDS:
        raise ValueError(f"{name}: no role of a deployment; there are {', '.join(FIELDS)}")
    return role
