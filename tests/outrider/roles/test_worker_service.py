"""Serving a worker, whichever it is: the order in which things begin and end."""

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import cast

import pytest

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.errors import OutriderError
from outrider.front.handle import Front
from outrider.front.inbox import Inbox
from outrider.roles.ports import free_port
from outrider.roles.step_watch import StepWatch
from outrider.roles.worker_config import WorkerConfig
from outrider.roles.worker_service import Loaded, Worker, serve_worker
from outrider.security.roles import Role
from outrider.v1 import common_pb2, registry_pb2


class IdleThread:
    """Has loaded its model at once, and has nothing to do."""

    def __init__(self) -> None:
        self.watch, self.ready, self.stopped = StepWatch(), Future[None](), Future[None]()

    def start(self) -> None:
        self.ready.set_result(None)
        # Nobody can cancel what runs, as with the real ones.
        self.stopped.set_running_or_notify_cancel()

    def stop(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)


class IdleFront:
    """Nobody calls; what is read of the worker's metrics when it has handed its sessions over."""

    address, port = "127.0.0.1:1", 1

    def __init__(self, metrics_port: int) -> None:
        self.failed: Future[None] = Future()
        self.failed.set_running_or_notify_cancel()
        self._url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.at_the_end = ""
        self.failure: OutriderError | None = None

    async def listen(self) -> None:
        pass

    async def start(self) -> None:
        pass

    def share_cores(self) -> None:
        pass

    async def stop(self, *, drain: Callable[[], Awaitable[None]], failure: OutriderError | None = None) -> None:
        await drain()
        self.failure = failure
        self.at_the_end = await asyncio.to_thread(self._read)

    def close(self) -> None:
        pass

    def _read(self) -> str:
        with urllib.request.urlopen(self._url, timeout=30) as answer:
            return answer.read().decode()


class IdleWorker(Worker[IdleThread]):
    """Has nothing to do."""

    role = Role.DRAFT

    def __init__(self, front: IdleFront) -> None:
        self.thread, self.front, self.inbox = IdleThread(), cast("Front", front), Inbox[None]()

    def loaded(self) -> Loaded:
        return Loaded(
            model=common_pb2.ModelInfo(name="none"),
            limits=registry_pb2.WorkerLimits(max_sessions=1),
            metrics=lambda families: families.gauge("answer", "a", 42),
        )

    def load(self) -> common_pb2.WorkerLoad:
        return common_pb2.WorkerLoad()


def a_config(metrics_port: int) -> WorkerConfig:
    return DraftWorkerConfig(coordinators=(f"127.0.0.1:{free_port()}",), drain_s=1.0, metrics_port=metrics_port)


async def test_a_worker_is_read_until_it_has_drained():
    port = free_port()
    front, stop = IdleFront(port), asyncio.Event()
    async with asyncio.timeout(60):
        await serve_worker(lambda _: IdleWorker(front), a_config(port), ready=lambda _: stop.set(), stop=stop)
    assert "outrider_answer 42.0" in front.at_the_end
    assert front.failure is None


async def test_open_calls_end_with_what_ended_the_thread():
    port = free_port()
    front = IdleFront(port)
    worker = IdleWorker(front)

    def fail(_address: str) -> None:
        worker.thread.stopped.set_exception(RuntimeError("an illegal memory access"))

    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            await serve_worker(lambda _: worker, a_config(port), ready=fail)
    assert str(front.failure) == "the draft worker failed: an illegal memory access"
