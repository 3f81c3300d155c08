"""The Ray actor that hosts one role's own gRPC server. Data flows between those servers, never through Ray."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
import ray.util

from outrider import rpc
from outrider.v1 import generation_pb2, generation_pb2_grpc, registry_pb2

logger = logging.getLogger(__name__)

SERVER_INFO_TIMEOUT_S = 5.0


class Serve(Protocol):
    """Serves one role until `stop` is set; calls `ready` with host:port once it listens."""

    async def __call__(self, *, host: str, ready: Callable[[str], None], stop: asyncio.Event) -> None:
        """Runs the server."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """What an actor says of itself.

    Attributes:
        pid: of its process, new after every restart.
        node: name of its machine.
        address: host:port of its server; None while it loads.
        failure: why its server ended by itself; None while it has not.
    """

    pid: int
    node: str
    address: str | None
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class ServingWorkers:
    """Workers that a coordinator can use now, by role."""

    targets: int
    drafts: int


class RoleActor:
    """Starts to serve in its constructor, so that an actor restarted by Ray serves again without being told.

    A constructor that ran long or raised could neither be watched nor explain itself: the server runs in a task, and
    `report` answers from the first moment on.
    """

    def __init__(self, serve: Serve, *, name: str, host: str | None) -> None:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(message)s"
        )
        self._stop = asyncio.Event()
        self._address: str | None = None
        self._failure: str | None = None
        self._serve = serve
        self._host = host if host is not None else ray.util.get_node_ip_address()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def report(self) -> RoleReport:
        """Its process, its address and how it is."""
        return RoleReport(pid=os.getpid(), node=socket.gethostname(), address=self._address, failure=self._failure)

    async def stop(self) -> None:
        """Asks the role to finish, and returns when it has."""
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        try:
            await self._serve(host=self._host, ready=self._ready, stop=self._stop)
        except Exception as error:
            logger.exception("the server ended")  # and whoever watches this actor is told, and decides
            self._failure = f"{type(error).__name__}: {error}"
        else:
            if not self._stop.is_set():
                self._failure = "the server ended by itself"
        self._address = None

    def _ready(self, address: str) -> None:
        self._address = address


class CoordinatorActor(RoleActor):
    """A role that can also say which workers have registered with it, wherever its caller is."""

    async def serving_workers(self) -> ServingWorkers:
        """Counts the workers in use; none while it does not listen yet."""
        if self._address is None:
            return ServingWorkers(targets=0, drafts=0)
        async with rpc.open_channel(self._address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                info = await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=SERVER_INFO_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                logger.warning("the coordinator did not answer: %s", error.details())
                return ServingWorkers(targets=0, drafts=0)
        roles = [worker.introduction.role for worker in info.workers if worker.state == "serving"]
        return ServingWorkers(
            targets=roles.count(registry_pb2.WORKER_ROLE_TARGET), drafts=roles.count(registry_pb2.WORKER_ROLE_DRAFT)
        )
