"""The draft worker from its configuration to its registration, and its end."""

import asyncio
import contextlib
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tests.registering import Registry

from outrider import rpc
from outrider.draft_worker.server import DraftWorkerConfig, serve
from outrider.errors import CheckpointError, WorkerRefused
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, registry_pb2
from outrider.wire import uints_from_bytes, uints_to_bytes


async def test_serves_registers_grows_and_stops(checkpoint: Path):
    registry = Registry()
    coordinator = await registry.serve()
    config = DraftWorkerConfig(
        model_path=checkpoint, coordinators=(coordinator.address,), num_slots=128, max_num_seqs=4, max_live_nodes=30
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
    async with asyncio.timeout(100):
        address = await ready
        await registry.until(lambda: bool(registry.loads))
    (introduction,) = registry.introductions
    assert registry.loads[0].slots_total == 128
    assert introduction.address == address
    assert introduction.role == registry_pb2.WORKER_ROLE_DRAFT
    assert (introduction.model.vocab_size, introduction.model.max_model_len) == (96, 256)
    assert introduction.limits.max_sessions == 4
    async with rpc.open_channel(address) as channel, asyncio.timeout(100):
        call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
        opening = common_pb2.SessionOpen(
            session_id=1, epoch=1, prompt=uints_to_bytes([3, 4, 5]), sampling=SamplingSpec(temperature=1.0).to_proto()
        )
        await call.write(draft_pb2.DraftCommands(incarnation=1, opens=[opening]))
        growth = await call.read()
        assert list(growth.as_of) == [3]
        assert len(growth.node_ids) > 0
        commit = draft_pb2.CommitBatch(
            session_ids=[1], epochs=[1], positions=[3], token_counts=[1], tokens=uints_from_bytes(growth.tokens)[:1]
        )
        await call.write(draft_pb2.DraftCommands(incarnation=1, commits=commit))
        await registry.until(lambda: bool(registry.loads[-1].calibration.rules))
        (observed,) = registry.loads[-1].calibration.rules
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
    coordinator = await Registry(refusal="another tokenizer").serve()
    config = DraftWorkerConfig(model_path=checkpoint, coordinators=(coordinator.address,), num_slots=64)
    async with asyncio.timeout(100):
        with pytest.raises(WorkerRefused, match="another tokenizer"):
            await serve(config)
    await coordinator.stop(grace_s=0)


async def test_a_folder_that_is_no_checkpoint_ends_it(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        await serve(DraftWorkerConfig(model_path=tmp_path))
