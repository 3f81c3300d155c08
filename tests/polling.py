"""Waiting for what comes about by itself."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

# It takes milliseconds, but for a machine that does much else.
_MOST_S = 120


async def until(holds: Callable[[], object]) -> None:
    """Let the event loop go on until a condition holds."""
    async with asyncio.timeout(_MOST_S):
        while not holds():
            await asyncio.sleep(0.001)


def wait_until(holds: Callable[[], object]) -> None:
    """Wait in this thread until a condition holds."""
    deadline = time.monotonic() + _MOST_S
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Return whether a process runs; an orphan that nobody reaps stays a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
