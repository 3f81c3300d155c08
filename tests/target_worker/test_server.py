"""The target worker from its configuration to its registration, and its end."""

import asyncio
import importlib.util
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.registering import Registry
from tests.tiny_llama import write_llama

from outrider import rpc
from outrider.errors import CheckpointError, WorkerUnavailable
from outrider.target_worker.server import TargetWorkerConfig, serve
from outrider.v1 import registry_pb2


async def test_serves_registers_and_stops(checkpoint: Path) -> None:
    registry = Registry()
    coordinator = await registry.serve()
    config = TargetWorkerConfig(
        model_path=checkpoint, coordinators=(coordinator.address,), num_slots=64, max_num_seqs=4, max_step_tokens=32,
        name="place 3",
    )  # fmt: skip
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop))
    async with asyncio.timeout(100):
        address = await ready
        await registry.until(lambda: bool(registry.loads))
    (introduction,) = registry.introductions
    assert registry.loads[0].slots_total == 64
    assert introduction.address == address
    assert (introduction.role, introduction.name) == (registry_pb2.WORKER_ROLE_TARGET, "place 3")
    assert introduction.worker_id.startswith("target-") and introduction.version
    assert (introduction.model.vocab_size, introduction.model.max_model_len) == (61, 96)
    assert list(introduction.model.eos_token_ids) == [60]
    assert introduction.limits.max_sessions == 4
    async with rpc.open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    stop.set()
    async with asyncio.timeout(100):
        await serving
    await coordinator.stop(grace_s=0)


async def test_a_lost_rank_ends_a_worker_that_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_llama(tmp_path, num_key_value_heads=2)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = TargetWorkerConfig(model_path=tmp_path, num_slots=64, tensor_parallel_size=2)
    serving = asyncio.create_task(serve(config, ready=ready.set_result))
    await asyncio.wait([serving, ready], timeout=200, return_when=asyncio.FIRST_COMPLETED)
    (pid,) = (int(number) for number in re.findall(r"rank 1 is process (\d+)", caplog.text))
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(100):
        with pytest.raises(WorkerUnavailable, match="rank 1 was killed by signal 9"):
            await serving


async def test_a_folder_that_is_no_checkpoint_ends_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        await serve(TargetWorkerConfig(model_path=tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port: 70000"),
        ({"host": ""}, "host"),
        ({"max_step_tokens": 0}, "max_step_tokens: 0"),
        ({"max_step_tokens": 8}, "at least max_num_seqs"),
        ({"max_tree_nodes": 0}, "max_tree_nodes: 0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens: 0"),
        ({"draft_branching": 0}, "draft_branching: 0 given, at least 1"),
        ({"max_draft_steps": 9}, "max_draft_steps: 9 given, 1 to 8"),
        ({"prefill_slowdown": -0.1}, "prefill_slowdown: -0.1"),
        ({"coordinators": ("localhost",)}, "host:port"),
        ({"threads": 0}, "torch_threads"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"deterministic": True, "device": "cuda", "enforce_eager": True}, "deterministic: .* enforce_eager"),
        ({"deterministic": True, "device": "cuda", "attention_backend": "flashinfer"}, "deterministic: .* flashinfer"),
    ],
)
def test_configurations_that_cannot_work(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if every extra were installed.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=message):
        TargetWorkerConfig(**options)
