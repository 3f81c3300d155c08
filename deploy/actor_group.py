"""The actors of a deployment: who there is, how one is started, moved to another machine, or ended."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from outrider.deploy import placement
from outrider.deploy.actors import CoordinatorActor, RoleActor
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.connection import NAMESPACE
from outrider.deploy.health import RoleHandle
from outrider.deploy.placement import KeptPlaces, Node
from outrider.deploy.roles import Roles, Serve, WorkerSetting
from outrider.errors import WorkerUnavailable
from outrider.roles import standby_start
from outrider.roles.ports import check_free, free_port
from outrider.security.roles import Role

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# The name of an actor that was killed is free at once, or after a moment.
_NAME_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 2.0
_KEPT_EVENTS = 200


class Events:
    """The latest events, numbered from 0 on."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=_KEPT_EVENTS)
        self._count = 0

    def add(self, text: str) -> None:
        """Note an event."""
        logger.info(text)
        self._kept.append(text)
        self._count += 1

    def since(self, number: int) -> tuple[int, list[str]]:
        """Return the number of the next event, and the events from `number` on that are still kept."""
        fresh = min(max(self._count - number, 0), len(self._kept))
        return self._count, list(self._kept)[len(self._kept) - fresh :]


@dataclass(frozen=True)
class CoordinatorList:
    """Asks a deployment's controller for the coordinators' addresses as they are now: a worker's resolver."""

    controller: Any

    async def __call__(self) -> Sequence[str]:
        """host:port of each.

        Raises:
            OSError: the controller does not answer; what it said last still holds.
        """
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await self.controller.worker_endpoints.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise OSError(f"the controller does not answer: {type(error).__name__}") from error


@dataclass(frozen=True)
class TargetModel:
    """Asks a deployment's controller for the checkpoint folder that a reload has given all targets."""

    controller: Any

    async def __call__(self) -> str | None:
        """The folder; None where there was no reload, or where nobody can tell: then the coordinators see to it."""
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await self.controller.target_model.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the controller does not say what to load: %s", type(error).__name__)
            return None


class ActorGroup:
    """Starts and ends a deployment's actors; knows nothing of when that is called for.

    Args:
        home: id of the node that the deployment was started on.
        controller: Ray's handle of the actor that this runs in; workers ask it for the coordinators' addresses.
    """

    def __init__(self, config: DeployConfig, roles: Roles, *, home: str, controller: Any) -> None:
        self._config = config
        self._roles = roles
        self._controller = controller
        self._home_id = home
        # A controller whose machine has died starts on another; what `recover` is given has the address.
        self._home_address = next((node.address for node in placement.living_nodes() if node.node_id == home), "")
        self._gpus: dict[Role, float] = dict(zip((Role.TARGET, Role.DRAFT), placement.worker_gpus(config), strict=True))
        self._resources = {Role.TARGET: config.target_resources, Role.DRAFT: config.draft_resources}
        # Small servers in place of the roles import nothing that would be worth it.
        self._forks = config.forks_workers and roles.target is Roles.target
        self.events = Events()
        """Events of the actors, for whoever has started them."""
        self._numbers = dict.fromkeys(Role, 0)
        self._handles: dict[str, RoleHandle] = {}
        self._places: dict[str, KeptPlaces] = {}
        self._moving: set[str] = set()
        self.silent_nodes: set[str] = set()
        """Ids of nodes that do not answer, whatever Ray says of them."""
        self.is_ending = False
        """Nobody is added any more: nobody would be left to end them."""

    def __iter__(self) -> Iterator[RoleHandle]:
        return iter(list(self._handles.values()))

    def of(self, role: Role) -> list[RoleHandle]:
        """The actors of a role that are to stay, the oldest first."""
        return [handle for handle in self._handles.values() if handle.role is role and not handle.is_draining]

    def named(self, name: str) -> RoleHandle | None:
        """The actor that status shows by this name."""
        return self._handles.get(name)

    @property
    def endpoints(self) -> list[str]:
        """host:port of every coordinator that is to stay, as clients know it."""
        return [handle.endpoint for handle in self.of(Role.COORDINATOR) if handle.endpoint is not None]

    @property
    def shared_endpoints(self) -> list[str]:
        """host:port at which all coordinators of a machine listen together, one a machine; empty where they do not."""
        if (port := self._config.shared_port) is None:
            return []
        return list(dict.fromkeys(f"{endpoint.rpartition(':')[0]}:{port}" for endpoint in self.endpoints))

    @property
    def http_endpoints(self) -> list[str]:
        """host:port of every HTTP door, or of those that all coordinators of a machine share."""
        doors = [own.http_endpoint for own in self.of(Role.COORDINATOR) if own.http_endpoint is not None]
        if (port := self._config.shared_http_port) is None:
            return doors
        return list(dict.fromkeys(f"{door.rpartition(':')[0]}:{port}" for door in doors))

    @property
    def worker_endpoints(self) -> list[str]:
        """host:port of every coordinator, as workers know it: one that drains needs them until it has ended."""
        coordinators = (own for own in self._handles.values() if own.role is Role.COORDINATOR)
        return [own.worker_endpoint for own in coordinators if own.worker_endpoint is not None]

    async def add(self, role: Role, *, model: Path | None = None) -> RoleHandle:
        """Start one more of a role; it serves some time later.

        Args:
            model: the checkpoint folder of a worker; default the configured one.

        Raises:
            WorkerUnavailable: no node has what it needs, or the deployment ends.
        """
        if self.is_ending:
            raise WorkerUnavailable(f"the deployment {self._config.name} ends")
        handle = RoleHandle(name=f"{role}-{self._numbers[role]}", role=role, model=model, tell=self.events.add)
        self._numbers[role] += 1
        await self._start(handle)
        self._handles[handle.name] = handle
        return handle

    def has_room(self, role: Role) -> bool:
        """Return True if the cluster has the resources for one more of a role."""
        free = ray.available_resources()
        return all(free.get(name, 0.0) >= amount for name, amount in self._bundle(role).items())

    async def move(self, handle: RoleHandle) -> None:
        """Restart an actor, by the same name, on a machine that answers; try again if that fails.

        Raises:
            WorkerUnavailable: no such machine has what it needs, or it has been told to end meanwhile.
        """
        if handle.name in self._moving:
            return
        self._moving.add(handle.name)
        try:
            if not handle.is_homeless:
                ray.kill(handle.actor, no_restart=True)
            handle.report, handle.node_id, handle.is_homeless = None, None, True
            await self._free_place(handle)
            await self._start(handle)
            handle.is_homeless = False
        finally:
            self._moving.discard(handle.name)

    def is_gone(self, handle: RoleHandle) -> bool:
        """Return True if Ray will not restart an actor: it was killed from outside, or lost its placement."""
        try:
            ray.get_actor(self._full(handle.name), namespace=NAMESPACE)
        except ValueError:
            return True
        return False

    async def end(self, handle: RoleHandle, *, timeout_s: float) -> None:
        """Let an actor finish its work, within the time, and end it."""
        handle.is_draining = True
        if not handle.is_homeless:
            try:
                async with asyncio.timeout(timeout_s):
                    await handle.actor.stop.remote()
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.info("%s did not stop by itself: %s", handle.name, type(error).__name__)
            ray.kill(handle.actor, no_restart=True)
        self._handles.pop(handle.name, None)
        await self._free_place(handle)

    # ------------------------------------------------------------------------------------------------ over a restart

    def state(self) -> dict[str, Any]:
        """Return the state that `recover` needs, as plain values."""
        return {
            "numbers": {str(role): number for role, number in self._numbers.items()},
            "gpus": {str(role): gpus for role, gpus in self._gpus.items()},
            "home_address": self._home_address,
            "members": [
                {name: getattr(own, name) for name in _KEPT} | {"model": own.model and str(own.model)}
                for own in self._handles.values()
            ],
            "places": {name: places.takers for name, places in self._places.items()},
        }

    def recover(self, state: dict[str, Any]) -> None:
        """Take over the actors of a dead controller; those that are gone as well are homeless: for `move`."""
        self._numbers = {Role(role): number for role, number in state["numbers"].items()}
        self._gpus = {Role(role): gpus for role, gpus in state["gpus"].items()}
        self._home_address = state["home_address"]
        for name, takers in state["places"].items():
            # It may have been removed in the controller's last second.
            with contextlib.suppress(ValueError):
                group = ray.util.get_placement_group(self._full(name))
                self._places[name] = KeptPlaces(group=group, takers=takers)
        for member in state["members"]:
            model = member["model"] and Path(member["model"])
            handle = RoleHandle(**member | {"role": Role(member["role"]), "model": model}, tell=self.events.add)
            try:
                handle.actor = ray.get_actor(self._full(handle.name), namespace=NAMESPACE)
                handle.is_homeless = False
            except ValueError:
                handle.is_homeless = True
            self._handles[handle.name] = handle

    # --------------------------------------------------------------------------------------------------------- placing

    def _full(self, name: str) -> str:
        return f"{self._config.name}/{name}"

    def _bundle(self, role: Role) -> dict[str, float]:
        """The resources that one worker of a role takes."""
        return placement.bundle(self._gpus[role], self._resources[role])

    def _nodes(self) -> list[Node]:
        """The nodes that may be used: loopback reaches no other machine."""
        nodes = [node for node in placement.living_nodes() if node.node_id not in self.silent_nodes]
        if self._config.bind is Bind.LOOPBACK:
            nodes = [node for node in nodes if node.address == self._home_address]
        if not nodes:
            raise WorkerUnavailable("no node of the cluster answers")
        return nodes

    async def _start(self, handle: RoleHandle) -> None:
        try:
            if handle.role is Role.COORDINATOR:
                await self._start_coordinator(handle)
            else:
                await self._start_worker(handle)
        except BaseException:
            # Of one that is not there nobody would give the places back, which outlive this process.
            await self._free_place(handle)
            raise

    async def _start_coordinator(self, handle: RoleHandle) -> None:
        config, needs = self._config, placement.actor_needs(0, self._config.coordinator_resources)
        fitting = [node for node in self._nodes() if node.has(needs["resources"])]
        if not fitting:
            raise WorkerUnavailable(f"no node has the coordinator's resources {needs['resources']}")
        others = [own for own in self._handles.values() if own.role is Role.COORDINATOR and own is not handle]
        taken = [own.placed_on for own in others]
        node = min(fitting, key=lambda node: (taken.count(node.node_id), node.node_id != self._home_id, node.node_id))
        host = LOOPBACK if config.bind is Bind.LOOPBACK else node.address
        if config.shared_port is not None and host == LOOPBACK and not others:
            # Another deployment of the same user could share it in silence.
            address = f"{host}:{config.shared_port}"
            try:
                check_free(address)
            except OSError as error:
                raise WorkerUnavailable(f"shared_port: {address} is taken: choose another one") from error
        # With TLS workers come in by a door of their own, one port further.
        doors = 1 if config.certs is None else 2
        known = int(handle.endpoint.rpartition(":")[2]) if handle.endpoint else config.port
        port = known or free_port("", count=doors)
        used = {own.endpoint for own in others} | {own.worker_endpoint for own in others}
        used.add(f"{host}:{config.shared_port}")
        while any(f"{host}:{port + door}" in used for door in range(doors)):
            port = port + 1 if config.port else free_port("", count=doors)
        handle.endpoint, handle.worker_endpoint = f"{host}:{port}", f"{host}:{port + doors - 1}"
        handle.placed_on = node.node_id
        # A coordinator that Ray moved by itself would come back where nobody looks for it.
        needs["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
        http_port = _http_port(config, port=port, number=int(handle.name.rpartition("-")[2]))
        known = int(handle.http_endpoint.rpartition(":")[2]) if handle.http_endpoint else http_port
        handle.http_endpoint = f"{host}:{known or free_port('')}"
        config = dataclasses.replace(config, http_port=int(handle.http_endpoint.rpartition(":")[2]))
        peers = CoordinatorList(self._controller)
        serve = functools.partial(self._roles.coordinator, config, port=port, worker_port=port + doors - 1, peers=peers)
        handle.actor = await self._create(CoordinatorActor, handle, serve, host=host, needs=needs)

    async def _start_worker(self, handle: RoleHandle) -> None:
        config, role, gpus = self._config, handle.role, self._gpus[handle.role]
        needs = placement.actor_needs(gpus, self._resources[role])
        if (place := self._take_place(handle)) is not None:
            needs["scheduling_strategy"] = place
        else:
            among = None
            if config.bind is Bind.LOOPBACK:
                among = [node.node_id for node in self._nodes()]
            needs["label_selector"] = placement.selector(among=among, avoided=self.silent_nodes)
            if (node_id := self._quietest(handle)) is not None:
                needs["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                    node_id=node_id, soft=True, _spill_on_unavailable=True
                )
        setting = WorkerSetting(
            name=self._full(handle.name),
            coordinators=tuple(self.worker_endpoints),
            resolve=CoordinatorList(self._controller),
            device="cuda" if gpus else "cpu",
            model=handle.model,
            model_now=TargetModel(self._controller) if role is Role.TARGET else None,
        )
        serve_role = self._roles.target if role is Role.TARGET else self._roles.draft
        # Loopback reaches no other node; elsewhere each worker takes its own node's address.
        host = LOOPBACK if config.bind is Bind.LOOPBACK else None
        serve = functools.partial(serve_role, config, setting)
        if self._forks:
            needs["runtime_env"] = {"py_executable": standby_start.COMMAND}
        handle.actor = await self._create(RoleActor, handle, serve, host=host, needs=needs)

    def _quietest(self, handle: RoleHandle) -> str | None:
        """Id of the node with the fewest workers of a role, where it has room for one more; it is noted as its place.

        Ray fills one node before the next: with it, all targets would go.
        """
        role, needed = handle.role, self._bundle(handle.role)
        others = [
            own.node_id or own.placed_on for own in self._handles.values() if own.role is role and own is not handle
        ]
        fitting = [
            node
            for node in self._nodes()
            if node.has({name: amount * (others.count(node.node_id) + 1) for name, amount in needed.items()})
        ]
        fitting.sort(key=lambda node: (others.count(node.node_id), node.node_id != self._home_id, node.node_id))
        handle.placed_on = fitting[0].node_id if fitting else None
        return handle.placed_on

    def _take_place(self, handle: RoleHandle) -> PlacementGroupSchedulingStrategy | None:
        """A place kept for this worker: a target makes its own, a draft takes one beside a target."""
        config = self._config
        if handle.role is Role.TARGET and (self._gpus[Role.TARGET] > 1 or config.drafts_beside_target):
            needs = [self._bundle(Role.TARGET)] + [self._bundle(Role.DRAFT)] * config.drafts_beside_target
            # Where there is room on another machine they all stay: this is a wish, and Ray decides.
            self._places[handle.name] = placement.keep_places(
                needs, name=self._full(handle.name), nodes=self._nodes(), rather_on=self._quietest(handle)
            )
        for owner, places in self._places.items():
            # The first place of a group is the target's own.
            mine = [0] if owner == handle.name else range(1, len(places.takers)) if handle.role is Role.DRAFT else []
            for index in mine:
                if places.takers[index] is None:
                    places.takers[index] = handle.name
                    return PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=index)
        return None

    async def _free_place(self, handle: RoleHandle) -> None:
        own = self._places.pop(handle.name, None)
        if own is not None:
            # Ray ends whoever has a place of a group that is removed: the drafts beside this target go elsewhere.
            ray.util.remove_placement_group(own.group)
            for name in own.takers[1:]:
                beside = self._handles.get(name or "")
                if beside is not None and not beside.is_draining:
                    # One that finds no place is homeless from now on, and tried again; the others are not to wait.
                    with contextlib.suppress(WorkerUnavailable):
                        await self.move(beside)
        for places in self._places.values():
            places.takers = [None if taker == handle.name else taker for taker in places.takers]

    async def _create(
        self,
        kind: type[RoleActor],
        handle: RoleHandle,
        serve: Serve,
        *,
        host: str | None,
        needs: dict[str, Any],
    ) -> Any:
        """The actor. Detached: it outlives this controller's process, whose successor finds it by its name."""
        placed = ray.remote(kind).options(
            name=self._full(handle.name),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            **needs,
        )
        deadline = time.monotonic() + _NAME_TIMEOUT_S
        while True:
            if self.is_ending or handle.is_draining:
                raise WorkerUnavailable(f"{self._full(handle.name)} is to end")
            try:
                return placed.remote(serve, self._config, name=self._full(handle.name), host=host)
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise WorkerUnavailable(f"{self._full(handle.name)}: {error}") from error
                # Of a controller that died before it had written down whom it had started, too.
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(self._full(handle.name), namespace=NAMESPACE), no_restart=True)
                await asyncio.sleep(0.05)


_KEPT = (
    "name",
    "role",
    "endpoint",
    "worker_endpoint",
    "http_endpoint",
    "placed_on",
    "node_id",
    "pid",
    "restarts",
    "is_homeless",
    "is_draining",
)


def _http_port(config: DeployConfig, *, port: int, number: int) -> int:
    """One coordinator's HTTP port, which is as far from the first one's as its gRPC port is; 0 for a free one."""
    if not config.first_http_port:
        return 0
    offset = port - config.port if config.port else number
    return config.first_http_port + offset
