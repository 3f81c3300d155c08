"""Servers that a test starts, and that end with it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from outrider import rpc
from outrider.addresses import Resolve
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig


@contextlib.asynccontextmanager
async def coordinator_running(*, peers: Resolve | None = None, **options: Any) -> AsyncIterator[CoordinatorServer]:
    """A whole coordinator, which waits for nobody when it stops."""
    server = CoordinatorServer(CoordinatorConfig(**{"port": 0, "drain_s": 0.0} | options), peers=peers)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def service_running(add: Callable[[Any, grpc.aio.Server], Any], servicer: Any) -> AsyncIterator[str]:
    """The host:port of one gRPC service."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
