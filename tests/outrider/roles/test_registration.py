"""Registration against registries of our own in the same process."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.registering import Registry

from outrider.addresses import resolver
from outrider.errors import WorkerRefused
from outrider.roles.registration import Registrar, Registration
from outrider.v1 import common_pb2, registry_pb2


def introduction() -> registry_pb2.WorkerIntroduction:
    return registry_pb2.WorkerIntroduction(
        worker_id="target-1",
        role=registry_pb2.WORKER_ROLE_TARGET,
        address="127.0.0.1:1",
        model=common_pb2.ModelInfo(name="tiny", vocab_size=61),
        limits=registry_pb2.WorkerLimits(max_sessions=2),
    )


def load() -> common_pb2.WorkerLoad:
    return common_pb2.WorkerLoad(sessions=3)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def registrar(*entries: str, drain_s: float = 10.0) -> Registrar:
    return Registrar(resolver(entries), introduction(), load, drain_s=drain_s)


async def test_introduces_itself_then_reports_its_load() -> None:
    registry = Registry()
    server = await registry.serve()
    given = introduction()
    task = asyncio.create_task(Registration(server.address, given, load).keep())
    await registry.until(lambda: len(registry.loads) >= 3)
    assert registry.introductions == [given]
    assert registry.loads[0] == load()
    await cancel(task)
    await server.stop(grace_s=0)


async def test_a_refusal_is_raised_with_its_reason() -> None:
    server = await Registry(refusal="another tokenizer").serve()
    worker = registrar(server.address)
    worker.start()
    with pytest.raises(WorkerRefused, match="another tokenizer"):
        await worker.failed
    await worker.close()
    await server.stop(grace_s=0)


async def test_a_wrong_coordinator_in_the_list_costs_the_others_nothing(tmp_path: Path) -> None:
    registries = [Registry(), Registry(refusal="another tokenizer")]
    servers = [await registry.serve() for registry in registries]
    path = tmp_path / "coordinators"
    path.write_text(f"{servers[0].address}\n")
    worker = registrar(f"file:{path}")
    worker.start()
    await registries[0].until(lambda: bool(registries[0].loads))
    path.write_text("".join(f"{server.address}\n" for server in servers))
    await registries[1].until(lambda: registries[1].refused >= 2)
    assert not worker.failed.done()
    count = len(registries[0].loads)
    await registries[0].until(lambda: len(registries[0].loads) > count)
    await worker.close()
    assert [len(registry.introductions) for registry in registries] == [1, 0]
    for server in servers:
        await server.stop(grace_s=0)


async def test_comes_back_when_a_lease_ends_and_when_the_coordinator_restarts() -> None:
    registry = Registry(end_after=2)
    server = await registry.serve()
    task = asyncio.create_task(Registration(server.address, introduction(), load).keep())
    await registry.until(lambda: len(registry.introductions) >= 2)
    address = server.address
    await server.stop(grace_s=0)
    registry = Registry()
    server = await registry.serve(address)
    await registry.until(lambda: len(registry.loads) >= 1)
    # A refusal after a lease was held is waited out: the coordinator may still hold the former lease.
    registry.refusal = "registered already"
    await registry.until(lambda: registry.refused >= 2)
    registry.refusal = ""
    count = len(registry.introductions)
    await registry.until(lambda: len(registry.introductions) > count)
    await cancel(task)
    await server.stop(grace_s=0)


async def test_joins_and_leaves_coordinators_as_the_list_says(tmp_path: Path) -> None:
    registries = [Registry(), Registry(), Registry()]
    servers = [await registry.serve() for registry in registries]
    path = tmp_path / "coordinators"
    path.write_text(f"{servers[0].address}\n# {servers[1].address}\n{servers[2].address}\n")
    worker = registrar(f"file:{path}")
    worker.start()
    await registries[0].until(lambda: bool(registries[0].loads))
    await registries[2].until(lambda: bool(registries[2].loads))
    assert not registries[1].introductions
    # Each hears how many share the worker.
    await registries[2].until(lambda: registries[2].loads[-1].coordinators == 2)
    path.write_text(f"{servers[1].address}\n{servers[2].address}\n")
    await registries[1].until(lambda: bool(registries[1].loads))
    await registries[0].until(lambda: registries[0].is_left)
    # Without a list the last one holds.
    path.unlink()
    count = len(registries[2].loads)
    await asyncio.sleep(1.2)
    await registries[2].until(lambda: len(registries[2].loads) > count)
    assert not registries[2].is_left
    assert [len(registry.introductions) for registry in registries] == [1, 1, 1]
    await worker.close()
    assert [registry.is_left for registry in registries] == [True] * 3
    for server in servers:
        await server.stop(grace_s=0)


async def test_leaving_waits_for_the_coordinator_but_not_for_ever() -> None:
    registries = [Registry(ends_leases=False), Registry()]
    servers = [await registry.serve() for registry in registries]
    worker = registrar(*(server.address for server in servers), "127.0.0.1:9", drain_s=3.0)
    worker.start()
    for registry in registries:
        await registry.until(lambda registry=registry: bool(registry.loads))
    began = time.monotonic()
    async with asyncio.timeout(60):
        closing = asyncio.create_task(worker.close())
        for registry in registries:
            await registry.until(lambda registry=registry: registry.is_left)
        await closing
    assert time.monotonic() - began > 2.9
    for server in servers:
        await server.stop(grace_s=0)
