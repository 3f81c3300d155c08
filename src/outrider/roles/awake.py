"""Keeps some cores from falling asleep while a role serves, and has the role's threads run on them.

A round passes through six threads that sleep until a message or the device wakes them. A core that has nothing to do
for some milliseconds, a step of the target, goes to sleep so deeply that waking it takes long: in a virtual machine it
is given back to the host. A process of idle priority that spins on a core keeps it awake, and gives way at once to
whatever wakes up there. (Linux's own request for short wake-ups, /dev/cpu_dma_latency, does nothing on machines without
a driver for sleep states, virtual ones among them.)

The roles of a machine take different cores: each is a file in the folder of temporary files, locked by who has it.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.errors import OutriderError

# Ends with its parent, whichever way that ends.
_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(20000):
        pass
"""
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def cores_awake(count: int, folder: Path | None = None) -> Iterator[Callable[[], None]]:
    """Yield a function to call once this process serves: it moves the threads to this many cores and keeps these awake.

    Not before, for a role that starts may compile on all cores. With the end of the block the cores are free again.

    Args:
        count: of cores; 0 leaves everything as it is.
        folder: where it is written down which cores are taken; all roles of a machine need the same.

    Raises:
        OutriderError: a bad count, more cores than this process has left, or no Linux.
    """
    if count == 0:
        yield lambda: None
        return
    if not hasattr(os, "SCHED_IDLE"):
        raise OutriderError("--keep-cores-awake: works on Linux only, leave it out")
    if count < 0:
        raise OutriderError(f"--keep-cores-awake: {count} given, 0 or a number of cores needed")
    with contextlib.ExitStack() as stack:
        cores = _take(count, folder or Path(tempfile.gettempdir()) / f"outrider-cores-{os.getuid()}", stack)
        yield lambda: _settle(cores, stack)


def _take(count: int, folder: Path, stack: contextlib.ExitStack) -> list[int]:
    """Cores of this process that no other role has; they are given back with the stack."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OutriderError(f"--keep-cores-awake: cannot make {folder}: {error.strerror}") from error
    taken: list[int] = []
    for core in sorted(os.sched_getaffinity(0), key=_place_among_siblings):
        if len(taken) == count:
            break
        try:
            file = (folder / f"core-{core}").open("a")
        except OSError as error:
            raise OutriderError(f"--keep-cores-awake: cannot write in {folder}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        stack.enter_context(file)
        taken.append(core)
    if len(taken) < count:
        raise OutriderError(
            f"--keep-cores-awake: {count} cores asked for, {len(taken)} of this process's cores are not taken by other "
            "roles; ask for fewer"
        )
    return taken


def _place_among_siblings(core: int) -> tuple[int, int]:
    """First one hardware thread of every core, then the second ones: a thread that spins slows its siblings down."""
    try:
        siblings = Path(_SIBLINGS.format(core)).read_text().strip()
    except OSError:
        return 0, core
    numbers = [int(part.partition("-")[0]) for part in siblings.split(",")]
    if "-" in siblings:
        return core - numbers[0], core
    return numbers.index(core) if core in numbers else 0, core


def _settle(cores: list[int], stack: contextlib.ExitStack) -> None:
    for task in Path("/proc/self/task").iterdir():
        # A thread that has ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
    for core in cores:
        command = [sys.executable, "-I", "-S", "-c", _SPIN, str(core), str(os.getpid())]
        spinner = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(spinner.wait)
        stack.callback(spinner.kill)
