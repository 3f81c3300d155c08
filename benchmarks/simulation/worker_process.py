"""The processes of the fake workers, and the coordinator's handle on them.

Targets and drafts are apart: the bookkeeping of a large fake draft must not delay a target's step.
"""

import asyncio
import gc
import multiprocessing
import selectors
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
from benchmarks.simulation.fake_workers import FakeDraft, FakeTarget, StepTrace
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings

from outrider import rpc

WorkerKind = type[FakeTarget] | type[FakeDraft]
_START_S, _REPORT_S = 30.0, 30.0


class WorkerProcess:
    """All fake workers of a kind, in one process beside this one; use with `with`.

    Args:
        kind: `FakeTarget` or `FakeDraft`.
    """

    def __init__(self, settings: Settings, kind: WorkerKind) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(settings, kind, theirs), name=kind.__name__, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ports(self) -> list[int]:
        """Where the workers listen."""
        return self._receive(_START_S)

    def traces(self) -> list[list[StepTrace]]:
        """What each did until now."""
        self._connection.send("traces")
        return self._receive(_REPORT_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"the process of the fake workers said nothing for {timeout_s:g} s")
        return self._connection.recv()


def _run(settings: Settings, kind: WorkerKind, connection: Connection) -> None:
    # The default selector counts in whole milliseconds, which is longer than a draft's step.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        gc.freeze()
        runner.run(_serve(settings, kind, connection))


async def _serve(settings: Settings, kind: WorkerKind, connection: Connection) -> None:
    model = PathModel(seed=settings.seed, rank_rates=settings.rank_rates, spread=settings.spread)
    count = settings.targets if kind is FakeTarget else settings.workers
    workers = [kind(settings, model) for _ in range(count)]
    servers, ports = [], []
    for worker in workers:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        worker.add_to(server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    connection.send(ports)
    try:
        while await asyncio.to_thread(connection.recv):
            connection.send([worker.traces for worker in workers])
    except (EOFError, OSError):
        pass
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers))
