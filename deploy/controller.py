"""The controller: an actor that owns a deployment's roles, and carries out what operators and demand ask for.

One task looks after each actor (`health.py`), one after the machines, one after demand. All of it lives in one event
loop; what changes the number or the identity of workers happens one thing after the other. The roles outlive this
process: a controller that Ray starts anew finds them by name, and what was wanted in Ray's key-value store.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.experimental import internal_kv

from outrider.deploy import placement
from outrider.deploy.config import DeployConfig
from outrider.deploy.crew import Crew
from outrider.deploy.health import RoleHandle, watch
from outrider.deploy.roles import Roles
from outrider.deploy.status import ServedBy, worker_status
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role
from outrider.v1 import generation_pb2

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
INFO_TIMEOUT_S = 2.0
KV_NAMESPACE = "outrider"
KEPT_DECISIONS = 20
_DOWN, _UP, _SERVING, _STOPPING = "down", "starting", "serving", "stopping"
FIELDS = {Role.COORDINATOR: "coordinators", Role.TARGET: "targets", Role.DRAFT: "drafts"}


@dataclass(frozen=True, kw_only=True)
class Started:
    """How bringing a deployment up has ended.

    Attributes:
        endpoints: host:port of the coordinators.
        failure: why it did not come up; None where it did.
    """

    endpoints: list[str]
    failure: str | None


class Controller:
    """Starts, watches, scales, drains and replaces the roles of one deployment.

    Args:
        config: of the deployment.
        roles: what the actors run.
        home: id of the node that the deployment was started on.
        owned: end the deployment when nobody has called `keep` for a while.
    """

    def __init__(self, config: DeployConfig, roles: Roles, *, home: str, owned: bool) -> None:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s controller %(levelname)s %(message)s"
        )
        self._config = config
        self._owned = owned
        self._self = ray.get_runtime_context().current_actor
        self._crew = Crew(config, roles, home=home, controller=self._self)
        self._wanted = {Role(role): getattr(config, field) for role, field in FIELDS.items()}
        self._draft_model: Path | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._infos: dict[str, generation_pb2.ServerInfo] = {}
        self._latest: dict[str, Any] | None = None
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._changing = asyncio.Lock()
        self._kept_s = self._started_s = time.monotonic()
        self._saved = b""
        self._state, self._failure = _UP, None
        self._up = asyncio.create_task(self._begin())
        self._tasks = [asyncio.create_task(loop) for loop in (self._watch_nodes(), self._observe(), self._expire())]

    # ---------------------------------------------------------------------------------------------------- what it says

    async def started(self) -> Started:
        """Waits until every worker serves, or until it is clear that one cannot."""
        await asyncio.wait({self._up})
        failure = "it was ended before it served" if self._up.cancelled() else self._failure
        return Started(endpoints=self._crew.endpoints, failure=failure)

    async def pid(self) -> int:
        """Of its process, new after every restart."""
        return os.getpid()

    async def endpoints(self) -> list[str]:
        """host:port of every coordinator, for clients."""
        return self._crew.endpoints

    async def worker_endpoints(self) -> list[str]:
        """host:port of every coordinator, for workers."""
        return self._crew.worker_endpoints

    async def status(self) -> dict[str, Any]:
        """What `outrider status --json` prints; the keys stay."""
        config, served = self._config, ServedBy(self._infos, self._crew.endpoints)
        return {
            "name": config.name,
            "state": self._state,
            "uptime_s": time.monotonic() - self._started_s,
            "endpoints": self._crew.endpoints,
            "wanted": {str(role): count for role, count in self._wanted.items()},
            "workers": [worker_status(handle, served) for handle in self._crew],
            "autoscaler": {
                "enabled": config.max_drafts is not None,
                "min_drafts": config.min_drafts,
                "max_drafts": config.max_drafts,
                "latest": self._latest,
                "decisions": list(self._decisions),
            },
            "coordinators": served.totals(),
        }

    # ---------------------------------------------------------------------------------------------------- what it does

    async def keep(self) -> None:
        """Called every second by a process that the deployment belongs to."""
        self._kept_s = time.monotonic()

    async def scale(self, counts: Mapping[str, int]) -> None:
        """So many of each role from now on; returns when those too many have gone, those new may still load.

        Raises:
            ValueError: a count out of range, or an unknown role.
            WorkerUnavailable: no node has what one more needs, or the deployment does not serve.
        """
        wanted = {_role(role): count for role, count in counts.items()}
        for role, count in wanted.items():
            self._check_count(role, count)
        async with self._change():
            for role, count in wanted.items():
                await self._resize(role, count)

    async def drain(self, name: str) -> None:
        """Lets one worker finish and takes it away for good; returns when it has gone.

        Raises:
            ValueError: there is no such worker, or it is one too few without it.
            WorkerUnavailable: the deployment does not serve.
        """
        async with self._change():
            handle = self._crew.named(name)
            if handle is None:
                raise ValueError(f"no worker is called {name}; there are {', '.join(own.name for own in self._crew)}")
            # One that drains already was counted: of a controller that died meanwhile Ray asks again.
            if not handle.is_draining:
                self._check_count(handle.role, self._wanted[handle.role] - 1)
                self._wanted[handle.role] -= 1
            await self._end(handle)

    async def replace(self, role: str, model: str | None = None) -> list[str]:
        """Puts a new worker in the place of each, one after the other: the new one serves before the old one goes.

        Where there is no room for one more, the old one goes first: without a draft there is only less speed.

        Args:
            role: draft, or target.
            model: checkpoint folder of the new drafts; default what each had.

        Returns:
            Names of the new workers.

        Raises:
            ValueError: of a role that cannot be replaced so.
            WorkerUnavailable: a new one does not serve, or the deployment does not; a new one is taken away again, and
                those not replaced yet stay.
        """
        wanted = _role(role)
        if wanted is Role.COORDINATOR or (wanted is Role.TARGET and model is not None):
            raise ValueError(f"{role}: draft (with another model if asked) or target (with the same) can be replaced")
        fresh = []
        async with self._change():
            for old in self._crew.of(wanted):
                new = await self._succeed(old, Path(model) if model is not None else old.model)
                fresh.append(new.name)
            if model is not None:
                self._draft_model = Path(model)
        return fresh

    async def down(self) -> None:
        """Lets the coordinators drain, then the workers, and forgets the deployment; kill this actor then."""
        self._state = _STOPPING
        self._crew.is_ending = True
        others = {self._up, *self._tasks} - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # In this order: requests that run go on at their workers until their coordinator has drained.
        for roles in ({Role.COORDINATOR}, {Role.TARGET, Role.DRAFT}):
            endings = (self._end(handle) for handle in self._crew if handle.role in roles)
            for error in await asyncio.gather(*endings, return_exceptions=True):
                if error is not None:
                    logger.error("not everything could be ended: %s", error)
        internal_kv._internal_kv_del(self._key, namespace=KV_NAMESPACE)
        self._state = _DOWN

    # -------------------------------------------------------------------------------------------------------- bring up

    async def _begin(self) -> None:
        saved = internal_kv._internal_kv_get(self._key, namespace=KV_NAMESPACE)
        try:
            if saved is not None:
                self._recover(json.loads(saved))
                return
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._bring_up()
        except TimeoutError:
            self._failure = f"not ready after {self._config.start_timeout_s:g} s: {self._waiting_for()}"
        except WorkerUnavailable as error:
            self._failure = str(error)
        except Exception as error:
            logger.exception("the deployment could not be brought up")
            self._failure = f"{type(error).__name__}: {error}"

    async def _bring_up(self) -> None:
        for role, count in self._wanted.items():
            for _ in range(count):
                self._crew.add(role)
        self._save()
        await asyncio.gather(*(self._listening(handle) for handle in self._crew))
        await self._all_serve()
        self._serve()

    def _serve(self) -> None:
        for handle in self._crew:
            self._look_after(handle)
        self._state = _SERVING
        self._save()

    def _recover(self, state: dict[str, Any]) -> None:
        logger.warning("taking over from a controller that has died")
        self._wanted = {Role(role): count for role, count in state["wanted"].items()}
        self._draft_model = state["draft_model"] and Path(state["draft_model"])
        self._decisions.extend(state["decisions"])
        self._crew.recover(state["crew"])
        self._serve()
        for handle in self._crew:
            if handle.is_draining:
                self._end_soon(handle)

    @property
    def _key(self) -> bytes:
        return f"deployment/{self._config.name}".encode()

    def _save(self) -> None:
        """Keeps what a successor needs; cheap where nothing has changed. Of what has ended nothing is kept."""
        if self._state == _DOWN:
            return
        state = {
            "wanted": {str(role): count for role, count in self._wanted.items()},
            "draft_model": self._draft_model and str(self._draft_model),
            "decisions": list(self._decisions),
            "crew": self._crew.state(),
        }
        packed = json.dumps(state).encode()
        if packed != self._saved:
            internal_kv._internal_kv_put(self._key, packed, namespace=KV_NAMESPACE)
            self._saved = packed

    async def _listening(self, handle: RoleHandle) -> None:
        """Waits until an actor's server listens; raises as `_refresh` does."""
        while handle.report is None or handle.report.address is None:
            await self._refresh(handle)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _all_serve(self) -> None:
        """Waits until every coordinator can use every worker."""
        while not all(worker_status(handle, self._served())["state"] == "serving" for handle in self._crew):
            await asyncio.sleep(POLL_INTERVAL_S)
            # One that listened may still be refused by the coordinator, and then says why.
            await asyncio.gather(*(self._refresh(handle) for handle in self._crew), self._ask_coordinators())

    async def _refresh(self, handle: RoleHandle) -> None:
        """Asks an actor how it is.

        Raises:
            WorkerUnavailable: it failed, with its reason.
        """
        full = f"{self._config.name}/{handle.name}"
        try:
            handle.note(await handle.actor.report.remote())
        except ray.exceptions.RayError as error:
            raise WorkerUnavailable(f"{full} could not be started: {error}") from error
        assert handle.report is not None
        if handle.report.failure is not None:
            raise WorkerUnavailable(f"{full} could not serve: {handle.report.failure}")

    def _waiting_for(self) -> str:
        late = [handle.name for handle in self._crew if handle.report is None or handle.report.address is None]
        return ", ".join(late) + " not serving" if late else "a worker has not registered with every coordinator"

    # ------------------------------------------------------------------------------------------------------- the crew

    @contextlib.asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """What operators ask for: one after the other, once the deployment serves and as long as it does.

        Raises:
            WorkerUnavailable: it does not come up, or it ends.
        """
        await asyncio.wait({self._up})
        async with self._changing:
            if self._state != _SERVING:
                raise WorkerUnavailable(f"the deployment {self._config.name} is {self._failure or self._state}")
            yield

    def _check_count(self, role: Role, count: int) -> None:
        least, most = (0, None) if role is Role.DRAFT else (1, None)
        if role is Role.DRAFT and self._config.max_drafts is not None:
            least, most = self._config.min_drafts, self._config.max_drafts
        if count < least or (most is not None and count > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise ValueError(f"{role}: {count} asked for, {bounds} needed")

    async def _resize(self, role: Role, count: int) -> None:
        before, self._wanted[role] = self._wanted[role], count
        present = self._crew.of(role)
        try:
            while len(self._crew.of(role)) < count:
                self._look_after(self._crew.add(role, model=self._draft_model if role is Role.DRAFT else None))
        except WorkerUnavailable:
            self._wanted[role] = before
            raise
        served = self._served()
        # Those with the least to do go first, of these the youngest.
        present.reverse()
        idle_first = sorted(present, key=served.sessions)
        await asyncio.gather(*(self._end(handle) for handle in idle_first[: max(0, len(present) - count)]))
        self._save()

    async def _succeed(self, old: RoleHandle, model: Path | None) -> RoleHandle:
        """A new worker in the place of `old`."""
        has_room = self._crew.has_room(old.role)
        if not has_room and old.role is Role.TARGET and len(self._crew.of(Role.TARGET)) == 1:
            raise WorkerUnavailable(f"{old.name} is the only target, and there is no room for another beside it")
        if not has_room:
            await self._end(old)
        new = None
        try:
            new = self._crew.add(old.role, model=model)
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._listening(new)
                while worker_status(new, self._served())["state"] != "serving":
                    await asyncio.sleep(POLL_INTERVAL_S)
                    await asyncio.gather(self._refresh(new), self._ask_coordinators())
        except (TimeoutError, WorkerUnavailable) as error:
            if new is not None:
                await self._crew.end(new, timeout_s=self._config.stop_timeout_s)
            if not has_room:
                self._look_after(self._crew.add(old.role, model=old.model))
            reason = str(error) or f"not serving after {self._config.start_timeout_s:g} s"
            raise WorkerUnavailable(f"{old.name} was not replaced: {reason}") from error
        self._look_after(new)
        if has_room:
            await self._end(old)
        return new

    def _look_after(self, handle: RoleHandle) -> None:
        self._watches[handle.name] = asyncio.create_task(watch(handle, self._config))

    async def _end(self, handle: RoleHandle) -> None:
        if (watching := self._watches.pop(handle.name, None)) is not None:
            watching.cancel()
        await self._crew.end(handle, timeout_s=self._config.stop_timeout_s)
        self._save()

    def _end_soon(self, handle: RoleHandle) -> None:
        self._tasks.append(asyncio.create_task(self._end(handle)))

    # ----------------------------------------------------------------------------------------------------------- loops

    async def _watch_nodes(self) -> None:
        """Starts elsewhere what ran on a machine that has died: Ray itself would take some 15 seconds to notice."""
        silent_since: dict[str, float] = {}
        while True:
            await asyncio.sleep(self._config.ping_interval_s)
            try:
                await self._probe_nodes(silent_since)
            except Exception:
                # A cluster that loses machines may fail in many ways: the next look is in a second.
                logger.exception("the machines could not be looked at")

    async def _probe_nodes(self, silent_since: dict[str, float]) -> None:
        nodes = await asyncio.to_thread(placement.living_nodes)
        answers = await asyncio.gather(*(placement.answers(node) for node in nodes))
        now_s = time.monotonic()
        known = {node.node_id for node in nodes}
        for node_id in silent_since.keys() - known:
            del silent_since[node_id]  # Ray has noticed too
        for node, has_answered in zip(nodes, answers, strict=True):
            if has_answered:
                silent_since.pop(node.node_id, None)
            else:
                silent_since.setdefault(node.node_id, now_s)
        self._crew.silent_nodes = {
            node_id for node_id, since_s in silent_since.items() if now_s - since_s > self._config.node_timeout_s
        }
        for handle in self._crew:
            if self._state == _SERVING and not handle.is_draining and self._has_to_move(handle, known):
                self._move(handle)

    def _has_to_move(self, handle: RoleHandle, known: set[str]) -> bool:
        """Whether Ray will not start an actor anew, or not soon, on one of the nodes that it knows of."""
        # Of a coordinator that has not reported yet it is known where it has to be.
        node_id = handle.node_id or (handle.placed_on if handle.role is Role.COORDINATOR else None)
        is_off = node_id is not None and node_id not in known and handle.report is None
        if is_off or node_id in self._crew.silent_nodes:
            return True
        # One that `watch` has lost, Ray starts anew as a rule.
        is_lost = handle.report is None and handle.failure is not None
        handle.is_homeless = handle.is_homeless or (is_lost and self._crew.is_gone(handle))
        return handle.is_homeless

    def _move(self, handle: RoleHandle) -> None:
        reason = "its actor has gone for good" if handle.is_homeless else "its machine does not answer"
        logger.warning("%s is started again: %s", handle.name, reason)
        try:
            self._crew.move(handle)
            handle.failure = reason
        except WorkerUnavailable as error:
            logger.warning("%s has to wait: %s", handle.name, error)
            handle.failure = str(error)

    async def _observe(self) -> None:
        """Asks the coordinators every second how things are, and lets demand decide how many drafts there are."""
        scaler = None
        if self._config.max_drafts is not None:
            from outrider.deploy.autoscaler import Autoscaler
            from outrider.deploy.autoscaler_metrics import AutoscalerMetrics

            scaler, metrics = Autoscaler.of(self._config), AutoscalerMetrics(self._config.name)
        while True:
            await asyncio.sleep(1.0)
            try:
                await self._ask_coordinators()
                if self._state == _SERVING:
                    await self._settle()
                    if scaler is not None and not self._changing.locked():
                        infos = list(self._infos.values())
                        decision = scaler.decide(infos, drafts=self._wanted[Role.DRAFT], now_s=time.monotonic())
                        metrics.note(decision)
                        self._latest = decision.as_dict()
                        await self._apply(decision)
                    self._save()
            except Exception:
                # Whatever a coordinator or Ray says that was not expected: the next look is in a second.
                logger.exception("the coordinators could not be looked at")

    async def _apply(self, decision: Any) -> None:
        before = self._wanted[Role.DRAFT]
        if decision.drafts == before:
            return
        logger.warning("%d drafts instead of %d: %s", decision.drafts, before, decision.reason)
        self._decisions.append({"at_s": time.time(), "before": before, **decision.as_dict()})
        async with self._changing:
            await self._resize(Role.DRAFT, decision.drafts)

    async def _settle(self) -> None:
        """Ends or adds what a change has left over that its controller did not live to finish, or that failed."""
        if self._changing.locked():
            return
        async with self._changing:
            for role, count in self._wanted.items():
                try:
                    if len(self._crew.of(role)) != count:
                        await self._resize(role, count)
                except WorkerUnavailable as error:
                    logger.warning("there should be %d of %s: %s", count, role, error)

    async def _ask_coordinators(self) -> None:
        handles = self._crew.of(Role.COORDINATOR)
        answers = await asyncio.gather(*(_server_info(handle) for handle in handles))
        self._infos = {
            handle.endpoint: info
            for handle, info in zip(handles, answers, strict=True)
            if info is not None and handle.endpoint is not None
        }

    def _served(self) -> ServedBy:
        return ServedBy(self._infos, self._crew.endpoints)

    async def _expire(self) -> None:
        """Ends a deployment that belongs to a process, when that process has."""
        if not self._owned:
            return
        while True:
            left_s = self._kept_s + self._config.owner_timeout_s - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        logger.warning("the process that this deployment belongs to has gone")
        await self.down()
        ray.kill(self._self, no_restart=True)


async def _server_info(handle: RoleHandle) -> generation_pb2.ServerInfo | None:
    if handle.is_homeless:
        return None
    try:
        async with asyncio.timeout(INFO_TIMEOUT_S):
            packed = await handle.actor.server_info.remote()
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return None if packed is None else generation_pb2.ServerInfo.FromString(packed)


def _role(name: str) -> Role:
    try:
        role = Role(name)
    except ValueError:
        role = Role.CLIENT
    if role not in FIELDS:
        raise ValueError(f"{name}: no role of a deployment; there are {', '.join(FIELDS)}")
    return role
