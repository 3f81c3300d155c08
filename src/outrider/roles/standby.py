"""A stand-by: a process that has imported what workers need, and forks one whenever its owner starts one.

Importing torch and numba takes a worker some two seconds of CPU, and starting several at once, as after a machine's
death, several times that. What is forked has it all in a tenth of a second, and shares the memory of it.
The owner is a Ray node, which runs `standby_start.py` instead of Python, or a process with a service of child processes
(`forked_process.py`); both ask here.

It has one thread, and touches neither a GPU nor gRPC nor Ray: forks of such a process are as good as new ones. It ends
with its owner, or when it has had nobody for a minute; what it has forked ends with it, also when it is killed.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from outrider.roles.standby_start import LENGTH

logger = logging.getLogger(__name__)

# What takes long of what target and draft workers import. Nothing of this package: where it is replaced while a
# stand-by lives, workers have to be all new.
MODULES = ("torch", "numba", "safetensors.torch")
# Beside them where there is a GPU: kernels are of no use elsewhere (`outrider.kernels.backend`).
GPU_MODULES = ("triton.language",)
IDLE_S = 60.0
# Of linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1
_ORDER_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """A worker to be run."""

    arguments: Sequence[str]  # as Python's own: flags, a script or -m and a module, and its arguments
    environment: dict[str, str]
    folder: str  # that it runs in
    descriptors: Sequence[int]  # stdin, stdout and stderr, to be closed


@dataclass(frozen=True, kw_only=True, eq=False)
class _Child:
    pid: int
    descriptor: int
    connection: socket.socket


class StandBy:
    """Forks whom it is asked for.

    Args:
        door: listens; closed here.
        idle_s: it ends after so long without a worker.
    """

    def __init__(self, door: socket.socket, *, owner_pid: int, idle_s: float = IDLE_S) -> None:
        self._door, self._idle_s = door, idle_s
        self._children: dict[int, _Child] = {}
        self._owner = os.pidfd_open(owner_pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ, self._accept)
        self._selector.register(self._owner, selectors.EVENT_READ, self._leave)
        self._is_over = False

    def serve(self) -> Order | None:
        """Return the order in every forked process, which is to `execute` it; in the stand-by, None at the end."""
        while not self._is_over:
            ready = self._selector.select(None if self._children else self._idle_s)
            if not ready and not self._children:
                break
            for key, _ in ready:
                if key.fileobj not in self._selector.get_map():
                    continue  # it went with another one of these
                act: Callable[[], Order | None] = key.data
                if (order := act()) is not None:
                    return order
        self._close()
        return None

    def _accept(self) -> Order | None:
        connection, _ = self._door.accept()
        try:
            connection.settimeout(_ORDER_TIMEOUT_S)
            order = read_order(connection)
        except (OSError, ValueError) as error:
            logger.warning("an order could not be read: %s", error)
            order = None
        if order is None:
            connection.close()
            return None
        pid = _fork()
        if pid == 0:
            connection.close()
            self._forget()
            return order
        for descriptor in order.descriptors:
            os.close(descriptor)
        if pid is None:
            connection.close()
            return None
        child = _Child(pid=pid, descriptor=os.pidfd_open(pid), connection=connection)
        self._children[pid] = child
        self._selector.register(child.descriptor, selectors.EVENT_READ, lambda: self._bury(child))
        # Nothing more is said there: it becomes readable when whoever waits for the worker has gone.
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._kill(child))
        _tell(connection, pid)
        return None

    def _kill(self, child: _Child) -> None:
        self._selector.unregister(child.connection)
        os.kill(child.pid, signal.SIGKILL)

    def _bury(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.pid]
        self._selector.unregister(child.descriptor)
        os.close(child.descriptor)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.connection)
        _tell(child.connection, os.waitstatus_to_exitcode(status))
        child.connection.close()

    def _leave(self) -> None:
        self._is_over = True

    def _close(self) -> None:
        for child in list(self._children.values()):
            os.kill(child.pid, signal.SIGKILL)
            self._bury(child)
        Path(self._door.getsockname()).unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        """Close what belongs to the stand-by: a worker that is forked must not hold it open."""
        self._selector.close()
        self._door.close()
        os.close(self._owner)
        for child in self._children.values():
            os.close(child.descriptor)
            child.connection.close()


def read_order(connection: socket.socket) -> Order | None:
    """Read an order of `standby_start`; return None if it only started the stand-by.

    Raises:
        OSError: it has gone, or takes too long.
        ValueError: it is no order.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    if not head:
        return None
    try:
        if len(head) != LENGTH.size or len(descriptors) != 3:
            raise ValueError(f"{len(head)} bytes and {len(descriptors)} descriptors given")
        (left,) = LENGTH.unpack(head)
        packed = bytearray()
        while left > len(packed):
            if not (more := connection.recv(left - len(packed))):
                raise ConnectionError("it ends in the middle")
            packed += more
        try:
            return Order(**json.loads(packed), descriptors=descriptors)
        except TypeError as error:
            raise ValueError(f"it is another version's: {error}") from error
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def execute(order: Order) -> None:
    """Become the process that Python would be with these arguments."""
    # Of a worker that dies Ray ends the whole group.
    os.setpgid(0, 0)
    for number, descriptor in enumerate(order.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    script, *arguments = (argument for argument in order.arguments if argument != "-u")
    is_module = script == "-m"
    sys.argv = arguments if is_module else [script, *arguments]
    sys.path[0] = order.folder if is_module else str(Path(script).resolve().parent)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "outrider"]:
        del sys.modules[name]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def prepare(modules: Sequence[str]) -> None:
    """Import, once, what every forked process needs."""
    for name in modules:
        # What is not installed here, workers do without.
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    if "numba" in sys.modules:
        # What numba sets up at its first function takes it half a second, and others a hundredth.
        sys.modules["numba"].njit(lambda: 0)()
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        raise RuntimeError(f"importing {', '.join(modules)} has left {threads} threads: what is forked would lack them")
    # What is never collected is never written to: it stays one copy for all.
    gc.collect()
    gc.freeze()


def main(arguments: Sequence[str]) -> None:
    """Serve the socket with this descriptor until the process with this id ends.

    Logging is not set up here: workers would have it already, and could not set up their own.
    """
    door, owner_pid = int(arguments[0]), int(arguments[1])
    # OpenMP reads it when torch is imported; roles set their own threads, as Ray sets this one for those without CPUs.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Asking the driver itself whether there is a GPU would be too much for those who are forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    prepare((*MODULES, *GPU_MODULES) if torch.cuda.is_available() else MODULES)
    order = StandBy(socket.socket(fileno=door), owner_pid=owner_pid).serve()
    if order is not None:
        execute(order)


def _fork() -> int | None:
    """See `os.fork`; None if the system has no room for another process."""
    stand_by = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        logger.warning("no worker could be forked: %s", error)
        return None
    if pid == 0:
        # Those who wait for a worker take it for ended when the stand-by is killed.
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != stand_by:
            os.kill(os.getpid(), signal.SIGKILL)
    return pid


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
