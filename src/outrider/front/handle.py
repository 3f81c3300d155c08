"""A process of its own that speaks gRPC for a worker: messages never take the interpreter from the model's thread.

    handle   the process as the worker sees it: started, told what to do, and missed when it ends
    process  what it runs: gRPC calls on one side, frames on the other
    frames   what passes between the two
    inbox    where the thread that owns the model finds commands
    calls    what makes commands of frames, and frames of answers

Neither process outlives the other: the front process ends when its control socket closes, and the worker ends when the
front process does.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from outrider.errors import CertificateError, OutriderError, WorkerUnavailable
from outrider.roles.log_output import JsonFormatter
from outrider.roles.role_process import child_environment
from outrider.rpc import status_of
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig

logger = logging.getLogger(__name__)

# On a busy machine a process takes long until it has imported gRPC.
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
# What fits between the two without waiting: growth of some hundred steps, or results of as many rounds.
_BUFFER_BYTES = 4 << 20


class Front:
    """A gRPC server in a process of its own; used as a `RoleServer` is.

    Args:
        role: of the worker, as its log names it.
        address: host:port to bind; port 0 takes a free one.
        most_waiting: messages of a stream that may wait to be written before the worker hears of it.
        tls: None serves in the clear.
    """

    def __init__(
        self,
        service: ServiceDescriptor,
        *,
        role: Role,
        address: str,
        most_waiting: int,
        tls: TlsConfig | None = None,
    ) -> None:
        self.address = address  # with the port that was bound, once it listens
        self._tls = tls
        methods = [(method.name, method.client_streaming) for method in service.methods]
        self._setup = {
            "service": service.full_name, "methods": methods, "role": role.value, "most_waiting": most_waiting,
        }  # fmt: skip
        self.failed: Future[None] = Future()  # done when the process has ended unasked
        # It is waited for more than once, and running futures cannot be cancelled by whoever stops.
        self.failed.set_running_or_notify_cancel()
        # data: the socket that frames pass through (`frames`).
        self.data, self._their_data = socket.socketpair()
        for end in (self.data, self._their_data):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._is_stopping = False

    @property
    def port(self) -> int:
        """Port of `address`."""
        return int(self.address.rpartition(":")[2])

    async def listen(self) -> None:
        """Start the process, which binds its address.

        Raises:
            OSError: the address is taken.
            CertificateError: a file of `tls` cannot be used.
            WorkerUnavailable: the process has ended, or does not answer.
        """
        logs_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
        reader, self._control = await asyncio.open_connection(sock=self._launch())
        self._reader = asyncio.create_task(self._read(reader))
        found = await self._ask(self._setup | {
            "address": self.address,
            "tls": None if self._tls is None else {name: str(path) for name, path in asdict(self._tls).items()},
            "log_level": logging.getLevelName(logger.getEffectiveLevel()).lower(),
            "log_format": "json" if logs_json else "text",
        })  # fmt: skip
        if "error" in found:
            raise (CertificateError if found["is_certificate"] else OSError)(found["error"])
        self.address = found["address"]

    async def start(self) -> None:
        """Serve from now on."""
        await self._ask("serve")

    async def stop(self, *, drain: Callable[[], Awaitable[None]], failure: OutriderError | None = None) -> None:
        """Health NOT_SERVING, then the drain, then every call ends after what it has to send, and the process.

        Args:
            drain: lets the sessions of this worker go elsewhere.
            failure: with which calls end; None ends them in order.
        """
        self._is_stopping = True
        answers = False
        with contextlib.suppress(WorkerUnavailable):
            await self._ask("leave", _STOP_TIMEOUT_S)
            answers = True
        await drain()
        with contextlib.suppress(WorkerUnavailable, TimeoutError):
            if answers:
                status = None if failure is None else b64encode(status_of(failure).SerializeToString()).decode()
                await self._ask({"status": status}, _STOP_TIMEOUT_S)
                assert self._reader is not None
                await asyncio.wait_for(self._reader, _STOP_TIMEOUT_S)
        self._end()

    def share_cores(self) -> None:
        """Move the process to this one's cores, which have been chosen since it was started."""
        assert self._process is not None
        if sys.platform == "linux":
            # It may have ended meanwhile, which `failed` tells.
            with contextlib.suppress(FileNotFoundError):
                for task in Path(f"/proc/{self._process.pid}/task").iterdir():
                    # So may a thread.
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task.name), os.sched_getaffinity(0))

    def close(self) -> None:
        """End the process, if it has not ended in order, and close `data`, which nobody may use any more."""
        self._end()
        for end in (self.data, self._their_data):
            end.close()

    def _end(self) -> None:
        self._is_stopping = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()

    def _launch(self) -> socket.socket:
        """Start the process; return this end of its control socket."""
        ours, theirs = socket.socketpair()
        with theirs, self._their_data:
            descriptors = (theirs.fileno(), self._their_data.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.front.process", *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=child_environment(),
                # Ctrl-C at the terminal reaches the worker alone, which then ends this process.
                start_new_session=True,
            )
        return ours

    async def _ask(self, told: object, timeout_s: float = _START_TIMEOUT_S) -> dict[str, Any]:
        assert self._control is not None, "told before it listens"
        self._control.write(json.dumps(told).encode() + b"\n")
        try:
            answer = await asyncio.wait_for(self._answers.get(), timeout_s)
        except TimeoutError as error:
            raise WorkerUnavailable("the process that speaks to coordinators does not answer") from error
        if answer is None:
            # For whoever asks next.
            self._answers.put_nowait(None)
            raise WorkerUnavailable(self._ending())
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self._answers.put_nowait(json.loads(line))
        self._answers.put_nowait(None)
        if not self._is_stopping:
            self.failed.set_exception(WorkerUnavailable(self._ending()))

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the process that speaks to coordinators has closed its connection"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process that speaks to coordinators {how}"
