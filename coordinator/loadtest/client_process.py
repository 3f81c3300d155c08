"""Client processes: one here, or several beside this one that begin together."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outrider.coordinator.loadtest.driving import COUNTERS, Driven, Driver, Job, on_interrupt
from outrider.coordinator.loadtest.grpc_sender import GrpcSender
from outrider.coordinator.loadtest.http_connection import HttpError
from outrider.coordinator.loadtest.http_sender import HttpSender
from outrider.coordinator.loadtest.senders import Sender
from outrider.errors import LoadtestFailed, OutriderError
from outrider.roles.ports import allow_many_files
from outrider.security.tls import TlsConfig

# Processes are told when to begin, so far ahead that all of them have heard it.
_LEAD_S = 0.2
_POLL_S = 0.05
_STREAMS_A_CONNECTION, _MOST_CONNECTIONS = 128, 64

Watch = Callable[[Sequence[MutableSequence[int]]], Coroutine[Any, Any, None]]
"""Shows the counters of all processes until it is cancelled."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials of clients. The token itself, not its path: it reaches other processes over a pipe."""

    tls_ca: Path | None = None
    token: str | None = None

    @property
    def tls(self) -> TlsConfig | None:
        """Whom to believe; None talks in the clear."""
        return None if self.tls_ca is None else TlsConfig(ca=self.tls_ca)


async def drive(jobs: Sequence[Job], access: Access, *, warmups: int, watch: Watch) -> list[Driven]:
    """Do all jobs at the same time; the first one warms up before.

    Raises:
        LoadtestFailed: warm-up failed, or a process ended.
    """
    allow_many_files()
    if len(jobs) == 1:
        counters = [0] * COUNTERS
        async with _watched(watch, [counters]):
            return [await _drive(jobs[0], access, warmups=warmups, begun=_begin_now, counters=counters)]
    processes = [_ClientProcess(job, access, warmups=0 if job.process else warmups) for job in jobs]
    try:
        # The one that warms up is ready when it has.
        for process in processes:
            await process.receive()
        begin_s = time.monotonic() + _LEAD_S
        for process in processes:
            process.send(begin_s)
        async with _watched(watch, [process.counters for process in processes]):
            with on_interrupt(lambda: [process.interrupt() for process in processes]):
                return [await process.receive() for process in processes]
    finally:
        for process in processes:
            process.close()


async def _drive(
    job: Job,
    access: Access,
    *,
    warmups: int,
    begun: Callable[[], Coroutine[Any, Any, float]],
    counters: MutableSequence[int],
) -> Driven:
    sender = await _sender(job, access)
    try:
        await Driver(job, sender, begin_s=time.monotonic(), counters=[0] * COUNTERS).warm_up(warmups)
        return await Driver(job, sender, begin_s=await begun(), counters=counters).run()
    finally:
        await sender.close()


async def _sender(job: Job, access: Access) -> Sender:
    config = job.config
    endpoints = [address_of(endpoint) for endpoint in config.endpoint.split(",")]
    if config.protocol == "openai":
        sender = HttpSender(endpoints, model=config.model, tls=access.tls, token=access.token)
        try:
            await sender.prepare()
        except (HttpError, OSError, TimeoutError) as error:
            raise LoadtestFailed(f"{endpoints[0]} answers no OpenAI request: {error}") from error
        return sender
    return GrpcSender(
        endpoints, connections=config.connections or _connections(job), tls=access.tls, token=access.token
    )


def address_of(endpoint: str) -> str:
    """host:port, of an address that may be written as a URL."""
    return endpoint.strip().removeprefix("http://").removeprefix("https://").rstrip("/").removesuffix("/v1")


def _connections(job: Job) -> int:
    """One for so many requests under way, as far as that is known."""
    places = job.places or _MOST_CONNECTIONS * _STREAMS_A_CONNECTION
    expected = min(places, (job.config.num_prompts or 1 << 30) // job.processes)
    return max(1, min(_MOST_CONNECTIONS, -(-expected // _STREAMS_A_CONNECTION)))


async def _begin_now() -> float:
    return time.monotonic()


class _ClientProcess:
    """One process beside this one: ready, told when to begin, then what came of it."""

    def __init__(self, job: Job, access: Access, *, warmups: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.counters: Any = context.RawArray("q", COUNTERS)
        self._process = context.Process(target=_run, args=(job, access, warmups, theirs, self.counters), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: object) -> None:
        self._connection.send(message)

    async def receive(self) -> Any:
        """Return the process's next message.

        Raises:
            LoadtestFailed: it has failed.
        """
        while not self._connection.poll():  # noqa: ASYNC110 a pipe, which the event loop cannot wait for everywhere
            await asyncio.sleep(_POLL_S)
        try:
            answer = await asyncio.to_thread(self._connection.recv)
        except EOFError as error:
            raise LoadtestFailed("a client process has ended") from error
        if isinstance(answer, Exception):
            raise LoadtestFailed(str(answer)) from answer
        return answer

    def interrupt(self) -> None:
        """Have it end with what it has."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(job: Job, access: Access, warmups: int, connection: Connection, counters: MutableSequence[int]) -> None:
    async def begun() -> float:
        connection.send("ready")
        begin_s = await asyncio.to_thread(connection.recv)
        await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
        return begin_s

    if sys.platform != "win32":
        # Ctrl-C reaches the process that began it, which hands it on.
        os.setpgrp()
    allow_many_files()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            connection.send(runner.run(_drive(job, access, warmups=warmups, begun=begun, counters=counters)))
    except (OutriderError, OSError) as error:
        # The other side may have gone.
        with contextlib.suppress(OSError):
            connection.send(LoadtestFailed(str(error)))
    except (EOFError, KeyboardInterrupt):
        pass


@contextlib.asynccontextmanager
async def _watched(watch: Watch, counters: Sequence[MutableSequence[int]]):
    task = asyncio.create_task(watch(counters))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of a client."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
