"""A deployment on Ray: a coordinator, target and draft workers as actors, placed, watched and restarted."""

import asyncio
import functools
import logging
import socket
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from outrider.deploy.actors import CoordinatorActor, RoleActor, Serve, ServingWorkers
from outrider.deploy.config import Bind, DeployConfig, amounts, asked_target_gpus, shared_gpus
from outrider.deploy.connection import NAMESPACE, connect
from outrider.deploy.health import RoleHandle, watch
from outrider.deploy.roles import Roles
from outrider.errors import WorkerUnavailable

logger = logging.getLogger(__name__)

START_POLL_INTERVAL_S = 0.1
LOOPBACK = "127.0.0.1"


class Deployment:
    """Starts the roles as actors, keeps them alive, and stops them.

    The actors belong to this process: they end with it, whatever becomes of it.

    Raises (from `start`):
        WorkerUnavailable: a role failed, or took longer than `start_timeout_s`; nothing is left running.
        ConnectionError: no Ray cluster at `ray_address`.
    """

    def __init__(self, config: DeployConfig, *, roles: Roles | None = None) -> None:
        self._config = config
        self._roles = roles or Roles()
        self._owns_ray = False
        self._handles: list[RoleHandle] = []
        self._groups: list[PlacementGroup] = []
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Deployment":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def endpoint(self) -> str:
        """host:port of the coordinator."""
        return self._endpoint

    async def start(self) -> str:
        """Returns the coordinator's host:port once every worker serves through it."""
        try:
            self._owns_ray = connect(self._config)
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._bring_up()
        except TimeoutError as error:
            waiting = await self._waiting_for()
            await self.stop()
            raise WorkerUnavailable(f"not ready after {self._config.start_timeout_s:g} s: {waiting}") from error
        except BaseException:
            await self.stop()
            raise
        return self.endpoint

    @property
    def handles(self) -> list[RoleHandle]:
        """Every actor with its latest report: the coordinator, the targets, the drafts."""
        return list(self._handles)

    async def stop(self) -> None:
        """Lets the coordinator drain, then the workers; shuts Ray down if `start` started it."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches.clear()
        coordinator, workers = self._handles[:1], self._handles[1:]
        self._handles = []
        for group in (coordinator, workers):
            await asyncio.gather(*(self._stop_actor(handle) for handle in group))
        for placed in self._groups:
            ray.util.remove_placement_group(placed)
        self._groups.clear()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    async def _bring_up(self) -> None:
        config, loopback = self._config, self._config.bind is Bind.LOOPBACK
        home = _home_node(config)
        host = LOOPBACK if loopback else home["NodeManagerAddress"]
        port = config.port or _free_port()
        self._endpoint = f"{host}:{port}"
        # A coordinator that Ray moved would come back where nobody looks for it.
        at_home = NodeAffinitySchedulingStrategy(node_id=home["NodeID"], soft=False)
        serve = functools.partial(self._roles.coordinator, config, port=port)
        needs = {"resources": amounts(config.coordinator_resources), "scheduling_strategy": at_home}
        self._add(CoordinatorActor, "coordinator", serve, host=host, needs=needs)

        # Loopback reaches no other node; elsewhere each worker takes its own node's address.
        placed = {"scheduling_strategy": at_home if loopback else "DEFAULT"}
        worker_host = LOOPBACK if loopback else None
        target_gpus, draft_gpus = _gpus(config)
        workers = {
            "target": (self._roles.target, config.targets, target_gpus, config.target_resources),
            "draft": (self._roles.draft, config.drafts, draft_gpus, config.draft_resources),
        }
        for role, (serve_worker, count, gpus, resources) in workers.items():
            device = "cuda" if gpus else "cpu"
            serve = functools.partial(serve_worker, config, coordinator=self._endpoint, device=device)
            needs = {"num_gpus": gpus, "resources": amounts(resources), **placed}
            for index in range(count):
                own = self._several_gpus(home if loopback else None, needs) if gpus > 1 else {}
                self._add(RoleActor, f"{role}-{index}", serve, host=worker_host, needs=needs | own)

        await asyncio.gather(*(_serving(handle) for handle in self._handles))
        await self._registered()
        self._watches = [asyncio.create_task(watch(handle, config)) for handle in self._handles]

    def _several_gpus(self, home: dict[str, Any] | None, needs: dict[str, Any]) -> dict[str, Any]:
        """GPUs of one node, kept for a worker over its restarts: a placement group of one bundle.

        Args:
            home: the node that it must be; None for any.
            needs: of the worker.

        Raises:
            WorkerUnavailable: no node has so many.
        """
        gpus = needs["num_gpus"]
        nodes = [node for node in ray.nodes() if node["Alive"] and (home is None or node["NodeID"] == home["NodeID"])]
        most = max((node["Resources"].get("GPU", 0.0) for node in nodes), default=0.0)
        if most < gpus:
            where = "no node has" if home is None else "this node does not have"
            raise WorkerUnavailable(f"{gpus:g} GPUs of one node asked for, {where} so many: at most {most:g}")
        bundle = {"GPU": gpus, **needs["resources"]}
        if home is not None:
            # Every node has a resource of its own name, which pins the bundle there.
            bundle[f"node:{home['NodeManagerAddress']}"] = 0.001
        placed = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        self._groups.append(placed)
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=0)}

    def _add(self, kind: type[RoleActor], role: str, serve: Serve, *, host: str | None, needs: dict[str, Any]) -> None:
        name = f"{self._config.name}/{role}"
        # num_cpus=0: the roles set their own thread counts, and a small machine must be able to place them all.
        placed = ray.remote(kind).options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_task_retries=0, **needs
        )
        self._handles.append(RoleHandle(name=name, actor=placed.remote(serve, name=name, host=host)))

    async def _registered(self) -> None:
        """Waits until the coordinator can use every worker."""
        wanted = ServingWorkers(targets=self._config.targets, drafts=self._config.drafts)
        coordinator = self._handles[0].actor
        while await coordinator.serving_workers.remote() != wanted:
            await asyncio.sleep(START_POLL_INTERVAL_S)
            # One that listened may still be refused by the coordinator, and then says why.
            await asyncio.gather(*(_refresh(handle) for handle in self._handles))

    async def _waiting_for(self) -> str:
        late = [handle.name for handle in self._handles if handle.report is None or handle.report.address is None]
        return ", ".join(late) + " not serving" if late else "a worker has not registered with the coordinator"

    async def _stop_actor(self, handle: RoleHandle) -> None:
        try:
            async with asyncio.timeout(self._config.stop_timeout_s):
                await handle.actor.stop.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.info("%s did not stop by itself: %s", handle.name, type(error).__name__)
        ray.kill(handle.actor, no_restart=True)


async def _serving(handle: RoleHandle) -> None:
    """Waits until an actor's server listens; raises as `_refresh` does."""
    while handle.report is None or handle.report.address is None:
        await _refresh(handle)
        await asyncio.sleep(START_POLL_INTERVAL_S)


async def _refresh(handle: RoleHandle) -> None:
    """Asks an actor how it is.

    Raises:
        WorkerUnavailable: it failed, with its reason.
    """
    try:
        handle.report = await handle.actor.report.remote()
    except ray.exceptions.RayError as error:
        raise WorkerUnavailable(f"{handle.name} could not be started: {error}") from error
    assert handle.report is not None
    if handle.report.failure is not None:
        raise WorkerUnavailable(f"{handle.name} could not serve: {handle.report.failure}")


def _home_node(config: DeployConfig) -> dict[str, Any]:
    """The coordinator's node: this process's own where it has the resources asked for, else any that has."""
    needed = amounts(config.coordinator_resources)
    own = ray.get_runtime_context().get_node_id()
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in needed.items())
    ]
    if not nodes:
        raise WorkerUnavailable(f"no node has the coordinator's resources {needed}")
    return min(nodes, key=lambda node: (node["NodeID"] != own, node["NodeID"]))


def _gpus(config: DeployConfig) -> tuple[float, float]:
    """GPUs per target and per draft worker."""
    available = ray.cluster_resources().get("GPU", 0.0)
    sharing = 0
    asked = asked_target_gpus(config)
    for named, count in ((asked, config.targets), (config.draft_gpus, config.drafts)):
        if named is None:
            sharing += count
        else:
            available -= named * count
    even = shared_gpus(max(available, 0.0), sharing)
    target = even if asked is None else asked
    draft = even if config.draft_gpus is None else config.draft_gpus
    return target, draft


def _free_port() -> int:
    """A port that is free on this machine; another process may still be quicker, and then the coordinator says so."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
