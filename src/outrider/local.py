"""A whole service out of child processes over loopback gRPC, without Ray: for trying out, tests and benchmarks.

    with LocalService(drafts=1) as service, Client(service.endpoint) as client:
        print(client.generate("import os").text)

The children end with the service, and with this process however it ends: each watches a pipe that closes then.
"""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from outrider.client import Client
from outrider.errors import OutriderError, WorkerUnavailable

_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_SHOWN_STDERR_LINES = 8


class LocalService:
    """One coordinator, target workers and draft workers as child processes.

    Args:
        drafts: draft workers.
        targets: target workers.
        target_model: checkpoint folder; default the embedded target.
        draft_model: checkpoint folder; default the embedded draft.
        target_threads: CPU threads of each target; default all cores but one.
        draft_threads: CPU threads of each draft.
        coordinator_args: further options of `outrider coordinator`, as on the command line.
        target_args: of `outrider target-worker`.
        draft_args: of `outrider draft-worker`.
        start_timeout_s: until every worker is registered.

    Attributes:
        endpoint: host:port of the coordinator, once started.
        processes: "coordinator", "target-0", ..., "draft-0", ...; end one to see what happens.
    """

    def __init__(
        self,
        *,
        drafts: int = 1,
        targets: int = 1,
        target_model: str | Path | None = None,
        draft_model: str | Path | None = None,
        target_threads: int | None = None,
        draft_threads: int = 1,
        coordinator_args: Sequence[str] = (),
        target_args: Sequence[str] = (),
        draft_args: Sequence[str] = (),
        start_timeout_s: float = 120.0,
    ) -> None:
        self.endpoint = ""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._counts = {"target": targets, "draft": drafts}
        self._models = {"target": target_model, "draft": draft_model}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = {"target": target_threads or max(1, cores - 1), "draft": draft_threads}
        self._more = {"coordinator": coordinator_args, "target": target_args, "draft": draft_args}
        self._start_timeout_s = start_timeout_s
        self._logs: dict[str, IO[bytes]] = {}
        self._addresses: dict[str, str] = {}

    def start(self) -> None:
        """Starts everything; returns when every worker serves.

        Raises:
            WorkerUnavailable: a process ended or was too slow, with the last lines it wrote to stderr.
        """
        deadline = time.monotonic() + self._start_timeout_s
        try:
            model_args = _option("--model-path", self._models["target"])
            self._spawn("coordinator", "coordinator", ["--port", "0", *model_args, *self._more["coordinator"]])
            self.endpoint = self._await_ready("coordinator", deadline)
            for role, count in self._counts.items():
                for number in range(count):
                    self.start_worker(f"{role}-{number}")
            self.wait_for_workers(timeout_s=deadline - time.monotonic())
        except BaseException:
            self.stop()
            raise

    def start_worker(self, name: str) -> None:
        """Starts "target-N" or "draft-N", or starts it anew; `wait_for_workers` tells when it serves."""
        role = name.partition("-")[0]
        if role not in self._counts:
            raise ValueError(f"{name!r} given, target-N or draft-N needed")
        arguments = [
            *("--coordinators", self.endpoint),
            *("--threads", str(self._threads[role])),
            *_option("--model-path", self._models[role]),
            *self._more[role],
        ]
        self._spawn(name, f"{role}-worker", arguments)

    def wait_for_workers(self, *, timeout_s: float = 60.0) -> None:
        """Waits until every worker process that has not ended is registered and serves.

        Raises:
            WorkerUnavailable: one ended meanwhile, or it took too long.
        """
        deadline = time.monotonic() + timeout_s
        names = [name for name, process in self.processes.items() if process.poll() is None]
        addresses = {self._await_ready(name, deadline) for name in names if name != "coordinator"}
        with Client(self.endpoint) as client:
            while True:
                self._check_alive(names)
                workers = client.server_info().workers
                missing = addresses - {worker.introduction.address for worker in workers if worker.state == "serving"}
                if not missing:
                    return
                if time.monotonic() > deadline:
                    raise WorkerUnavailable(f"{len(missing)} of {len(addresses)} workers are not registered in time")
                time.sleep(_POLL_S)

    def stderr(self, name: str) -> str:
        """What a process has written to stderr so far."""
        log = self._logs[name]
        return os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", errors="replace")

    def stop(self) -> None:
        """Ends every process; harmless when all have ended."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_pipes(process)
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, name: str, command: str, arguments: Sequence[str]) -> None:
        previous = self.processes.get(name)
        if previous is not None and previous.poll() is None:
            raise ValueError(f"{name} is still running")
        self._addresses.pop(name, None)
        if previous is not None:
            _close_pipes(previous)
        if name in self._logs:
            self._logs.pop(name).close()
        self._logs[name] = log = tempfile.TemporaryFile()  # noqa: SIM115 closed by stop
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "outrider.cli", command, "--stop-with-stdin", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(),
            # Ctrl-C at the terminal reaches this process alone, which then ends the children in order.
            start_new_session=True,
        )

    def _await_ready(self, name: str, deadline: float) -> str:
        """The address of the `ready HOST:PORT` line."""
        if name in self._addresses:
            return self._addresses[name]
        stdout = self.processes[name].stdout
        assert stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise WorkerUnavailable(f"{name} is not ready after {self._start_timeout_s:.0f} s")
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                self.processes[name].wait(_STOP_TIMEOUT_S)
                self._check_alive([name])
            line += chunk
        word, _, address = line.decode("utf-8").strip().partition(" ")
        if word != "ready":
            raise OutriderError(f"{name} said {line!r}, `ready HOST:PORT` was expected")
        self._addresses[name] = address
        return address

    def _check_alive(self, names: Iterable[str]) -> None:
        for name in names:
            code = self.processes[name].poll()
            if code is not None:
                last = "; ".join(self.stderr(name).strip().splitlines()[-_SHOWN_STDERR_LINES:])
                raise WorkerUnavailable(f"{name} ended with exit code {code}: {last}")


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _option(name: str, value: str | Path | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _environment() -> dict[str, str]:
    # The children use this interpreter's packages even where outrider is found through sys.path alone.
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
