"""A service of real processes whose links all go through proxies, and whose roles can be ended, frozen and restarted.

    client --proxy--> coordinator <--proxy-- worker (registration)
                      coordinator --proxy--> worker (data)

A worker listens at a port of 127.0.0.1 and is advertised under that of 127.0.0.2, where its proxy is: all of 127/8 is
loopback on Linux. Ports are fixed, so that a restarted role is found where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.faults.proxy import Conditions, Proxy

from outrider.client import AsyncClient
from outrider.errors import OutriderError, WorkerUnavailable
from outrider.roles.role_process import RoleProcess, stop_all
from outrider.v1 import generation_pb2

LOOPBACK, PROXIED = "127.0.0.1", "127.0.0.2"
_IN_ROLE = Path(__file__).resolve().parent / "in_role"
# Below what the kernel takes for outgoing connections: those of others must not sit on a role's port when it restarts.
_PORTS = range(20_000, 32_000)
_LOG_PIPE_BYTES = 4096
_FILLER = b"\0"
_POLL_S = 0.1
_SHOWN_LOG_BYTES = 2000


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Roles to start, and their options.

    Attributes:
        targets, drafts, coordinators: how many.
        folder: for logs and sockets; has to exist.
        worker_args: of both kinds of workers, as on the command line.
        target_args, draft_args, coordinator_args: further ones.
        ready_timeout_s: from a role's start until it serves.
        seed: of ports, jitter and stalls.
    """

    folder: Path
    targets: int = 2
    drafts: int = 2
    coordinators: int = 2
    # Little room for KV, so that it is full, and memory flat, before the faults begin.
    worker_args: Sequence[str] = ("--threads", "1", "--kv-bytes", str(48 << 20))
    target_args: Sequence[str] = ()
    draft_args: Sequence[str] = ()
    coordinator_args: Sequence[str] = ()
    ready_timeout_s: float = 90.0
    seed: int = 0


class LogPipe:
    """Pipe of a role's stderr: drained into a file, or for a while full and drained by nobody."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._reading, self.writing = os.pipe()
        fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, _LOG_PIPE_BYTES)
        os.set_blocking(self._reading, False)
        self.drain()

    def drain(self) -> None:
        """Drain the pipe from now on."""
        asyncio.get_running_loop().add_reader(self._reading, self._take)

    def block(self) -> None:
        """Read no more, and leave no room for a single byte."""
        asyncio.get_running_loop().remove_reader(self._reading)
        # A description of its own: the role's end has to go on blocking, which is the fault.
        filling = os.open(f"/proc/self/fd/{self.writing}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filling, _FILLER)
        os.close(filling)

    def close(self) -> None:
        """Read what is left, and close."""
        asyncio.get_running_loop().remove_reader(self._reading)
        self._take()
        os.close(self._reading)
        os.close(self.writing)
        self._file.close()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reading, 1 << 16):
                self._file.write(data.replace(_FILLER, b""))


@dataclass(eq=False, kw_only=True)
class Role:
    """One role, over all its processes.

    Attributes:
        name: such as target-0.
        command: of the command line.
        arguments: of each of its processes.
        address: host:port it listens at.
        advertised: host:port under which it is known: that of its proxy.
        links: its proxies by name; which is which says `Cluster`.
        process: the one there is; None before the first and after a kill.
        starts: processes so far.
        is_frozen: stopped by SIGSTOP.
        is_starting: its process has not said yet that it serves.
    """

    name: str
    command: str
    arguments: Sequence[str]
    address: str
    advertised: str
    log: LogPipe
    log_path: Path
    socket_path: Path
    links: dict[str, Proxy] = field(default_factory=dict)
    process: RoleProcess | None = None
    starts: int = 0
    is_frozen: bool = False
    is_starting: bool = False

    @property
    def kind(self) -> str:
        """draft, target or coordinator."""
        return self.name.rpartition("-")[0]

    @property
    def pid(self) -> int:
        """Id of the role's process."""
        assert self.process is not None
        return self.process.process.pid

    @property
    def is_running(self) -> bool:
        """True if there is a process that is neither ended nor frozen."""
        return self.process is not None and self.process.is_running and not self.is_frozen

    def last_words(self) -> str:
        """The end of its log."""
        return self.log_path.read_bytes()[-_SHOWN_LOG_BYTES:].decode("utf-8", errors="replace")

    def disturb(self, conditions: Conditions, *, links: Sequence[str] = ()) -> list[Proxy]:
        """Set the conditions of its links, or of those whose names begin so; return the proxies.

        A link that suffers already, from a fault of the role at its other end, is left as it is.
        """
        hit = [
            proxy
            for name, proxy in self.links.items()
            if proxy.conditions == Conditions() and (not links or name.startswith(tuple(links)))
        ]
        for proxy in hit:
            proxy.conditions = conditions
        return hit

    def reset(self) -> int:
        """Reset all connections of all its links."""
        return sum(proxy.reset() for proxy in self.links.values())


class Cluster:
    """Coordinators, targets and drafts; use with `async with`.

    Attributes:
        roles: by name.
        endpoints: the coordinators' as clients should dial them: those of their proxies.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.roles: dict[str, Role] = {}
        self.endpoints: list[str] = []
        self._random = random.Random(options.seed)
        self._direct: dict[str, AsyncClient] = {}
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start everything; return when every worker serves at every coordinator."""
        options = self.options
        for number in range(options.coordinators):
            role = await self._add(f"coordinator-{number}", options.coordinator_args)
            self.endpoints.append(role.advertised)
            self._direct[role.name] = await self._stack.enter_async_context(AsyncClient(role.address, max_resumes=0))
        for kind, count, more in (
            ("target", options.targets, options.target_args),
            ("draft", options.drafts, options.draft_args),
        ):
            for number in range(count):
                await self._add(f"{kind}-{number}", [*options.worker_args, *more])
        await asyncio.gather(*(self.launch(name) for name in self.roles))
        await self.until_whole(timeout_s=options.ready_timeout_s)

    async def _add(self, name: str, arguments: Sequence[str]) -> Role:
        options, port = self.options, _fixed_port(self._random)
        kind = name.rpartition("-")[0]
        given = ["--host", LOOPBACK, "--port", str(port), *arguments]
        role = self.roles[name] = Role(
            name=name,
            command=kind if kind == "coordinator" else f"{kind}-worker",
            arguments=given,
            address=f"{LOOPBACK}:{port}",
            advertised=f"{PROXIED}:{port}",
            log=LogPipe(options.folder / f"{name}.log"),
            log_path=options.folder / f"{name}.log",
            socket_path=options.folder / f"{name}.socket",
        )
        self._stack.callback(role.log.close)
        # A coordinator's own link is the clients'; a worker's is the data stream that coordinators dial.
        role.links["clients" if kind == "coordinator" else "data"] = await self._proxy(
            (LOOPBACK, port), listen=(PROXIED, port)
        )
        if kind != "coordinator":
            given += ["--advertised-host", PROXIED]
            for coordinator in self.of_kind("coordinator"):
                host, _, far_port = coordinator.address.rpartition(":")
                proxy = await self._proxy((host, int(far_port)), listen=(LOOPBACK, 0))
                given += ["--coordinators", proxy.address]
                role.links[f"registration at {coordinator.name}"] = proxy
                coordinator.links[f"registration of {name}"] = proxy
        return role

    async def _proxy(self, upstream: tuple[str, int], *, listen: tuple[str, int]) -> Proxy:
        proxy = Proxy(upstream, listen=listen, seed=self._random.getrandbits(32))
        return await self._stack.enter_async_context(proxy)

    def of_kind(self, kind: str) -> list[Role]:
        """Return the roles of a kind."""
        return [role for role in self.roles.values() if role.kind == kind]

    async def launch(self, name: str, *, open_pause_s: float = 0.0) -> None:
        """Start a role's process; return when it says that it serves.

        Args:
            open_pause_s: what opening a file of its model takes: a slow disk.

        Raises:
            WorkerUnavailable: it ended or was too slow.
        """
        role = self.roles[name]
        assert role.process is None, f"{name} is running"
        role.socket_path.unlink(missing_ok=True)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(_IN_ROLE), *_python_path()]),
            "OUTRIDER_FAULTS_SOCKET": str(role.socket_path),
            "OUTRIDER_FAULTS_OPEN_PAUSE_S": str(open_pause_s),
            "OMP_NUM_THREADS": "1",
        }
        role.process = RoleProcess(name, role.command, role.arguments, environment=environment, stderr=role.log.writing)
        role.starts += 1
        role.is_starting = True
        try:
            await asyncio.to_thread(role.process.await_ready, time.monotonic() + self.options.ready_timeout_s)
        except WorkerUnavailable as error:
            raise WorkerUnavailable(f"{error} {role.last_words()}") from error
        finally:
            role.is_starting = False

    async def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """End a role's process; return its exit code."""
        role = self.roles[name]
        process, role.process, role.is_frozen = role.process, None, False
        assert process is not None
        process.process.send_signal(number)
        code = await asyncio.to_thread(process.process.wait)
        process.release()
        return code

    def freeze(self, name: str) -> None:
        """Stop a role's process where it is: its connections stay, and nothing comes any more."""
        os.kill(self.roles[name].pid, signal.SIGSTOP)
        self.roles[name].is_frozen = True

    def thaw(self, name: str) -> None:
        """Let a frozen role go on."""
        os.kill(self.roles[name].pid, signal.SIGCONT)
        self.roles[name].is_frozen = False

    async def info(self, coordinator: str) -> generation_pb2.ServerInfo:
        """A coordinator's ServerInfo, asked for directly."""
        return await self._direct[coordinator].server_info()

    async def missing(self, served: Collection[str]) -> list[str]:
        """Return the workers that are not in one of these states, by coordinator; frozen coordinators are not asked."""
        lacking = [role.name for role in self.roles.values() if not role.is_running]
        workers = [role for role in self.roles.values() if role.kind != "coordinator"]
        for coordinator in self.of_kind("coordinator"):
            if not coordinator.is_running:
                continue
            try:
                info = await self.info(coordinator.name)
            except (OutriderError, TimeoutError) as error:
                lacking.append(f"{coordinator.name} ({error})")
                continue
            states = {worker.introduction.address: worker.state for worker in info.workers}
            for role in workers:
                state = states.get(role.advertised, "absent")
                if state not in served:
                    lacking.append(f"{role.name} at {coordinator.name} ({state})")
        return lacking

    async def until_whole(
        self,
        *,
        timeout_s: float,
        about: str | None = None,
        suffering: Callable[[], Collection[str]] = tuple,
        served: Collection[str] = ("serving", "quarantined"),
    ) -> None:
        """Wait until all workers, or that role alone, are back at all coordinators that run.

        Args:
            about: the role.
            suffering: other roles, which may be away for reasons of their own now.
            served: states of a worker that is back. One in quarantine is: it is the coordinator that leaves it alone.

        Raises:
            TimeoutError: they are not, with what lacks.
        """

        def concerns(what: str) -> bool:
            words = what.split()
            return (about is None or about in words) and not any(name in words for name in suffering())

        deadline = time.monotonic() + timeout_s
        while lacking := [what for what in await self.missing(served) if concerns(what)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout_s:g} s: {'; '.join(lacking)}")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """End every process, whatever state it is in."""
        processes = [role.process for role in self.roles.values() if role.process is not None]
        for process in processes:
            if process.is_running:
                process.process.send_signal(signal.SIGCONT)
        for role in self.roles.values():
            role.log.drain()
            role.process = None
        await asyncio.to_thread(stop_all, processes)
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _fixed_port(choices: random.Random) -> int:
    """A port that nobody listens on now, of those that the kernel gives nobody by itself."""
    # Not of the seed alone: two runs of one seed side by side would meet at every port.
    own = random.Random(choices.getrandbits(32) ^ os.getpid())
    for port in own.sample(_PORTS, len(_PORTS)):
        if _is_free(port):
            return port
    raise OSError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")


def _is_free(port: int) -> bool:
    try:
        for host in (LOOPBACK, PROXIED):
            with socket.create_server((host, port)):
                pass
    except OSError:
        return False
    return True


def _python_path() -> list[str]:
    own = str(Path(__file__).resolve().parents[2] / "src")
    return [own, *filter(None, [os.environ.get("PYTHONPATH", "")])]
