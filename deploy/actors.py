"""The Ray actor that hosts one role's own gRPC server. Data flows between those servers, never through Ray."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
import ray
import ray.util

from outrider import rpc
from outrider.awake import cores_awake
from outrider.deploy.telemetry import Telemetry
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.tracing import exporting
from outrider.v1 import generation_pb2, generation_pb2_grpc

logger = logging.getLogger(__name__)

SERVER_INFO_TIMEOUT_S = 5.0
_DEFAULT = Telemetry()


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
        node_id: Ray's, of its machine.
        address: host:port of its server; None while it loads.
        failure: why its server ended by itself; None while it has not.
    """

    pid: int
    node: str
    node_id: str
    address: str | None
    failure: str | None


class RoleActor:
    """Starts to serve in its constructor, so that an actor restarted by Ray serves again without being told.

    A constructor that ran long or raised could neither be watched nor explain itself: the server runs in a task, and
    `report` answers from the first moment on.
    """

    def __init__(
        self,
        serve: Serve,
        *,
        name: str,
        host: str | None,
        telemetry: Telemetry = _DEFAULT,
        keep_cores_awake: int = 0,
    ) -> None:
        telemetry.start_log(name)
        self._otlp_endpoint = telemetry.otlp_endpoint
        self._cores, self._settle = keep_cores_awake, lambda: None
        self._role = name.rpartition("/")[2].rpartition("-")[0]
        self._stop = asyncio.Event()
        self._address: str | None = None
        self._failure: str | None = None
        self._serve = serve
        self._host = host if host is not None else ray.util.get_node_ip_address()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def report(self) -> RoleReport:
        """Its process, its address and how it is."""
        return RoleReport(
            pid=os.getpid(),
            node=socket.gethostname(),
            node_id=self._node_id,
            address=self._address,
            failure=self._failure,
        )

    async def stop(self) -> None:
        """Asks the role to finish, and returns when it has."""
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        try:
            with exporting(self._role, self._otlp_endpoint), cores_awake(self._cores) as self._settle:
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
        self._settle()


class CoordinatorActor(RoleActor):
    """A role that can also say what goes on there, wherever its caller is.

    Args:
        info_address: host:port where it takes workers in, and answers whoever has a certificate of its own.
        tls: its certificate; None without TLS.
        options: of every role.
    """

    def __init__(
        self,
        serve: Serve,
        *,
        name: str,
        host: str | None,
        info_address: str,
        tls: TlsConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(serve, name=name, host=host, **options)
        self._info_address = info_address
        self._tls = tls

    async def server_info(self) -> bytes | None:
        """A serialised `ServerInfo`; None while it does not listen or does not answer."""
        if self._address is None:
            return None
        peer = Role.COORDINATOR if self._tls is not None else None
        async with rpc.open_channel(self._info_address, tls=self._tls, peer=peer) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                info = await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=SERVER_INFO_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                logger.warning("the coordinator did not answer: %s", error.details())
                return None
        return info.SerializeToString()
