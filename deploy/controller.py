"""The controller: an actor that owns a deployment's roles, and carries out what operators and demand ask for.

One task looks after each actor (`health.py`), one after the machines (`failover.py`), one after demand (`demand.py`).
All of it lives in one event loop; what changes the number or the identity of workers (`scaling.py`) happens one thing
after the other. The roles outlive this process: a controller that Ray starts anew finds them by name, and what was
wanted in Ray's key-value store.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv

from outrider.coordinator.commands.reload import InFlight, outcome_dict, reload_weights
from outrider.deploy.actor_group import ActorGroup
from outrider.deploy.actors import start_log
from outrider.deploy.config import DeployConfig
from outrider.deploy.connection import NAMESPACE
from outrider.deploy.coordinator_view import CoordinatorView
from outrider.deploy.demand import Demand
from outrider.deploy.failover import NodeFailover
from outrider.deploy.roles import Roles, tls_of
from outrider.deploy.scaling import POLL_INTERVAL_S, RoleScaler, role_named
from outrider.deploy.status import worker_status
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role

logger = logging.getLogger(__name__)

_DOWN, _UP, _SERVING, _STOPPING = "down", "starting", "serving", "stopping"


class SavedState:
    """The state of one deployment, of plain values."""

    def __init__(self, name: str) -> None:
        self._key = f"deployment/{name}".encode()
        self._written = b""

    def read(self) -> dict[str, Any] | None:
        """The last thing written; None where nothing was."""
        packed = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        return None if packed is None else json.loads(packed)

    def write(self, state: dict[str, Any]) -> None:
        """Cheap where nothing has changed."""
        packed = json.dumps(state).encode()
        if packed != self._written:
            internal_kv._internal_kv_put(self._key, packed, namespace=NAMESPACE)
            self._written = packed

    def forget(self) -> None:
        """Nothing is kept of what has ended."""
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)


class Controller:
    """Starts, watches, scales, drains and replaces the roles of one deployment.

    Args:
        home: id of the node that the deployment was started on.
        owned: end the deployment when nobody has called `keep` for a while; otherwise only until it serves.
    """

    def __init__(self, config: DeployConfig, roles: Roles, *, home: str, owned: bool) -> None:
        start_log(config, "controller")
        self._config = config
        self._owned = owned
        self._self = ray.get_runtime_context().current_actor
        self._actors = ActorGroup(config, roles, home=home, controller=self._self)
        self._view = CoordinatorView(self._actors)
        self._scaler = RoleScaler(config, self._actors, self._view, self._save)
        self._demand = Demand(config)
        self._changing = asyncio.Lock()
        self._kept_s = self._started_s = time.monotonic()
        self._saved = SavedState(config.name)
        self._state, self._failure = _UP, None
        failover = NodeFailover(config, self._actors, is_serving=lambda: self._state == _SERVING)
        self._up = asyncio.create_task(self._begin())
        self._tasks = [asyncio.create_task(loop) for loop in (failover.run(), self._observe(), self._expire())]

    # ---------------------------------------------------------------------------------------------------- what it says

    async def started(self) -> str | None:
        """Wait until every worker serves; raise an error that says why if one cannot."""
        await asyncio.wait({self._up})
        return "it was ended before it served" if self._up.cancelled() else self._failure

    async def pid(self) -> int:
        """Process id, new after every restart."""
        return os.getpid()

    async def worker_endpoints(self) -> list[str]:
        """host:port of every coordinator, for workers."""
        return self._actors.worker_endpoints

    async def status(self) -> dict[str, Any]:
        """Return the data of `outrider status --json`; the keys are stable."""
        return {
            "name": self._config.name,
            "state": self._state,
            "uptime_s": time.monotonic() - self._started_s,
            "endpoints": self._actors.endpoints,
            "shared_endpoints": self._actors.shared_endpoints,
            "http_endpoints": self._actors.http_endpoints,
            "wanted": {str(role): count for role, count in self._scaler.wanted.items()},
            "workers": [worker_status(handle, self._view) for handle in self._actors],
            "autoscaler": self._demand.status(),
            "coordinators": self._view.totals(),
        }

    # ---------------------------------------------------------------------------------------------------- what it does

    async def keep(self, seen: int) -> tuple[int, list[str]]:
        """Renew the lease of the owning process, which calls this every second and has seen the first `seen` events.

        Returns:
            How many it has seen then, and those that are new to it.
        """
        self._kept_s = time.monotonic()
        return self._actors.events.since(seen)

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Set the number of workers of each role; return when surplus ones have gone (new ones may still load).

        Raises:
            ValueError: a count out of range, or an unknown role.
            WorkerUnavailable: no node has what one more needs, or the deployment does not serve.
        """
        wanted = {role_named(role): count for role, count in counts.items()}
        for role, count in wanted.items():
            self._scaler.check_count(role, count)
        async with self._change():
            for role, count in wanted.items():
                await self._scaler.resize(role, count)

    async def drain(self, name: str) -> None:
        """Let one worker finish and take it away for good; return when it has gone.

        Raises:
            ValueError: there is no such worker, or it is one too few without it.
            WorkerUnavailable: the deployment does not serve.
        """
        async with self._change():
            handle = self._actors.named(name)
            if handle is None:
                raise ValueError(f"no worker is called {name}; there are {', '.join(own.name for own in self._actors)}")
            # One that drains already was counted: of a controller that died meanwhile Ray asks again.
            if not handle.is_draining:
                self._scaler.check_count(handle.role, self._scaler.wanted[handle.role] - 1)
                self._scaler.wanted[handle.role] -= 1
            await self._scaler.end(handle)

    async def replace(self, role: str, model: str | None = None) -> list[str]:
        """Put a new worker in the place of each, one after the other: the new one serves before the old one goes.

        Where there is no room for one more, the old one goes first: without a draft there is only less speed.

        Args:
            model: checkpoint folder of the new drafts; default what each had.

        Returns:
            Names of the new workers.

        Raises:
            ValueError: of a role that cannot be replaced so.
            WorkerUnavailable: a new one does not serve, or the deployment does not; a new one is taken away again, and
                those not replaced yet stay.
        """
        wanted = role_named(role)
        if wanted is Role.COORDINATOR or (wanted is Role.TARGET and model is not None):
            raise ValueError(f"{role}: draft (with another model if asked) or target (with the same) can be replaced")
        fresh = []
        async with self._change():
            for old in self._actors.of(wanted):
                new = await self._scaler.succeed(old, Path(model) if model is not None else old.model)
                fresh.append(new.name)
            if model is not None:
                self._scaler.draft_model = Path(model)
        return fresh

    async def reload(self, path: str, in_flight: str, timeout_s: float) -> dict[str, Any]:
        """Have all targets run with the weights of another checkpoint folder, those that start later as well.

        Returns:
            As `outrider reload --json` prints it.

        Raises:
            WorkerRefused: a target cannot run with them; nothing has changed.
            WorkerUnavailable: it could not be done in time, or the deployment does not serve.
        """
        async with self._change():
            outcome = await reload_weights(
                self._actors.worker_endpoints,
                path,
                in_flight=InFlight(in_flight),
                tls=tls_of(self._config, Role.COORDINATOR),
                timeout_s=timeout_s,
                tell=logger.info,
            )
            if len(outcome.failed) < len(outcome.targets):
                self._scaler.target_model = Path(path)
                self._save()
        return outcome_dict(outcome)

    async def target_model(self) -> str | None:
        """Checkpoint folder that targets start with, where a reload has changed it."""
        return self._scaler.target_model and str(self._scaler.target_model)

    async def down(self, timeout_s: float | None = None) -> None:
        """Let the coordinators drain, then the workers, and forget the deployment; kill this actor then.

        Args:
            timeout_s: that the coordinators get, and then the workers; default `stop_timeout_s`.
        """
        self._state = _STOPPING
        self._actors.is_ending = True
        others = {self._up, *self._tasks} - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # In this order: requests that run go on at their workers until their coordinator has drained.
        for roles in ({Role.COORDINATOR}, {Role.TARGET, Role.DRAFT}):
            endings = (self._scaler.end(handle, timeout_s=timeout_s) for handle in self._actors if handle.role in roles)
            for error in await asyncio.gather(*endings, return_exceptions=True):
                if error is not None:
                    logger.error("not everything could be ended: %s", error)
        self._saved.forget()
        self._state = _DOWN

    # -------------------------------------------------------------------------------------------------------- bring up

    async def _begin(self) -> None:
        try:
            if (saved := self._saved.read()) is not None:
                self._recover(saved)
                return
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._bring_up()
        except TimeoutError:
            late = [handle.name for handle in self._actors if handle.report is None or handle.report.address is None]
            missing = ", ".join(late) + " not serving" if late else "a worker has not registered with every coordinator"
            self._failure = f"not ready after {self._config.start_timeout_s:g} s: {missing}"
        except WorkerUnavailable as error:
            self._failure = str(error)
        except Exception as error:
            logger.exception("the deployment could not be brought up")
            self._failure = f"{type(error).__name__}: {error}"

    async def _bring_up(self) -> None:
        for role, count in self._scaler.wanted.items():
            for _ in range(count):
                await self._actors.add(role)
        self._save()
        await asyncio.gather(*(self._scaler.listening(handle) for handle in self._actors))
        await self._all_serve()
        self._serve()

    def _serve(self) -> None:
        for handle in self._actors:
            self._scaler.look_after(handle)
        self._state = _SERVING
        self._save()

    def _recover(self, state: dict[str, Any]) -> None:
        logger.warning("taking over from a controller that has died")
        self._scaler.recover(state)
        self._demand.decisions.extend(state["decisions"])
        self._actors.recover(state["actors"])
        self._serve()
        for handle in self._actors:
            if handle.is_draining:
                self._tasks.append(asyncio.create_task(self._scaler.end(handle)))

    def _save(self) -> None:
        """Store the state that a successor needs; of an ended deployment nothing."""
        if self._state == _DOWN:
            return
        state = {
            **self._scaler.state(),
            "decisions": list(self._demand.decisions),
            "actors": self._actors.state(),
        }
        self._saved.write(state)

    async def _all_serve(self) -> None:
        """Wait until every coordinator can use every worker."""
        while True:
            # One that listened may still be refused by the coordinator, and then says why.
            await asyncio.gather(*(self._scaler.refresh(handle) for handle in self._actors), self._view.ask())
            if all(worker_status(handle, self._view)["state"] == "serving" for handle in self._actors):
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    # ------------------------------------------------------------------------------------------------------- the actors

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Run operators' changes one after the other while the deployment serves.

        Raises:
            WorkerUnavailable: it does not come up, or it ends.
        """
        await asyncio.wait({self._up})
        async with self._changing:
            if self._state != _SERVING:
                raise WorkerUnavailable(f"the deployment {self._config.name} is {self._failure or self._state}")
            yield

    # ----------------------------------------------------------------------------------------------------------- loops

    async def _observe(self) -> None:
        """Ask the coordinators for their state every second, and let demand decide how many drafts there are."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self._view.ask()
                if self._state == _SERVING:
                    await self._adjust()
            except Exception:
                # Whatever a coordinator or Ray says that was not expected: the next look is in a second.
                logger.exception("the coordinators could not be looked at")

    async def _adjust(self) -> None:
        if self._changing.locked():
            return
        async with self._changing:
            await self._scaler.settle()
            wanted = self._scaler.wanted[Role.DRAFT]
            drafts = self._demand.drafts(self._view.infos.values(), now=wanted)
            if drafts != wanted:
                await self._scaler.resize(Role.DRAFT, drafts)
        self._save()

    async def _expire(self) -> None:
        """End a deployment that belongs to a process, when that process has; one left alone has to serve first."""
        while self._owned or self._state != _SERVING:
            left_s = self._kept_s + self._config.owner_timeout_s - time.monotonic()
            if left_s <= 0:
                logger.warning("the process that this deployment belongs to has gone")
                await self.down()
                ray.kill(self._self, no_restart=True)
                return
            await asyncio.sleep(left_s)
