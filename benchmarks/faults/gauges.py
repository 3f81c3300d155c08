"""What every role holds when nothing is going on: it has to be the same before the faults and after them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.processes import Cluster, Role

_POLL_S = 0.5
_ASK_TIMEOUT_S = 10.0
# Of a role that has served for a while, how much more memory it may hold in the end: a twentieth.
MEMORY_GROWTH = 1.05
# Objects that live as long as a request, a stream or a worker does. The others are caches, bounded by other means.
_LIVING = (
    *("Session", "Generation", "_Live", "Flight", "Submission"),
    *("RegisteredWorker", "TargetLink", "DraftLink", "TargetLane", "VerifyLoop", "DraftPeer"),
    *("_Stream", "TargetSession", "DraftSession", "DraftTree", "SessionKv"),
)


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """Of one role, at one time.

    Attributes:
        counts: sessions, slots, tasks, threads, descriptors, and objects by their type.
        tasks: by the coroutine's name.
        resident_bytes: its memory.
        starts: which of its processes it is.
    """

    counts: Mapping[str, int]
    tasks: Mapping[str, int]
    resident_bytes: int
    starts: int


async def read_gauges(cluster: Cluster) -> dict[str, Gauges]:
    """Every role's, by name."""
    loads: dict[str, dict[str, int]] = {}
    for coordinator in cluster.of_kind("coordinator"):
        info = await cluster.info(coordinator.name)
        loads[coordinator.address] = {"sessions": info.running_sessions, "waiting": info.waiting_requests}
        for worker in info.workers:
            load = {"sessions": worker.load.sessions, "slots": worker.load.slots_used}
            loads[worker.introduction.address] = load
    gauges = {}
    for role in cluster.roles.values():
        told = await asyncio.wait_for(_ask(role), _ASK_TIMEOUT_S)
        objects = {f"{kind} objects": told["objects"].get(kind, 0) for kind in _LIVING}
        load = loads.get(role.address if role.kind == "coordinator" else role.advertised, {})
        gauges[role.name] = Gauges(
            counts={
                **load,
                "tasks": sum(told["tasks"].values()),
                "threads": told["threads"],
                "descriptors": len(os.listdir(f"/proc/{role.pid}/fd")),  # noqa: PTH208 - a count, not paths
                **{kind: count for kind, count in objects.items() if count},
            },
            tasks=told["tasks"],
            resident_bytes=_resident_bytes(role.pid),
            starts=role.starts,
        )
    return gauges


def differences(before: Mapping[str, Gauges], after: Mapping[str, Gauges]) -> list[str]:
    """What is not as it was, in words."""
    found = []
    for name, start in before.items():
        end = after[name]
        for gauge in sorted(start.counts.keys() | end.counts.keys()):
            was, is_now = start.counts.get(gauge, 0), end.counts.get(gauge, 0)
            if was != is_now:
                words = f"{name}: {gauge} {was} before, {is_now} now"
                if gauge == "tasks":
                    words += f" ({_changes(start.tasks, end.tasks)})"
                found.append(words)
    return found


def memory_growth(before: Mapping[str, Gauges], after: Mapping[str, Gauges]) -> dict[str, float]:
    """Of every role, its memory now as a part of what it was."""
    return {name: after[name].resident_bytes / start.resident_bytes for name, start in before.items()}


async def until_equal(cluster: Cluster, before: Mapping[str, Gauges], *, timeout_s: float) -> list[str]:
    """Waits until everything is as it was; returns what is not by then."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = differences(before, await read_gauges(cluster))
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


async def settled_gauges(cluster: Cluster, *, timeout_s: float) -> dict[str, Gauges]:
    """Waits until two readings in a row are alike and no session is left."""
    deadline = time.monotonic() + timeout_s
    last = await read_gauges(cluster)
    while True:
        await asyncio.sleep(2 * _POLL_S)
        now = await read_gauges(cluster)
        is_idle = not any(gauges.counts.get("sessions") or gauges.counts.get("slots") for gauges in now.values())
        if (is_idle and not differences(last, now)) or time.monotonic() > deadline:
            return now
        last = now


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    names = sorted(before.keys() | after.keys())
    changes = [(name, after.get(name, 0) - before.get(name, 0)) for name in names]
    return ", ".join(f"{name} {change:+d}" for name, change in changes if change)


async def _ask(role: Role) -> dict:
    reader, writer = await asyncio.open_unix_connection(str(role.socket_path))
    try:
        return json.loads(await reader.read())
    finally:
        writer.close()
        await writer.wait_closed()


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
