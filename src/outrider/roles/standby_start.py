"""Replacement for Python as Ray's worker command: the machine's stand-by forks a worker with everything imported.

    python -I -S standby_start.py [-u] worker.py ARGUMENTS...

The first of these on a machine (of a Ray node, to be exact) starts the stand-by (`outrider.roles.standby`), unless
whoever has started the node has done so (`OWNER_VARIABLE`), and waits with those that come meanwhile until it has
imported what workers need: all of them together pay for it once. Wherever that cannot be, Python is started as Ray
would have done. This process stays beside the worker: it hands signals on, and ends with it; if it is killed, so is the
worker.

The standard library alone: this is what every start of a worker waits for. `forked_process.py` asks for workers too.
"""

import atexit
import contextlib
import fcntl
import json
import os
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMAND = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve())])
"""Command for Ray to run instead of Python."""
CAN_FORK = hasattr(os, "pidfd_open")
"""True if there are stand-bys on this system: Linux alone."""
OWNER_VARIABLE = "OUTRIDER_STAND_BY_OWNER"
"""Names the process with which the stand-by ends, where that is another one than the Ray node's."""
LENGTH = struct.Struct("!I")
# Behind these comes a script. Others change the interpreter itself, which is the stand-by's.
_FLAGS = {"-u"}
_BACKLOG = 64


def main(arguments: Sequence[str]) -> int:
    """Run a worker by the stand-by of the Ray node that has started this process; return its exit status."""
    if can_be_forked(arguments):
        try:
            return run_forked(arguments, owner_pid=int(os.environ.get(OWNER_VARIABLE) or os.getppid()))
        except OSError as error:
            sys.stderr.write(f"no stand-by ({error}): Python is started\n")
    return os.execv(sys.executable, [sys.executable, *arguments])


def can_be_forked(arguments: Sequence[str]) -> bool:
    """Return True if Python's arguments are a script and its arguments."""
    scripts = [argument for argument in arguments if argument not in _FLAGS]
    return CAN_FORK and bool(scripts) and scripts[0].endswith(".py")


def run_forked(arguments: Sequence[str], *, owner_pid: int) -> int:
    """Have a worker forked, wait for its end, and return its exit status; OSError where no stand-by forks it."""
    with connect(owner_pid) as connection:
        send_order(connection, arguments, environment=os.environ, descriptors=(0, 1, 2))
        answers = connection.makefile("r", encoding="ascii")
        if not (line := answers.readline()):
            raise ConnectionError("it has forked nobody")
        pid = int(line)

        def hand_on(number: int, _frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, hand_on)
        # Without an answer the stand-by has been killed, and the worker with it.
        code = int(answers.readline() or 1)
        return code if code >= 0 else 128 - code


def send_order(
    connection: socket.socket,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    descriptors: Sequence[int],
) -> None:
    """Ask for a worker; the answers, a line each, are its process id and, in the end, its exit status.

    Args:
        arguments: as Python's own: flags, a script or -m and a module, and its arguments.
        descriptors: that it has as stdin, stdout and stderr.

    Raises:
        OSError: the stand-by has ended.
    """
    order = {"arguments": list(arguments), "environment": dict(environment), "folder": str(Path.cwd())}
    packed = json.dumps(order).encode()
    socket.send_fds(connection, [LENGTH.pack(len(packed))], descriptors)
    connection.sendall(packed)


def connect(owner_pid: int, environment: Mapping[str, str] | None = None) -> socket.socket:
    """A connection to the stand-by of a process, which is started where there is none.

    Args:
        owner_pid: the process with which the stand-by ends.
        environment: the stand-by's variables; default this process's own.

    Raises:
        OSError: the folder belongs to somebody else, or the name is too long for a socket.
    """
    folder = Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user may write to")
    path = folder / f"standby-{owner_pid}.sock"
    connection = socket.socket(socket.AF_UNIX)
    try:
        with (folder / "standby.lock").open("w") as lock:
            # Of several that come at a time one starts it; the door is open before it has imported anything.
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                _start(path, owner_pid, environment)
                connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _start(path: Path, owner_pid: int, environment: Mapping[str, str] | None) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen(_BACKLOG)
        stand_by = subprocess.Popen(
            [sys.executable, "-m", "outrider.roles.standby", str(door.fileno()), str(owner_pid)],
            stdin=subprocess.DEVNULL,
            # Whoever reads this process's output waits for its end, not for the stand-by's.
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=(door.fileno(),),
            start_new_session=True,
        )
    if owner_pid == os.getpid():
        # It would end with its owner all the same, but Python complains of children that nobody has waited for.
        atexit.register(_end, stand_by, path)


def _end(stand_by: subprocess.Popen[bytes], path: Path) -> None:
    stand_by.kill()
    stand_by.wait()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
