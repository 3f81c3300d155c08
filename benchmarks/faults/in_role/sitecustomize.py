"""Runs in every role of a fault run before anything else: this folder leads its PYTHONPATH.

It does two things that nothing outside a process can do: it tells what the process holds (tasks and objects, asked for
over a Unix socket), and it makes the disk slow, by a pause at every opening of a file of a model's folder.
"""

import asyncio
import collections
import contextlib
import ctypes
import gc
import json
import os
import socket
import sys
import threading
import time

_MODEL_FILES = (".json", ".safetensors", ".model", ".jinja")


def _slow_opens(pause_s: float) -> None:
    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and "/models/" in str(arguments[0]):
            time.sleep(pause_s if str(arguments[0]).endswith(_MODEL_FILES) else 0.0)

    sys.addaudithook(hook)


def _gauges() -> dict[str, object]:
    gc.collect()
    # What the allocator keeps for later is not what the role holds; not every libc has this.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    ours: collections.Counter[str] = collections.Counter()
    # Roles freeze what they begin with: those objects are not among these, which is as well.
    for kind in map(type, gc.get_objects()):
        if str(kind.__module__).startswith("outrider."):
            ours[kind.__qualname__] += 1
    tasks = collections.Counter(
        getattr(task.get_coro(), "__qualname__", "unknown") for task in _all_tasks() if not task.done()
    )
    return {"tasks": tasks, "objects": ours, "threads": threading.active_count()}


def _all_tasks() -> list[asyncio.Task]:
    """Return the tasks of every loop of this process; asyncio.all_tasks wants the loop."""
    # The stubs have the name of one version of Python.
    known = getattr(asyncio.tasks, "_scheduled_tasks", None) or asyncio.tasks._all_tasks  # pyright: ignore[reportAttributeAccessIssue]
    while True:
        try:
            return list(known)
        except RuntimeError:
            # The loop has made one meanwhile.
            continue


def _answer(listener: socket.socket) -> None:
    while True:
        asker, _ = listener.accept()
        with asker:
            asker.sendall(json.dumps(_gauges()).encode())


if _pause_s := float(os.environ.get("OUTRIDER_FAULTS_OPEN_PAUSE_S", "0")):
    _slow_opens(_pause_s)
# Taken out of the environment: processes that the role starts are not asked.
if _path := os.environ.pop("OUTRIDER_FAULTS_SOCKET", ""):
    _listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    _listener.bind(_path)
    _listener.listen()
    threading.Thread(target=_answer, args=(_listener,), name="gauges", daemon=True).start()
