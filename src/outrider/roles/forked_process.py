"""A worker that this process's stand-by has forked, used as `subprocess.Popen` is.

Starting Python instead would have it import torch once more (`outrider.roles.standby`).
"""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO

from outrider.roles.standby_start import CAN_FORK, connect, send_order

# A stand-by that is just starting imports for some seconds before it answers.
_ANSWER_TIMEOUT_S = 60.0
# Of a worker that has gone with its stand-by, which was killed.
_UNKNOWN_END = 1


def wake_stand_by(environment: Mapping[str, str]) -> None:
    """Have the stand-by import what workers need while this process still does something else."""
    # Whoever asks it for a worker is told why there is none.
    with contextlib.suppress(OSError):
        if CAN_FORK:
            connect(os.getpid(), environment).close()


class ForkedProcess:
    """A running process; it is killed if this object goes before it has ended.

    Args:
        arguments: as Python's own: -m and a module, and its arguments.
        environment: its variables; those that torch reads when it is imported are the stand-by's.
        stderr: descriptor that it writes its log to.

    Raises:
        OSError: there is no stand-by, or it cannot fork.
    """

    def __init__(self, arguments: Sequence[str], *, environment: Mapping[str, str], stderr: int) -> None:
        self.returncode: int | None = None  # as `subprocess.Popen.returncode`
        self._arguments, self._said = arguments, b""
        self._listening = threading.Lock()
        self._connection = connect(os.getpid(), environment)
        child_stdin, stdin = os.pipe()
        stdout, child_stdout = os.pipe()
        self.stdin, self.stdout = FileIO(stdin, "w"), FileIO(stdout)
        try:
            self._connection.settimeout(_ANSWER_TIMEOUT_S)
            descriptors = (child_stdin, child_stdout, stderr)
            send_order(self._connection, arguments, environment=environment, descriptors=descriptors)
            while (line := self._next_line()) is None:
                self._hear()
            self.pid = int(line)
        except BaseException:
            for held in (self.stdin, self.stdout, self._connection):
                held.close()
            raise
        finally:
            os.close(child_stdin)
            os.close(child_stdout)

    def poll(self) -> int | None:
        """See `subprocess.Popen.poll`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            # One thread listens at a time: the end is said once, and the connection is closed with it.
            if not self._listening.acquire(timeout=-1 if left is None else left):
                raise subprocess.TimeoutExpired(list(self._arguments), left or 0.0)
            try:
                if self.returncode is None and not self._listen(left):
                    raise subprocess.TimeoutExpired(list(self._arguments), left or 0.0)
            finally:
                self._listening.release()
        return self.returncode

    def _listen(self, left: float | None) -> bool:
        """Wait for news of the process's end; return False if there is none in this time."""
        if (line := self._next_line()) is not None:
            self._end(int(line))
            return True
        if not select.select([self._connection], [], [], left)[0]:
            return False
        try:
            self._hear()
        except OSError:
            self._end(_UNKNOWN_END)
        return True

    def send_signal(self, number: int) -> None:
        """See `subprocess.Popen.send_signal`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """See `subprocess.Popen.terminate`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `subprocess.Popen.kill`."""
        self.send_signal(signal.SIGKILL)

    def _next_line(self) -> str | None:
        line, end, rest = self._said.partition(b"\n")
        if not end:
            return None
        self._said = rest
        return line.decode("ascii")

    def _hear(self) -> None:
        said = self._connection.recv(64)
        if not said:
            raise ConnectionError("it has ended, or has no room for one more process")
        self._said += said

    def _end(self, code: int) -> None:
        self.returncode = code
        self._connection.close()
