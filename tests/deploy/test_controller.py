"""Controller when things happen at the same time, or when it has died in the middle, without Ray."""

import asyncio
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray.exceptions
from tests.polling import until

from outrider.deploy import actor_group
from outrider.deploy import controller as controller_module
from outrider.deploy.actors import RoleReport
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.controller import Controller
from outrider.deploy.placement import KeptPlaces, Node, Probe
from outrider.deploy.roles import Roles
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role

HOME = Node(node_id="aa" * 28, address="machine-a", port=1, resources={"front": 1.0})
OTHER = Node(node_id="bb" * 28, address="machine-b", port=1, resources={})
CONFIG = DeployConfig(name="mine", bind=Bind.NODE, insecure=True, drafts=2, ping_interval_s=0.01, stop_timeout_s=1.0)
WITH_FRONT = dataclasses.replace(CONFIG, coordinator_resources=("front=1",))


class Method:
    """`actor.method.remote(...)`."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class FakeActor:
    """Reports that it listens until it is killed; stops when it is let."""

    def __init__(self, name: str) -> None:
        self.name, self.is_dead, self.may_stop = name, False, asyncio.Event()
        self.may_stop.set()
        self.report, self.stop, self.server_info = Method(self._report), Method(self._stop), Method(self._server_info)

    def _check(self) -> None:
        if self.is_dead:
            raise ray.exceptions.RayActorError

    async def _report(self) -> RoleReport:
        self._check()
        return RoleReport(pid=1, node="n", node_id=OTHER.node_id, address=f"h:{self.name}", failure=None)

    async def _stop(self) -> None:
        await self.may_stop.wait()
        self._check()

    async def _server_info(self) -> None:
        self._check()


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Ray's part: named actors, living nodes, and a store of its own."""
    state = SimpleNamespace(actors={}, nodes=[HOME, OTHER], store={})

    async def create(self: Any, kind: object, handle: Any, serve: object, **_: object) -> FakeActor:
        return state.actors.setdefault(self._full(handle.name), FakeActor(handle.name))

    def get_actor(name: str, **_: object) -> FakeActor:
        if name not in state.actors:
            raise ValueError(name)
        return state.actors[name]

    def kill(actor: FakeActor, *, no_restart: bool) -> None:
        actor.is_dead = True
        state.actors.pop(f"mine/{actor.name}", None)

    async def probe(node: Node) -> Probe:
        return Probe.ANSWERS if node in state.nodes else Probe.SILENT

    monkeypatch.setattr(actor_group.ActorGroup, "_create", create)
    monkeypatch.setattr(actor_group.ActorGroup, "_quietest", lambda *_: None)
    monkeypatch.setattr(actor_group.placement, "living_nodes", lambda: list(state.nodes))
    monkeypatch.setattr(actor_group.placement, "worker_gpus", lambda _: (0.0, 0.0))
    monkeypatch.setattr(actor_group.placement, "probe", probe)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(ray, "available_resources", dict)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    store = SimpleNamespace(
        _internal_kv_get=lambda key, **_: state.store.get(key),
        _internal_kv_put=lambda key, value, **_: state.store.update({key: value}),
        _internal_kv_del=lambda key, **_: state.store.pop(key, None),
    )
    monkeypatch.setattr(controller_module, "internal_kv", store)
    yield state


class ServingController(Controller):
    """One that takes what listens as it comes up for serving: nothing here would register."""

    async def _all_serve(self) -> None:
        return


def started(config: DeployConfig = CONFIG) -> ServingController:
    return ServingController(config, Roles(), home=HOME.node_id, owned=False)


async def die() -> None:
    """A controller's process is gone, and all that ran in it."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def names(controller: Controller, role: Role) -> list[str]:
    return [handle.name for handle in controller._actors.of(role)]


async def test_a_controller_whose_machine_has_died_finds_the_others_and_waits_for_a_place(cluster: SimpleNamespace):
    first = started(WITH_FRONT)
    assert await first.started() is None
    await die()
    # With the machine the coordinator has gone as well, which only that machine can hold.
    cluster.nodes.remove(HOME)
    cluster.actors["mine/coordinator-0"].is_dead = True
    del cluster.actors["mine/coordinator-0"]
    second = started(WITH_FRONT)
    assert await second.started() is None
    assert names(second, Role.DRAFT) == ["draft-0", "draft-1"]
    coordinator = second._actors.named("coordinator-0")
    assert coordinator is not None
    await until(lambda: coordinator.failure is not None)
    assert "no node has the coordinator's resources" in str(coordinator.failure)
    cluster.nodes.append(dataclasses.replace(HOME, node_id="cc" * 28, address="machine-c"))
    await until(lambda: not coordinator.is_homeless)
    assert coordinator.endpoint == "machine-c:50051"
    await until(lambda: coordinator.report is not None)
    await second.down()
    assert not cluster.actors


async def test_an_actor_that_ray_has_given_up_is_started_again(cluster: SimpleNamespace):
    controller = started()
    await controller.started()
    lost = cluster.actors["mine/draft-0"]
    lost.is_dead = True
    await until(lambda: (own := controller._actors.named("draft-0")) is not None and own.failure is not None)
    assert controller._actors._handles["draft-0"].actor is lost, "Ray starts it anew by itself"
    del cluster.actors["mine/draft-0"]
    await until(lambda: "mine/draft-0" in cluster.actors)
    own = controller._actors.named("draft-0")
    assert own is not None
    await until(lambda: own.report is not None and own.failure is None)
    await controller.down()


async def test_what_is_replaced_while_the_deployment_ends_leaves_nobody_behind(cluster: SimpleNamespace):
    controller = started()
    await controller.started()
    replacing = asyncio.create_task(controller.replace("draft"))
    await until(lambda: controller._actors.named("draft-2") is not None)
    waiting = asyncio.create_task(controller.scale({"draft": 5}))
    await asyncio.sleep(0)
    await controller.down()
    for change in (replacing, waiting):
        with pytest.raises(WorkerUnavailable):
            await change
    assert not cluster.actors
    assert not cluster.store
    with pytest.raises(WorkerUnavailable, match="the deployment mine is down"):
        await controller.scale({"draft": 1})


async def test_a_replacement_that_its_controller_did_not_live_to_finish_leaves_as_many_as_before(
    cluster: SimpleNamespace,
):
    first = started()
    await first.started()
    replacing = asyncio.create_task(first.replace("draft"))
    await until(lambda: first._actors.named("draft-2") is not None)
    first._save()
    replacing.cancel()
    await die()
    second = started()
    await until(lambda: names(second, Role.DRAFT) == ["draft-0", "draft-1"])
    assert "mine/draft-2" not in cluster.actors
    await second.scale({"draft": 3})
    assert names(second, Role.DRAFT)[-1] == "draft-3", "a number is never used again"
    await second.down()


async def test_a_drain_that_is_asked_for_again_takes_one_away_and_not_two(cluster: SimpleNamespace):
    controller = started()
    await controller.started()
    actor = cluster.actors["mine/draft-0"]
    actor.may_stop.clear()
    first = asyncio.create_task(controller.drain("draft-0"))
    await until(lambda: controller._scaler.wanted[Role.DRAFT] == 1)
    controller._save()
    first.cancel()
    await die()
    successor = started()
    await successor.started()
    again = asyncio.create_task(successor.drain("draft-0"))
    await asyncio.sleep(0.02)
    actor.may_stop.set()
    await again
    assert (successor._scaler.wanted[Role.DRAFT], names(successor, Role.DRAFT)) == (1, ["draft-1"])
    await successor.down()


async def test_a_count_that_cannot_be_had_is_not_wanted_any_longer(cluster: SimpleNamespace):
    controller = started(WITH_FRONT)
    await controller.started()
    cluster.nodes[0] = dataclasses.replace(HOME, resources={})
    with pytest.raises(WorkerUnavailable, match="no node has the coordinator's resources"):
        await controller.scale({"coordinator": 2})
    assert (await controller.status())["wanted"]["coordinator"] == 1
    await controller.down()


async def test_who_could_not_be_started_keeps_no_place(cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    kept, removed = [], []

    def keep_places(needs: Any, *, name: str, **_: Any) -> KeptPlaces:
        kept.append(name)
        return KeptPlaces(group=cast("Any", name), takers=[None] * len(needs))

    async def create(*_: Any, **__: Any) -> None:
        raise WorkerUnavailable("is to end")

    monkeypatch.setattr(actor_group.placement, "keep_places", keep_places)
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)
    controller = started(dataclasses.replace(CONFIG, drafts_beside_target=1))
    await controller.started()
    assert (kept, removed) == (["mine/target-0"], [])
    monkeypatch.setattr(actor_group.ActorGroup, "_create", create)
    for role in ("target", "draft"):
        with pytest.raises(WorkerUnavailable, match="is to end"):
            await controller.scale({role: 4})
    assert (kept, removed) == (["mine/target-0", "mine/target-1"], ["mine/target-1"])
    await controller.down()
    assert sorted(removed) == kept


class StuckController(Controller):
    """One whose workers never serve."""

    async def _all_serve(self) -> None:
        await asyncio.Event().wait()


async def test_what_is_to_be_left_alone_ends_with_its_process_as_long_as_it_does_not_serve(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    config, now_s = dataclasses.replace(CONFIG, owner_timeout_s=0.2), [100.0]
    monkeypatch.setattr(controller_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    stuck = StuckController(config, Roles(), home=HOME.node_id, owned=False)
    now_s[0] += 1
    await until(lambda: stuck._state == "down")
    assert not cluster.actors
    serving = started(config)
    assert await serving.started() is None
    # Whoever has started it is silent, and several times it could have been looked for.
    now_s[0] += 1
    await asyncio.sleep(1.0)
    assert (await serving.status())["state"] == "serving"
    await serving.down()
