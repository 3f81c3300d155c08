"""The Ray actor that hosts one role's own gRPC server. Data flows between those servers, never through Ray."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.util

from outrider.deploy.config import DeployConfig
from outrider.deploy.roles import Serve
from outrider.roles.awake import cores_awake
from outrider.roles.log_output import JsonFormatter, TextFormatter
from outrider.roles.start_progress import Stages
from outrider.tracing import exporting
from outrider.v1 import generation_pb2

logger = logging.getLogger(__name__)


def start_log(config: DeployConfig, name: str) -> None:
    """Send this process's log to stderr, which Ray keeps; `name` is in every line."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter(f"%(asctime)s {name} %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter(name) if config.log_format == "json" else text)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """An actor's account of itself."""

    pid: int  # of its process, new after every restart
    node: str
    node_id: str  # Ray's, of its machine
    address: str | None  # host:port of its server; None while it loads
    failure: str | None  # why its server ended by itself; None while it has not
    stages: tuple[str, ...] = ()  # what it has said of its start so far


class RoleActor:
    """Starts to serve in its constructor, so that an actor restarted by Ray serves again without being told.

    A constructor that ran long or raised could neither be watched nor explain itself: the server runs in a task, and
    `report` answers from the first moment on.
    """

    def __init__(self, serve: Serve, config: DeployConfig, *, name: str, host: str | None) -> None:
        start_log(config, name)
        self._stages = Stages()
        self._config = config
        self._settle = lambda: None
        self._role = name.rpartition("/")[2].rpartition("-")[0]
        self._stop = asyncio.Event()
        self._address: str | None = None
        self._failure: str | None = None
        self._serve = serve
        self._host = host if host is not None else ray.util.get_node_ip_address()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def report(self) -> RoleReport:
        """Return the role's process, address and state."""
        return RoleReport(
            pid=os.getpid(),
            node=socket.gethostname(),
            node_id=self._node_id,
            address=self._address,
            failure=self._failure,
            stages=tuple(self._stages.texts),
        )

    async def stop(self) -> None:
        """Ask the role to finish, and return when it has."""
        self._stop.set()
        await self._task

    async def _run(self) -> None:
        try:
            with (
                exporting(self._role, self._config.otlp_endpoint),
                cores_awake(self._config.keep_cores_awake) as self._settle,
            ):
                await self._serve(host=self._host, ready=self._ready, stop=self._stop, **self._options())
        except Exception as error:
            logger.exception("the server ended")  # and whoever watches this actor is told, and decides
            self._failure = f"{type(error).__name__}: {error}"
        else:
            if not self._stop.is_set():
                self._failure = "the server ended by itself"
        self._address = None

    def _options(self) -> dict[str, Any]:
        """Further arguments of `serve`."""
        return {}

    def _ready(self, address: str) -> None:
        self._address = address
        self._settle()


class CoordinatorActor(RoleActor):
    """A role that can also say what goes on there, wherever its caller is and whatever its doors ask for."""

    _info: Callable[[], generation_pb2.ServerInfo] | None = None

    async def server_info(self) -> bytes | None:
        """A serialised `ServerInfo`; None while it does not serve."""
        return None if self._info is None or self._address is None else self._info().SerializeToString()

    def _options(self) -> dict[str, Any]:
        return {"tell": self._take_info}

    def _take_info(self, info: Callable[[], generation_pb2.ServerInfo]) -> None:
        self._info = info
