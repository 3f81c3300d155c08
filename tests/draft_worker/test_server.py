"""The draft worker from its configuration to its registration, and its end."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from outrider import rpc
from outrider.draft_worker.server import DraftWorkerConfig, serve
from outrider.errors import CheckpointError, WorkerRefused
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, registry_pb2, registry_pb2_grpc
from outrider.wire import tokens_to_bytes


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Takes one worker in, or refuses it."""

    def __init__(self, *, refusal: str = "") -> None:
        self._refusal = refusal
        self.introduced: asyncio.Future[registry_pb2.WorkerIntroduction] = asyncio.get_running_loop().create_future()
        self.reported: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.calibrated: asyncio.Future[common_pb2.CalibrationReport] = asyncio.get_running_loop().create_future()

    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[registry_pb2.WorkerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.Lease]:
        async for report in request_iterator:
            if report.draining:
                return
            if self._refusal:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refusal)
            if report.WhichOneof("report") == "introduction":
                self.introduced.set_result(report.introduction)
                yield registry_pb2.Lease(incarnation=1, heartbeat_interval_ms=10, lease_ms=1000)
            elif not self.reported.done():
                self.reported.set_result(report.load.slots_total)
            if report.load.calibration.rules and not self.calibrated.done():
                self.calibrated.set_result(report.load.calibration)


async def start_coordinator(registry: Registry) -> rpc.RoleServer:
    coordinator = rpc.RoleServer(
        services=["outrider.v1.RegistryService"],
        add_services=lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server),
        address="127.0.0.1:0",
    )
    await coordinator.start()
    return coordinator


async def test_serves_registers_grows_and_stops(checkpoint: Path):
    registry = Registry()
    coordinator = await start_coordinator(registry)
    config = DraftWorkerConfig(
        model_path=checkpoint, coordinators=(coordinator.address,), num_slots=128, max_num_seqs=4, max_live_nodes=30
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
    async with asyncio.timeout(100):
        address = await ready
        introduction = await registry.introduced
        assert await registry.reported == 128
    assert introduction.address == address
    assert introduction.role == registry_pb2.WORKER_ROLE_DRAFT
    assert (introduction.model.vocab_size, introduction.model.max_model_len) == (96, 256)
    assert (introduction.limits.max_sessions, introduction.limits.max_tree_nodes) == (4, 30)
    async with rpc.open_channel(address) as channel, asyncio.timeout(100):
        call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
        opening = common_pb2.SessionOpen(
            session_id=1, epoch=1, prompt=tokens_to_bytes([3, 4, 5]), sampling=SamplingSpec(temperature=1.0).to_proto()
        )
        await call.write(draft_pb2.DraftCommands(incarnation=1, opens=[opening]))
        growth = await call.read()
        assert list(growth.as_of) == [3]
        assert len(growth.node_ids) > 0
        commit = draft_pb2.CommitBatch(
            session_ids=[1], epochs=[1], positions=[3], token_counts=[1], tokens=[growth.tokens[0]]
        )
        await call.write(draft_pb2.DraftCommands(incarnation=1, commits=commit))
        (observed,) = (await registry.calibrated).rules
        assert (observed.rule, sum(observed.children), sum(observed.hits)) == ("coupled", 4, 1)
        stop.set()
        while await call.read():
            pass
    async with asyncio.timeout(100):
        await serving
    await coordinator.stop(grace_s=0)


async def test_cancelling_it_leaves_nothing_behind(checkpoint: Path):
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = DraftWorkerConfig(model_path=checkpoint, num_slots=64, max_num_seqs=2)
    serving = asyncio.create_task(serve(config, ready=ready.set_result))
    async with asyncio.timeout(100):
        address = await ready
        async with rpc.open_channel(address) as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            await call.write(draft_pb2.DraftCommands(incarnation=1))
            serving.cancel()
            # How it ends depends on how far the call had come: it may not have reached the worker.
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert not await call.read()
        with pytest.raises(asyncio.CancelledError):
            await serving
    for thread in threading.enumerate():
        if thread.name == "draft-growth":
            thread.join(30)
            assert not thread.is_alive()


async def test_a_refusal_ends_it_with_the_reason(checkpoint: Path):
    coordinator = await start_coordinator(Registry(refusal="another tokenizer"))
    config = DraftWorkerConfig(model_path=checkpoint, coordinators=(coordinator.address,), num_slots=64)
    async with asyncio.timeout(100):
        with pytest.raises(WorkerRefused, match="another tokenizer"):
            await serve(config)
    await coordinator.stop(grace_s=0)


async def test_a_folder_that_is_no_checkpoint_ends_it(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        await serve(DraftWorkerConfig(model_path=tmp_path))
