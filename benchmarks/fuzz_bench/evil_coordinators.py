"""Leases that nobody should send: coordinators that a worker keeps registered with, whatever they answer.

A coordinator may refuse a worker or end its lease; it cannot end the worker by what is neither, nor make it talk
without a pause.
"""

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from benchmarks.fuzz_bench.honest_answers import heartbeat, introduction
from benchmarks.fuzz_bench.messages import MessageFuzzer
from benchmarks.fuzz_bench.run import WARM_UP_SHARE, Finding, Outcome, rss_mb

from outrider.addresses import resolver
from outrider.roles.registration import SHORTEST_HEARTBEAT_S, Registrar
from outrider.rpc import SERVER_OPTIONS
from outrider.v1 import registry_pb2

LEASE_KIND = "Lease"
_COORDINATORS = 4
_PAUSE_S = 0.002
_LONGEST_STREAM = 40
_RETURN_S = 60.0


class EvilCoordinator:
    """A registry whose answers are honest at first, then every other one is not.

    Args:
        seed: of what it sends.

    Attributes:
        sent: evil messages so far.
        last: the last one.
        faults: what a worker did that it must not.
        is_honest: from now on.
    """

    def __init__(self, seed: str) -> None:
        self._fuzzer = MessageFuzzer(registry_pb2.Lease, seed=seed)
        self.sent, self.last = 0, b""
        self.faults: list[str] = []
        self.is_honest = False

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve while the block runs, and yield the address."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._register)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("outrider.v1.RegistryService", {"Register": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)

    async def _register(self, reports: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        heard = 0

        async def hear() -> None:
            nonlocal heard
            async for data in reports:
                report = registry_pb2.WorkerReport.FromString(data)
                if report.WhichOneof("report") != ("load" if heard else "introduction"):
                    self.faults.append(f"report {heard} of a stream is {report.WhichOneof('report')}")
                heard += 1

        loop = asyncio.get_running_loop()
        hearing, began_s = asyncio.create_task(hear()), loop.time()
        honest = registry_pb2.Lease(incarnation=1, heartbeat_interval_ms=20)
        turns = itertools.repeat(True) if self.is_honest else range(self._fuzzer.random.choice((0, 0, 1, 2)))
        try:
            for _ in turns:
                yield honest.SerializeToString()
                await asyncio.sleep(_PAUSE_S)
            for _ in range(_LONGEST_STREAM):
                if self._fuzzer.random.random() < 0.5:
                    yield honest.SerializeToString()
                else:
                    self.sent += 1
                    self.last = self._fuzzer.message([honest])
                    yield self.last
                await asyncio.sleep(_PAUSE_S)
        finally:
            hearing.cancel()
            most = 3 + (loop.time() - began_s) / SHORTEST_HEARTBEAT_S
            if heard > most:
                self.faults.append(f"{heard} reports where {most:.0f} would be many")


async def fuzz_leases(messages: int, *, seed: int) -> Outcome:
    """Keep one worker registered with several evil coordinators until they have sent `messages` messages."""
    outcome, began, tasks = Outcome(service=LEASE_KIND), time.monotonic(), len(asyncio.all_tasks())
    coordinators = [EvilCoordinator(f"{seed} {number}") for number in range(_COORDINATORS)]

    def sent() -> int:
        return sum(each.sent for each in coordinators)

    def note(fault: str) -> None:
        outcome.findings.append(Finding(method="Register", payloads=[each.last for each in coordinators], fault=fault))

    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(each.serving()) for each in coordinators]
        hello = introduction(1, address="127.0.0.1:1", is_target=False, tokenizer_hash="any").introduction
        registrar = Registrar(resolver(addresses), hello, lambda: heartbeat(1).load, drain_s=1.0)
        registrar.start()
        try:
            rss = rss_mb()
            while sent() < messages and not registrar.failed.done():
                await asyncio.sleep(_PAUSE_S)
                if sent() < messages * WARM_UP_SHARE:
                    rss = rss_mb()
            gc.collect()
            outcome.rss_mb = rss, rss_mb()
            for each in coordinators:
                each.is_honest = True
            if registrar.failed.done():
                note(f"the worker gave up: {registrar.failed.exception()!r}")
            elif not await _registered(registrar):
                note("no lease of coordinators that are honest again")
            taken = sum(registration.leases for registration, _ in registrar._followed.members.values())
        finally:
            await registrar.close(in_order=False)
    for fault in (fault for each in coordinators for fault in each.faults):
        note(fault)
    outcome.messages, outcome.codes["lease taken"] = sent(), taken
    await asyncio.sleep(_PAUSE_S)
    if (left := len(asyncio.all_tasks()) - tasks) > 0:
        outcome.left.append(f"{left} tasks")
    outcome.seconds = time.monotonic() - began
    return outcome


async def _registered(registrar: Registrar) -> bool:
    """Return True if every lease is held within a time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RETURN_S):
            while not all(registration.holds_lease for registration, _ in registrar._followed.members.values()):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)
            return True
    return False
