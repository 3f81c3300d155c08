"""One role of the service as a child process: started through the command line, ready when it says so.

The child ends with this process however it ends: it watches a pipe that closes then.
"""

import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.errors import OutriderError, WorkerUnavailable
from outrider.roles.forked_process import ForkedProcess, wake_stand_by
from outrider.roles.standby_start import CAN_FORK

logger = logging.getLogger(__name__)

Process = subprocess.Popen[bytes] | ForkedProcess

_STOP_TIMEOUT_S = 10.0
_SHOWN_STDERR_LINES = 8


class RoleProcess:
    """A running role.

    Args:
        command: of the command line, such as target-worker.
        environment: what the child has beside this process's variables.
        stderr: descriptor that it writes its log to; default a file, which `stderr()` reads.
        forked: from this process's stand-by, where there can be one (`outrider.roles.standby`): a worker starts sooner.
            What torch reads of the environment when it is imported is the stand-by's then, so give workers their
            threads.
    """

    def __init__(
        self,
        name: str,
        command: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
        forked: bool = False,
    ) -> None:
        self.name = name
        self._address: str | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed by release
        self.process = _start(
            ["-m", "outrider.cli", command, "--stop-with-stdin", *arguments],
            environment=child_environment() | dict(environment or {}),
            stderr=self._log.fileno() if stderr is None else stderr,
            forked=forked and CAN_FORK,
        )

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def await_ready(self, deadline: float) -> str:
        """The address of its `ready HOST:PORT` line.

        Args:
            deadline: by `time.monotonic`.

        Raises:
            WorkerUnavailable: it ended or was too slow.
        """
        if self._address is not None:
            return self._address
        stdout = self.process.stdout
        assert stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise WorkerUnavailable(f"{self.name} is not ready in time")
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                self.process.wait(_STOP_TIMEOUT_S)
                self.check_alive()
            line += chunk
        word, _, address = line.decode("utf-8").strip().partition(" ")
        if word != "ready":
            raise OutriderError(f"{self.name} said {line!r}, `ready HOST:PORT` was expected")
        self._address = address
        return address

    def check_alive(self) -> None:
        """Raise WorkerUnavailable where it has ended, with the last lines it wrote to stderr."""
        code = self.process.poll()
        if code is not None:
            last = "; ".join(self.stderr().strip().splitlines()[-_SHOWN_STDERR_LINES:])
            raise WorkerUnavailable(f"{self.name} ended with exit code {code}: {last}")

    def stderr(self) -> str:
        """Return stderr so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", errors="replace")

    def release(self) -> None:
        """Close what this process holds of a child that has ended."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


def stop_all(roles: Sequence[RoleProcess]) -> None:
    """End the processes together; harmless for those that have ended."""
    for role in roles:
        role.process.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for role in roles:
        try:
            role.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            role.process.kill()
            role.process.wait()
        role.release()


def prepare_forks() -> None:
    """Start this process's stand-by, so that it is ready sooner for the first `forked` role."""
    wake_stand_by(child_environment())


def _start(arguments: list[str], *, environment: dict[str, str], stderr: int, forked: bool) -> Process:
    if forked:
        try:
            return ForkedProcess(arguments, environment=environment, stderr=stderr)
        except OSError as error:
            logger.warning("no stand-by (%s): Python is started", error)
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        # Ctrl-C at the terminal reaches this process alone, which then ends the children in order.
        start_new_session=True,
    )


def child_environment() -> dict[str, str]:
    """Return this process's variables; children find this package even where it is found through sys.path alone."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
