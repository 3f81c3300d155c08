"""Limits on what a server takes from a caller before it knows who that is."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import rpc
from outrider.errors import InvalidRequest
from outrider.request_decoding import decode
from outrider.v1 import generation_pb2


async def outcome(address: str, *, metadata_bytes: int = 1, message_bytes: int = 0) -> str:
    # A connection of its own: gRPC would share one that an earlier channel has left behind.
    options = [*rpc.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        request = health_pb2.HealthCheckRequest(service="x" * message_bytes)
        try:
            await check(request, metadata=(("key", "x" * metadata_bytes),), timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


@contextlib.asynccontextmanager
async def small_server() -> AsyncIterator[rpc.RoleServer]:
    server = rpc.RoleServer(
        services=[], add_services=lambda server: None, address="127.0.0.1:0", max_request_bytes=1_000
    )
    try:
        await server.start()
        yield server
    finally:
        await server.stop(grace_s=0)


async def test_what_is_too_large_ends_with_a_reason():
    async with small_server() as server:
        assert await outcome(server.address) == "OK"
        assert await outcome(server.address, message_bytes=900) == "NOT_FOUND"
        assert await outcome(server.address, message_bytes=1_100) == "RESOURCE_EXHAUSTED"
        assert await outcome(server.address, metadata_bytes=rpc.MAX_METADATA_BYTES - 2_000) == "OK"
        assert await outcome(server.address, metadata_bytes=rpc.MAX_METADATA_BYTES) == "RESOURCE_EXHAUSTED"


async def test_connections_that_say_nothing_leave_no_room_until_they_end(monkeypatch: pytest.MonkeyPatch):
    most = 4
    options = dict(rpc.SERVER_OPTIONS) | {"grpc.max_allowed_incoming_connections": most}
    assert options.keys() == dict(rpc.SERVER_OPTIONS).keys()
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", list(options.items()))
    async with small_server() as server:
        with contextlib.ExitStack() as silent:
            for _ in range(most):
                silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            # One of them may have been turned away itself, while a channel that has ended still counted.
            async with asyncio.timeout(60):
                while (found := await outcome(server.address)) == "OK":
                    silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert found == "UNAVAILABLE"
        async with asyncio.timeout(60):
            while await outcome(server.address) != "OK":
                await asyncio.sleep(0.05)


def test_of_endless_broken_text_some_is_named():
    good = generation_pb2.GenerateRequest(sampling_params={"stop": ["??"] * 10_000}).SerializeToString()
    message_type: Any = generation_pb2.GenerateRequest.DESCRIPTOR
    found = decode(message_type, good.replace(b"??", b"\xff\xff"))
    assert isinstance(found, InvalidRequest)
    assert len(found.violations) == 16
    assert len(rpc.status_of(found).SerializeToString()) * 4 // 3 + len(str(found)) < rpc.MAX_METADATA_BYTES
