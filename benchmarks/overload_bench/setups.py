"""What is put under load: the embedded pair, or workers that sleep instead of computing."""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.simulation.fake_workers import FakeDraft, FakeTarget
from benchmarks.simulation.path_model import VOCAB_SIZE
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.worker_process import WorkerProcess
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.client import AsyncClient
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.local import LocalService
from outrider.models import embedded_target_path, held_out_prompts
from outrider.registration import Registration
from outrider.role_process import RoleProcess, stop_all
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2, registry_pb2
from outrider.worker import introduce

_START_S = 120.0
_SIMULATED_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that runs.

    Attributes:
        endpoint: of its coordinator; of several, separated by commas.
        coordinator_pids: whose memory and time are watched.
        prompts: for its requests, without end.
    """

    endpoint: str
    coordinator_pids: tuple[int, ...]
    prompts: Iterator[list[int]]


@contextlib.asynccontextmanager
async def real(coordinator_args: Sequence[str], *, seed: int) -> AsyncIterator[Service]:
    """The embedded pair, one thread each."""
    service = LocalService(drafts=1, target_threads=1, coordinator_args=coordinator_args)
    await asyncio.to_thread(service.start)
    try:
        tokenizer = TextTokenizer.load(embedded_target_path())
        prompts = [tokenizer.encode(text)[:18] for text in held_out_prompts()]
        random.Random(seed).shuffle(prompts)
        yield Service(
            endpoint=service.endpoint,
            coordinator_pids=(service.processes["coordinator"].pid,),
            prompts=itertools.cycle(prompts),
        )
    finally:
        await asyncio.to_thread(service.stop)


@contextlib.asynccontextmanager
async def simulated(
    settings: Settings, coordinator_args: Sequence[str], *, coordinators: int = 1
) -> AsyncIterator[Service]:
    """Coordinator processes, each between fake workers of its own, of given step times.

    A fake worker knows sessions by their number alone, so that coordinators cannot share one.
    """
    with (
        TemporaryDirectory() as folder,
        WorkerProcess(settings, FakeTarget) as targets,
        WorkerProcess(settings, FakeDraft) as drafts,
    ):
        _write_model(Path(folder))
        arguments = ["--port", "0", "--model-path", folder, *coordinator_args]
        processes = [RoleProcess(f"coordinator-{number}", "coordinator", arguments) for number in range(coordinators)]
        leases: list[asyncio.Task[None]] = []
        try:
            deadline = time.monotonic() + _START_S
            endpoints = [await asyncio.to_thread(process.await_ready, deadline) for process in processes]
            workers = [(registry_pb2.WORKER_ROLE_TARGET, port) for port in await asyncio.to_thread(targets.ports)]
            workers += [(registry_pb2.WORKER_ROLE_DRAFT, port) for port in await asyncio.to_thread(drafts.ports)]
            for number, (role, port) in enumerate(workers):
                introduction = introduce(
                    role,
                    address=f"127.0.0.1:{port}",
                    model=_model(Path(folder)),
                    limits=settings.worker_limits(),
                )
                lease = Registration(endpoints[number % coordinators], introduction, common_pb2.WorkerLoad)
                leases.append(asyncio.create_task(lease.keep()))
            for endpoint in endpoints:
                await _until_serving(endpoint, len(workers) // coordinators)
            keys = ([key % VOCAB_SIZE, 1] for key in itertools.count(1))
            pids = tuple(process.process.pid for process in processes)
            yield Service(endpoint=",".join(endpoints), coordinator_pids=pids, prompts=keys)
        finally:
            for lease in leases:
                lease.cancel()
            await asyncio.gather(*leases, return_exceptions=True)
            await asyncio.to_thread(stop_all, processes)


async def _until_serving(endpoint: str, count: int) -> None:
    async with AsyncClient(endpoint) as client, asyncio.timeout(_START_S):
        async for info in client.watch(interval_ms=100):
            if sum(worker.state == "serving" for worker in info.workers) == count:
                return


def _write_model(folder: Path) -> None:
    """What a coordinator reads of a checkpoint, for the vocabulary of the fake workers."""
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": _SIMULATED_LEN}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"word{number}" for number in range(VOCAB_SIZE - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _model(folder: Path) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        name="simulated", vocab_size=VOCAB_SIZE, tokenizer_hash=tokenizer_hash(folder), max_model_len=_SIMULATED_LEN
    )
