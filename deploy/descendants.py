"""The processes that this one has started, and those that they have."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


def adopt_descendants() -> None:
    """Become the parent of descendants whose own parent ends, so that `kill_descendants` finds them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> dict[int, list[int]]:
    """Process ids by parent."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # One that has ended meanwhile is gone.
        with contextlib.suppress(OSError):
            rest = (folder / "stat").read_text().rpartition(")")[2]
            found.setdefault(int(rest.split()[1]), []).append(int(folder.name))
    return found


def kill_descendants() -> None:
    """Kill them all, as far as the system tells of them (Linux); elsewhere Ray's own watch over its parent does."""
    children = _children()
    found, left = [], [os.getpid()]
    while left:
        own = children.get(left.pop(), [])
        found += own
        left += own
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def end_descendants(timeout_s: float) -> None:
    """Kill them until none is left, or for so long; what they leave behind is collected."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        kill_descendants()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S)
