"""Placing, watching and stopping actors, with small servers in place of the roles."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import ray
import ray.cloudpickle

from outrider import rpc
from outrider.deploy.actors import RoleReport
from outrider.deploy.cluster import Deployment
from outrider.deploy.config import DeployConfig
from outrider.deploy.connection import NAMESPACE, connect
from outrider.deploy.health import LONGEST_BACKOFF_S, RoleHandle, patience_s, watch
from outrider.deploy.roles import Roles
from outrider.errors import WorkerRefused, WorkerUnavailable
from outrider.v1 import generation_pb2, generation_pb2_grpc, registry_pb2

# The actors cannot import this file: it travels to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Where Ray had to be started twice, it forgets the processes of its first attempt until the end.
pytestmark = pytest.mark.filterwarnings(r"ignore:subprocess \d+ is still running:ResourceWarning")

CONFIG = DeployConfig(port=0, ping_interval_s=0.1, hang_timeout_s=4.0, start_timeout_s=60.0, stop_timeout_s=5.0)


class Registry(generation_pb2_grpc.GenerationServiceServicer):
    """A coordinator that claims the workers it is told of."""

    async def GetServerInfo(self, request, context):  # noqa: N802 (the protocol's name)
        workers = [
            generation_pb2.WorkerStatus(introduction=registry_pb2.WorkerIntroduction(role=role), state="serving")
            for role in (registry_pb2.WORKER_ROLE_TARGET, registry_pb2.WORKER_ROLE_DRAFT)
        ]
        return generation_pb2.ServerInfo(workers=workers)


async def serve_registry(
    config: DeployConfig, *, port: int, host: str, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    server = rpc.RoleServer(
        services=["outrider.v1.GenerationService"],
        add_services=lambda grpc_server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            Registry(), grpc_server
        ),
        address=f"{host}:{port}",
    )
    await server.start()
    ready(server.address)
    await stop.wait()
    await server.stop(grace_s=0)


async def serve_worker(
    config: DeployConfig,
    *,
    coordinator: str,
    device: str,
    host: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    assert device == "cpu"
    server = rpc.RoleServer(services=[], add_services=lambda _: None, address=f"{host}:0")
    await server.start()
    ready(server.address)
    await stop.wait()
    await server.stop(grace_s=0)


async def fail_to_serve(config: DeployConfig, **_: object) -> None:
    raise OSError("no such checkpoint")


FAKES = Roles(coordinator=serve_registry, target=serve_worker, draft=serve_worker)


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """One Ray for all tests here; deployments that find one do not shut it down."""
    assert connect(CONFIG)
    yield
    ray.shutdown()


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with Deployment(CONFIG, roles=FAKES) as started:
        yield started


def handle_of(deployment: Deployment, role: str) -> RoleHandle:
    (handle,) = (handle for handle in deployment.handles if handle.name.endswith(role))
    return handle


async def until_restarted(handle: RoleHandle, pid: int) -> RoleReport:
    async with asyncio.timeout(30):
        while handle.report is None or handle.report.pid == pid or handle.report.address is None:
            await asyncio.sleep(0.05)
    return handle.report


async def test_each_role_serves_in_a_process_of_its_own(deployment: Deployment):
    reports = {handle.name: handle.report for handle in deployment.handles if handle.report}
    assert list(reports) == ["outrider/coordinator", "outrider/target-0", "outrider/draft-0"]
    assert len({report.pid for report in reports.values()} | {os.getpid()}) == 4
    assert deployment.endpoint == reports["outrider/coordinator"].address
    assert deployment.endpoint.startswith("127.0.0.1:")


async def test_a_killed_actor_comes_back_and_the_coordinator_on_its_port(deployment: Deployment):
    for role in ("coordinator", "draft-0"):
        handle = handle_of(deployment, role)
        assert handle.report
        os.kill(handle.report.pid, signal.SIGKILL)
        report = await until_restarted(handle, handle.report.pid)
        assert role == "draft-0" or report.address == deployment.endpoint


async def test_a_frozen_actor_is_replaced(deployment: Deployment):
    handle = handle_of(deployment, "target-0")
    assert handle.report
    os.kill(handle.report.pid, signal.SIGSTOP)
    await until_restarted(handle, handle.report.pid)
    assert handle.restarts == 1


async def test_stop_ends_the_actors_and_leaves_a_joined_ray_alone():
    deployment = Deployment(CONFIG, roles=FAKES)
    await deployment.start()
    pids = [handle.report.pid for handle in deployment.handles if handle.report]
    await deployment.stop()
    assert ray.is_initialized()
    async with asyncio.timeout(10):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match="actor"):
        ray.get_actor("outrider/draft-0", namespace=NAMESPACE)


async def test_a_role_that_fails_at_the_start_is_named_and_nothing_stays():
    deployment = Deployment(CONFIG, roles=Roles(coordinator=serve_registry, target=fail_to_serve, draft=serve_worker))
    with pytest.raises(WorkerUnavailable, match="outrider/target-0 could not serve: OSError: no such checkpoint"):
        await deployment.start()
    assert deployment.handles == []


async def test_a_worker_that_never_registers_is_a_timeout():
    config = DeployConfig(port=0, drafts=2, start_timeout_s=10.0)
    with pytest.raises(WorkerUnavailable, match="not ready after 10 s: a worker has not registered"):
        await Deployment(config, roles=FAKES).start()


async def test_resources_that_no_node_has_are_named():
    config = DeployConfig(port=0, coordinator_resources=("moon=1",))
    with pytest.raises(WorkerUnavailable, match="moon"):
        await Deployment(config, roles=FAKES).start()


async def test_more_gpus_than_a_node_has_are_refused():
    config = DeployConfig(port=0, tensor_parallel_size=64)
    with pytest.raises(WorkerUnavailable, match="64 GPUs of one node asked for, this node does not have so many"):
        await Deployment(config, roles=FAKES).start()


def test_an_actor_that_loads_may_be_silent_for_longer():
    serving = RoleReport(pid=1, node="n", address="h:1", failure=None)
    loading = RoleReport(pid=1, node="n", address=None, failure=None)
    assert patience_s(serving, CONFIG) == CONFIG.hang_timeout_s
    assert patience_s(loading, CONFIG) == patience_s(None, CONFIG) == CONFIG.start_timeout_s


async def refused_later(config: DeployConfig, *, ready: Callable[[str], None], **_: object) -> None:
    ready("127.0.0.1:1")
    await asyncio.sleep(1.0)
    raise WorkerRefused("use a draft and a target with the same tokenizer")


async def test_a_worker_that_the_coordinator_refuses_is_named_with_the_reason():
    config = DeployConfig(port=0, drafts=2)
    roles = Roles(coordinator=serve_registry, target=serve_worker, draft=refused_later)
    with pytest.raises(WorkerUnavailable, match="could not serve: WorkerRefused: use a draft"):
        await Deployment(config, roles=roles).start()


class FailingActor:
    """Loads, fails, is started anew, loads, fails."""

    def __init__(self) -> None:
        self.report = self
        self._asked = 0

    async def remote(self) -> RoleReport:
        self._asked += 1
        failure = "OSError: no such checkpoint" if self._asked % 2 == 0 else None
        return RoleReport(pid=self._asked // 2, node="n", address=None, failure=failure)


async def test_a_role_that_fails_again_and_again_gets_longer_pauses(monkeypatch):
    monkeypatch.setattr("outrider.deploy.health.ray.kill", lambda *_, **__: None)
    handle = RoleHandle(name="target-0", actor=FailingActor())
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def note_pause(seconds: float) -> None:
        if handle.report is None:
            pauses.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("outrider.deploy.health.asyncio.sleep", note_pause)
    watching = asyncio.create_task(watch(handle, CONFIG))
    while len(pauses) < 10:
        await real_sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert pauses[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert pauses[-1] == LONGEST_BACKOFF_S
