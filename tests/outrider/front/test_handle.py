"""The front process as its worker sees it: told what to do, and neither process outlives the other."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from outrider import rpc
from outrider.draft_worker.server import DraftWorkerConfig, serve
from outrider.draft_worker.service import SERVICE
from outrider.errors import CertificateError, WorkerUnavailable
from outrider.front.handle import Front
from outrider.roles.health_command import check_health
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import draft_pb2_grpc

_WORKER = """
import asyncio
from outrider.draft_worker.server import DraftWorkerConfig, serve
from outrider.draft_worker.service import SERVICE
config = DraftWorkerConfig(num_slots=64, max_num_seqs=2)
asyncio.run(serve(config, ready=lambda address: print(address, flush=True)))
"""


def a_front(tls: TlsConfig | None = None) -> Front:
    return Front(SERVICE, role=Role.DRAFT, address="127.0.0.1:0", most_waiting=1, tls=tls)


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _is_front(process: int) -> bool:
    return b"front.process" in Path(f"/proc/{process}/cmdline").read_bytes()


def _until_gone(process: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process}").exists() and "State:\tZ" not in Path(f"/proc/{process}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_taken_address_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(DraftWorkerConfig(port=port))


async def test_certificates_that_the_front_process_cannot_use_are_named(tmp_path: Path):
    front = a_front(TlsConfig(ca=tmp_path / "ca.pem", certificate=tmp_path / "a", key=tmp_path / "b"))
    with contextlib.closing(front), pytest.raises(CertificateError, match=r"ca\.pem"):
        await front.listen()


@pytest_asyncio.fixture
async def serving_front() -> AsyncIterator[tuple[Front, int]]:
    before = set(_children(os.getpid()))
    with contextlib.closing(a_front()) as front:
        await front.listen()
        await front.start()
        (process,) = filter(_is_front, set(_children(os.getpid())) - before)
        yield front, process


async def _nothing_to_drain() -> None:
    return


async def test_a_front_process_that_hangs_holds_up_no_stop(
    serving_front: tuple[Front, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("outrider.front.handle._STOP_TIMEOUT_S", 0.05)
    front, process = serving_front
    os.kill(process, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await front.stop(drain=_nothing_to_drain)
    assert not Path(f"/proc/{process}").exists()
    # The worker's thread, which may be amid a step, finds an end there, and no closed socket.
    assert front.data.recv(1) == b""


async def test_only_its_worker_tells_a_front_process_to_stop(serving_front: tuple[Front, int]):
    front, process = serving_front
    # As systemd does: to every process of a service.
    os.kill(process, signal.SIGTERM)

    async def drain() -> None:
        assert "State:\tZ" not in Path(f"/proc/{process}/status").read_text()

    await front.stop(drain=drain)
    assert not front.failed.done()


async def test_open_calls_are_told_why_their_worker_has_failed(serving_front: tuple[Front, int]):
    front, _ = serving_front
    async with rpc.open_channel(front.address) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
        await call.wait_for_connection()
        # What is still on its way to the process as it ends is cancelled by gRPC: it has to be there.
        assert await asyncio.to_thread(front.data.recv, 1 << 12), "no call was opened"
        await front.stop(drain=_nothing_to_drain, failure=WorkerUnavailable("the draft worker failed: out of memory"))
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await call.read()
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE
    assert told.value.details() == "the draft worker failed: out of memory"


async def test_a_worker_ends_with_its_front_process():
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = DraftWorkerConfig(num_slots=64, max_num_seqs=2)
    serving = asyncio.create_task(serve(config, ready=ready.set_result))
    async with asyncio.timeout(100):
        await ready
        (front,) = filter(_is_front, _children(os.getpid()))
        os.kill(front, signal.SIGKILL)
        with pytest.raises(WorkerUnavailable, match="that speaks to coordinators was killed by signal 9"):
            await serving


def test_a_front_process_ends_with_its_worker():
    command = [sys.executable, "-c", _WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        address = worker.stdout.readline().strip()
        (front,) = filter(_is_front, _children(worker.pid))
        asyncio.run(check_health(address, tls=None, role=None, timeout_s=30))
        worker.kill()
    _until_gone(front)
