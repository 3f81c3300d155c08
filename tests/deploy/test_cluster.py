"""A deployment on a three-node Ray cluster of one machine, with small servers in place of the roles.

One cluster and, for most tests, one deployment: two coordinators, two targets, four drafts. The tests go on from where
the one before left it, and ask for nothing that only holds at its start.
"""

import asyncio
import dataclasses
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import ray
import ray.cloudpickle
import ray.cluster_utils
import ray.exceptions

from outrider import cli, rpc, tracing
from outrider.addresses import Resolve
from outrider.deploy.cluster import Deployment
from outrider.deploy.config import DeployConfig
from outrider.deploy.connection import NAMESPACE
from outrider.deploy.roles import Roles, WorkerSetting
from outrider.errors import WorkerRefused, WorkerUnavailable
from outrider.v1 import generation_pb2, generation_pb2_grpc, registry_pb2, registry_pb2_grpc

# The actors cannot import this file: it travels to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Where Ray had to be started twice, it forgets the processes of its first attempt until the end.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:subprocess \d+ is still running:ResourceWarning"),
    pytest.mark.asyncio(loop_scope="module"),
]

HAS_TRACING = importlib.util.find_spec("opentelemetry") is not None
# Bounds on what a busy machine may take long for are the default ones: nothing here is about how long they are.
CONFIG = DeployConfig(port=0, ping_interval_s=0.2, stop_timeout_s=5.0)
SEVERAL = DeployConfig(
    name="several",
    port=0,
    coordinators=2,
    targets=2,
    drafts=4,
    target_resources=("big=1",),
    draft_resources=("cheap=1",),
    drafts_beside_target=1,
    ping_interval_s=0.2,
    # A machine that dies refuses connections: only one that the others starve is silent.
    node_timeout_s=30.0,
    stop_timeout_s=5.0,
    log_level="debug",
    log_format="json",
    # Nobody listens there, and nothing is sent: no request is served.
    otlp_endpoint="http://127.0.0.1:9" if HAS_TRACING else None,
)
# Workers note here that they serve: what a registry would know of them.
SERVING = Path(tempfile.mkdtemp(prefix="outrider-serving-"))


# ------------------------------------------------------------------------------------------------------------ the roles


class Registry(generation_pb2_grpc.GenerationServiceServicer):
    """A coordinator that knows the workers that have noted themselves and still run."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    async def GetServerInfo(self, request, context):  # noqa: N802 (the protocol's name)
        return self.info()

    def info(self) -> generation_pb2.ServerInfo:
        info = generation_pb2.ServerInfo(running_sessions=3, version=json.dumps(what_this_process_tells()))
        for note in SERVING.glob(f"{self._deployment}.*"):
            worker = json.loads(note.read_text())
            if Path(f"/proc/{worker['pid']}").exists():
                introduction = registry_pb2.WorkerIntroduction(address=worker["address"])
                introduction.model.name = worker["model"]
                info.workers.append(generation_pb2.WorkerStatus(introduction=introduction, state="serving"))
        return info


def what_this_process_tells() -> list[Any]:
    """Return the log level, the log's format and whether this process traces."""
    (handler,) = logging.getLogger().handlers[-1:]
    return [logging.getLogger().level, type(handler.formatter).__name__, tracing.active is not None]


class Reloading(registry_pb2_grpc.RegistryServiceServicer):
    """A coordinator whose targets run with whatever folder they are told, but for one that is broken."""

    async def Reload(self, request_iterator, context):  # noqa: N802
        async for command in request_iterator:
            if command.WhichOneof("command") == "hold":
                yield registry_pb2.ReloadReport(running=0)
                continue
            path = command.check.path or command.swap.weights.path
            report = registry_pb2.TargetReport(worker_id="t", name="several/target-0", address="127.0.0.1:1", swap_ns=5)
            report.found.version = "new"
            report.running.version = "new" if command.HasField("swap") else "old"
            if path.endswith("broken"):
                report.error = "model.norm.weight is missing"
            yield registry_pb2.ReloadReport(targets=registry_pb2.TargetReports(targets=[report]))


async def serve_registry(
    config: DeployConfig,
    *,
    port: int,
    worker_port: int,
    peers: Resolve,
    host: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    tell: Callable[[Callable[[], generation_pb2.ServerInfo]], None],
) -> None:
    assert worker_port == port
    assert f"{host}:{port}" in await peers()

    def add_services(grpc_server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Registry(config.name), grpc_server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(Reloading(), grpc_server)

    server = rpc.RoleServer(
        services=["outrider.v1.GenerationService"],
        add_services=add_services,
        address=f"{host}:{port}",
    )
    await server.start()
    tell(Registry(config.name).info)
    ready(server.address)
    await stop.wait()
    await server.stop(grace_s=0)


async def serve_worker(
    config: DeployConfig,
    setting: WorkerSetting,
    *,
    host: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    assert setting.device == "cpu"
    assert setting.resolve is not None
    assert sorted(await setting.resolve()) == sorted(setting.coordinators)
    if setting.model == Path("broken"):
        raise OSError("no such checkpoint")
    server = rpc.RoleServer(services=[], add_services=lambda _: None, address=f"{host}:0")
    await server.start()
    note = SERVING / setting.name.replace("/", ".")
    whole = note.with_name(f"new-{note.name}")
    changed = None if setting.model_now is None else await setting.model_now()
    own = {
        "changed": changed,
        "address": server.address,
        "pid": os.getpid(),
        "model": str(setting.model),
        "tells": what_this_process_tells(),
    }
    whole.write_text(json.dumps(own))
    whole.rename(note)
    ready(server.address)
    await stop.wait()
    note.unlink()
    await server.stop(grace_s=0)


async def serve_unnoticed(
    config: DeployConfig, setting: WorkerSetting, *, ready: Callable[[str], None], stop: asyncio.Event, **_: object
) -> None:
    ready("127.0.0.1:1")
    await stop.wait()


async def fail_to_serve(config: DeployConfig, setting: WorkerSetting, **_: object) -> None:
    raise OSError("no such checkpoint")


async def refused_later(
    config: DeployConfig, setting: WorkerSetting, *, ready: Callable[[str], None], **_: object
) -> None:
    ready("127.0.0.1:1")
    await asyncio.sleep(1.0)
    raise WorkerRefused("use a draft and a target with the same tokenizer")


FAKES = Roles(coordinator=serve_registry, target=serve_worker, draft=serve_worker)


# ---------------------------------------------------------------------------------------------------------- the cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray.cluster_utils.Cluster]:
    """The head, and two machines with places for workers: one of them would hold all."""
    started = ray.cluster_utils.Cluster()
    options = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False, "wait": False}
    started.add_node(**options)
    for _ in range(2):
        started.add_node(resources={"big": 4, "cheap": 8}, **options)
    started.wait_for_nodes()
    ray.init(address=started.address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(cluster: ray.cluster_utils.Cluster) -> AsyncIterator[Deployment]:
    async with Deployment(SEVERAL, roles=FAKES) as started:
        yield started


async def workers_of(deployment: Deployment) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in (await deployment.status())["workers"]}


async def until(deployment: Deployment, holds: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, Any]:
    """Waits for the workers to be as asked for: while a coordinator is too busy to answer, nobody is known to serve."""
    async with asyncio.timeout(120):
        while not holds(workers := await workers_of(deployment)):
            await asyncio.sleep(0.1)
    return workers


def all_serve(workers: dict[str, dict[str, Any]]) -> bool:
    return all(worker["state"] == "serving" for worker in workers.values())


async def command(*arguments: str, name: str = SEVERAL.name) -> int:
    """A command of another terminal; it finds this process on the cluster already."""
    return await asyncio.to_thread(cli.run, [*arguments, "--name", name, "--address", "auto"])


# ------------------------------------------------------------------------------------------------------- one deployment


async def test_each_role_serves_in_a_process_of_its_own(deployment: Deployment):
    workers = await workers_of(deployment)
    roles = ["coordinator"] * 2 + ["target"] * 2 + ["draft"] * 4
    assert [worker["role"] for worker in workers.values()] == roles
    assert len({worker["pid"] for worker in workers.values()} | {os.getpid()}) == 9
    addresses = [workers[f"coordinator-{index}"]["address"] for index in range(2)]
    assert deployment.endpoints == addresses
    assert deployment.endpoint == ",".join(addresses)
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert workers["target-0"]["node_id"] != workers["target-1"]["node_id"]
    for index in range(2):
        assert workers[f"draft-{index}"]["node_id"] == workers[f"target-{index}"]["node_id"]


async def test_status_tells_of_every_worker(
    deployment: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    async def told(*arguments: str, until: Callable[[str], bool]) -> str:
        # Of a coordinator that was too busy to answer the last time it does not tell.
        async with asyncio.timeout(120):
            while True:
                assert await command("status", *arguments) == 0
                if until(text := capsys.readouterr().out):
                    return text
                await asyncio.sleep(0.1)

    status = json.loads(await told("--json", until=lambda text: len(json.loads(text)["coordinators"]) == 2))
    assert (status["state"], status["wanted"]) == ("serving", {"coordinator": 2, "target": 2, "draft": 4})
    assert status["endpoints"] == deployment.endpoints
    assert status["autoscaler"] == {
        "enabled": False,
        "min_drafts": 0,
        "max_drafts": None,
        "latest": None,
        "decisions": [],
    }
    draft = status["workers"][-1]
    keys = "address busy model name node node_id pid reason restarts role sessions state weights"
    assert " ".join(sorted(draft)) == keys
    assert (draft["name"], draft["state"], draft["restarts"]) == ("draft-3", "serving", 0)
    assert [own["running_sessions"] for own in status["coordinators"]] == [3, 3]
    monkeypatch.setenv("COLUMNS", "160")
    table = await told(until=lambda text: "6 running" in text)
    assert all(name in table for name in ("deployment several", "target-1", "draft-3"))


async def test_every_role_logs_and_traces_as_was_asked_for(deployment: Deployment):
    notes = [json.loads(note.read_text()) for note in SERVING.glob(f"{SEVERAL.name}.*")]
    assert len(notes) == 6
    for endpoint in deployment.endpoints:
        async with rpc.open_channel(endpoint) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            info = await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=60)
        notes.append({"tells": json.loads(info.version)})
    assert [note["tells"] for note in notes] == 8 * [[logging.DEBUG, "JsonFormatter", HAS_TRACING]]


async def test_a_reload_is_for_targets_that_start_later_as_well(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
):
    def starts_with(name: str) -> str | None:
        return json.loads((SERVING / f"{SEVERAL.name}.{name}").read_text())["changed"]

    assert await command("reload", "--target", "/models/broken") == cli.FAILED
    assert "1 of 1 targets cannot run with it, nothing has changed: several/target-0" in capsys.readouterr().err
    before = (await workers_of(deployment))["target-1"]
    assert (starts_with("target-0"), starts_with("target-1")) == (None, None)
    assert await command("reload", "--target", "/models/new", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], [each["error"] for each in told["targets"]]) == ("/models/new", [None])
    os.kill(before["pid"], signal.SIGKILL)
    await until(deployment, lambda workers: all_serve(workers) and workers["target-1"]["pid"] != before["pid"])
    assert (starts_with("target-0"), starts_with("target-1"), starts_with("draft-0")) == (None, "/models/new", None)


async def test_drafts_are_scaled_and_drained_by_command(deployment: Deployment, capsys: pytest.CaptureFixture[str]):
    assert await command("scale", "draft=2", "target=1") == 0
    assert list(await workers_of(deployment)) == ["coordinator-0", "coordinator-1", "target-0", "draft-0", "draft-1"]
    assert await command("scale", "draft=3") == 0
    workers = await until(deployment, all_serve)
    assert "draft-4" in workers
    assert await command("drain", "draft-1") == 0
    status = await deployment.status()
    assert "draft-1" not in {worker["name"] for worker in status["workers"]}
    assert status["wanted"]["draft"] == 2
    assert capsys.readouterr().err == ""
    for wrong, words in [
        (["drain", "draft-1"], "no worker is called draft-1"),
        (["drain", "target-0"], "target: 0 asked for, at least 1 needed"),
        (["scale", "cat=1"], "cat: no role of a deployment"),
        (["scale", "draft"], "ROLE=COUNT such as draft=4 needed"),
        (["scale", "draft=²"], "ROLE=COUNT such as draft=4 needed"),
        (["replace", "coordinator"], "coordinator: draft"),
        (["replace", "target", "--model", "x"], "target: draft"),
    ]:
        assert await command(*wrong) == 2
        assert words in capsys.readouterr().err
    assert await command("status", name="nobody") == 1
    assert "no deployment called nobody" in capsys.readouterr().err


async def test_drafts_and_their_model_are_replaced_one_after_the_other(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
):
    old = {name for name in await workers_of(deployment) if name.startswith("draft")}
    fewest = [len(old)]
    replacing = asyncio.create_task(command("replace", "draft", "--model", "better"))
    while not replacing.done():
        roles = [(own["role"], own["state"]) for own in (await workers_of(deployment)).values()]
        # On a busy machine a coordinator may be slow to answer, and then nobody is known to serve.
        if roles.count(("coordinator", "serving")) == 2:
            fewest.append(roles.count(("draft", "serving")))
        await asyncio.sleep(0.05)
    assert await replacing == 0
    assert len(fewest) > 1
    assert min(fewest) == len(old), "a draft went before its successor served"
    workers = await workers_of(deployment)
    fresh = {name for name in workers if name.startswith("draft")}
    assert not fresh & old
    assert capsys.readouterr().out.split() == sorted(fresh)
    assert {workers[name]["model"] for name in fresh} == {"better"}
    # What is added later has the new model too, and one that does not serve is taken back.
    assert await command("scale", "draft=3") == 0
    assert await command("replace", "draft", "--model", "broken") == 1
    assert "was not replaced: several/draft-" in capsys.readouterr().err
    workers = await until(deployment, all_serve)
    assert {own["model"] for own in workers.values() if own["role"] == "draft"} == {"better"}


async def test_killed_and_frozen_roles_come_back_and_the_coordinator_on_its_port(deployment: Deployment):
    before = await until(deployment, all_serve)
    draft = next(name for name in before if name.startswith("draft"))
    sent = {"coordinator-1": signal.SIGKILL, draft: signal.SIGKILL, "target-0": signal.SIGSTOP}
    for name, number in sent.items():
        os.kill(before[name]["pid"], number)
    after = await until(
        deployment,
        lambda workers: all_serve(workers) and all(workers[name]["pid"] != before[name]["pid"] for name in sent),
    )
    assert {name for name, worker in after.items() if worker["restarts"]} == set(sent)
    assert after["coordinator-1"]["address"] == before["coordinator-1"]["address"]


async def test_a_controller_that_dies_finds_everything_again(deployment: Deployment):
    before = await until(deployment, all_serve)
    controller = await deployment.controller.pid.remote()
    os.kill(controller, signal.SIGKILL)
    async with asyncio.timeout(120):
        while True:
            try:
                if await deployment.controller.pid.remote() != controller:
                    break
            except ray.exceptions.RayError:
                await asyncio.sleep(0.1)
    after = await until(deployment, lambda workers: set(workers) == set(before) and all_serve(workers))
    assert {name: own["pid"] for name, own in after.items()} == {name: own["pid"] for name, own in before.items()}
    assert {name: own["restarts"] for name, own in after.items()} == {
        name: own["restarts"] for name, own in before.items()
    }
    assert await command("scale", "draft=4") == 0
    assert len(await until(deployment, all_serve)) == len(before) + 1


async def test_what_ran_on_a_machine_that_dies_is_started_on_another(
    deployment: Deployment, cluster: ray.cluster_utils.Cluster
):
    before = await until(deployment, all_serve)
    killed = before["target-0"]["node_id"]
    (node,) = [node for node in cluster.list_all_nodes() if node.node_id == killed]
    assert node is not cluster.head_node
    cluster.remove_node(node, allow_graceful=False)
    lost = {name for name, own in before.items() if own["node_id"] == killed}
    after = await until(
        deployment, lambda workers: all_serve(workers) and all(own["node_id"] != killed for own in workers.values())
    )
    assert set(after) == set(before)
    assert {name for name in after if after[name]["pid"] != before[name]["pid"]} == lost
    _, events = await deployment.controller.keep.remote(0)
    (told,) = [event for event in events if event.startswith("the machine at ")]
    assert set(re.findall(r"[a-z]+-\d+", told)) == lost, told


async def test_a_deployment_can_be_left_running_found_again_and_ended(
    cluster: ray.cluster_utils.Cluster, capsys: pytest.CaptureFixture[str]
):
    config = DeployConfig(name="left", port=0, stop_timeout_s=5.0)
    async with Deployment(config, roles=FAKES, detach=True) as first:
        endpoints = first.endpoints
    async with Deployment(config, roles=FAKES, detach=True) as again:
        assert again.was_running
        assert again.endpoints == endpoints
        pids = [worker["pid"] for worker in (await again.status())["workers"]]
    with pytest.raises(WorkerUnavailable, match="a deployment called left runs here already"):
        await Deployment(config, roles=FAKES).start()
    assert await command("down", name="left") == 0
    async with asyncio.timeout(120):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match="actor"):
        ray.get_actor("left/draft-0", namespace=NAMESPACE)
    assert ray.is_initialized(), "a Ray that was joined is left alone"
    assert await command("status", name="left") == 1


async def test_a_deployment_ends_when_the_process_that_it_belongs_to_is_silent(cluster: ray.cluster_utils.Cluster):
    config = DeployConfig(name="orphan", port=0, drafts=0, owner_timeout_s=8.0, stop_timeout_s=5.0)
    owner = Deployment(config, roles=FAKES)
    await owner.start()
    pids = [worker["pid"] for worker in (await owner.status())["workers"]]
    assert owner._keeping is not None
    owner._keeping.cancel()
    async with asyncio.timeout(120):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)
        # One that comes to itself again hears of it, as of an `outrider down`.
        owner._keeping = asyncio.create_task(owner._keep())
        await owner.ended()
    await owner.stop()


# -------------------------------------------------------------------------------------------------- what does not start


def refused(name: str, **fields: Any) -> DeployConfig:
    return dataclasses.replace(CONFIG, name=f"refused-{name}", **fields)


UNNOTICED = dataclasses.replace(FAKES, draft=serve_unnoticed)
NOT_STARTED: list[tuple[DeployConfig, Roles, str]] = [
    (refused("a"), dataclasses.replace(FAKES, target=fail_to_serve), "refused-a/target-0 could not serve: OSError: no"),
    (refused("b", start_timeout_s=9.0), UNNOTICED, "not ready after 9 s: (a worker has not registered|.* not serving)"),
    (refused("c"), dataclasses.replace(FAKES, draft=refused_later), "could not serve: WorkerRefused: use a draft"),
    (refused("d", coordinator_resources=("moon=1",)), FAKES, "moon"),
    (refused("e", tensor_parallel_size=64), FAKES, "64 GPUs of one node asked for, no node has so many"),
]


async def test_what_cannot_serve_is_named_and_nothing_stays(cluster: ray.cluster_utils.Cluster):
    starts = (Deployment(config, roles=roles).start() for config, roles, _ in NOT_STARTED)
    errors = await asyncio.gather(*starts, return_exceptions=True)
    for error, (_, _, words) in zip(errors, NOT_STARTED, strict=True):
        assert isinstance(error, WorkerUnavailable)
        assert re.search(words, str(error))
    assert not [name for name in ray.util.list_named_actors() if name.startswith("refused-")]


# ---------------------------------------------------------------------------------------------------------- without Ray


@pytest.mark.parametrize("detach", [True, False])
async def test_of_two_that_start_at_a_time_one_finds_the_other(monkeypatch: pytest.MonkeyPatch, detach: bool):
    def create(_: Deployment) -> None:
        raise ValueError("the name is taken")

    found = iter([None, "the other's controller"])
    monkeypatch.setattr(Deployment, "_running", lambda _: next(found))
    monkeypatch.setattr(Deployment, "_create", create)
    second = Deployment(CONFIG, detach=detach)
    if detach:
        await second._find_or_create()
        assert (second.was_running, second.controller) == (True, "the other's controller")
    else:
        with pytest.raises(WorkerUnavailable, match="runs here already"):
            await second._find_or_create()
