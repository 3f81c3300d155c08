"""Leases that nobody should send, some dozens; `benchmarks/fuzz.py` sends ten thousand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from benchmarks.fuzz_bench.evil_coordinators import fuzz_leases
from benchmarks.fuzz_bench.honest_answers import heartbeat, introduction

from outrider.addresses import resolver
from outrider.roles.registration import Registrar
from outrider.v1 import registry_pb2

pytestmark = pytest.mark.usefixtures("silence")
GOOD = registry_pb2.Lease(incarnation=1, heartbeat_interval_ms=20).SerializeToString()
NO_PAUSE = registry_pb2.Lease(incarnation=1).SerializeToString()


async def until_heard(*streams: Sequence[bytes]) -> None:
    """Answers one registration after the other, and waits until the worker has reported a hundred times in the last.

    Raises:
        AssertionError: it has not, or has given up.
    """
    left, done = list(streams), asyncio.Event()

    async def register(reports: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        if not left:
            return
        for answer in left.pop(0):
            yield answer
        count = 0
        async for _ in reports:
            count += 1
            if not left and count == 100:
                done.set()

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(register)
    service = grpc.method_handlers_generic_handler("outrider.v1.RegistryService", {"Register": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    hello = introduction(1, address="127.0.0.1:1", is_target=False, tokenizer_hash="any").introduction
    registrar = Registrar(resolver([f"127.0.0.1:{port}"]), hello, lambda: heartbeat(1).load, drain_s=1.0)
    registrar.start()
    try:
        finished = asyncio.ensure_future(done.wait())
        await asyncio.wait([finished, registrar.failed], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert not registrar.failed.done(), registrar.failed.exception()
        assert finished.done()
    finally:
        await registrar.close(in_order=False)
        await server.stop(0)


async def test_a_worker_goes_on_after_leases_that_are_none():
    # gRPC gives None for such bytes; the worker ended of it.
    await until_heard([b"\x0a\xff"], [GOOD, b"\xff"], [GOOD])


async def test_a_worker_that_is_told_to_pause_for_nothing_pauses_all_the_same():
    began_s = asyncio.get_running_loop().time()
    await until_heard([NO_PAUSE])
    # A hundred reports, the introduction among them: 98 pauses of 10 ms, however fast the machine is.
    assert asyncio.get_running_loop().time() - began_s > 0.9


async def test_any_leases_leave_a_worker_registered_in_the_end():
    outcome = await fuzz_leases(60, seed=7)
    assert not outcome.findings, [finding.fault for finding in outcome.findings[:3]]
    assert not outcome.left
    assert outcome.codes["lease taken"] > 4
