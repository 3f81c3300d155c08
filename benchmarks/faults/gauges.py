"""Gauges of what every idle role holds, which must be equal before the faults and after them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.processes import Cluster, Role

_POLL_S = 0.5
# Readings in a row, a second apart.
_ALIKE = 2
_ASK_TIMEOUT_S = 60.0
# The last request and the last round of a loop stay referred to until the next one.
_LAST_ONES = 4
# What has to be nothing, not merely as before.
_IDLE_GAUGES = ("sessions", "slots", "waiting")
# Of gRPC: on a stream until the first answer comes, whenever that is.
_PASSING_TASKS = {"StreamStreamCall._prepare_rpc"}
# Objects that live as long as a request, a stream or a worker does. The others are caches, bounded by other means.
_LIVING = (
    *("Session", "Generation", "RegisteredWorker", "TargetLink", "DraftLink", "TargetPeer", "DraftPeer"),
    *("_Stream", "ModelSession", "SyncTree"),
)


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """Gauges of one role, at one time.

    Attributes:
        counts: sessions, slots, tasks, threads, descriptors, and objects by their type.
        tasks: by the coroutine's name.
        descriptors: by what they are, sockets by their other end.
        resident_bytes: its memory.
        starts: which of its processes it is.
    """

    counts: Mapping[str, int]
    tasks: Mapping[str, int]
    descriptors: Mapping[str, int]
    resident_bytes: int
    starts: int


async def read_gauges(cluster: Cluster) -> dict[str, Gauges]:
    """Every role's, by name."""
    # Calls that were given up keep their connections until they are collected, here as in any client.
    gc.collect()
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
        tasks = {name: count for name, count in told["tasks"].items() if name not in _PASSING_TASKS}
        objects = {f"{kind} objects": told["objects"].get(kind, 0) for kind in _LIVING}
        load = loads.get(role.address if role.kind == "coordinator" else role.advertised, {})
        descriptors = _descriptors(role.pid)
        gauges[role.name] = Gauges(
            counts={
                **load,
                "tasks": sum(tasks.values()),
                "threads": told["threads"],
                "descriptors": sum(descriptors.values()),
                **{kind: count for kind, count in objects.items() if count},
            },
            tasks=tasks,
            descriptors=descriptors,
            resident_bytes=_resident_bytes(role.pid),
            starts=role.starts,
        )
    return gauges


def differences(before: Mapping[str, Gauges], after: Mapping[str, Gauges]) -> list[str]:
    """Return the differences between two readings, in words."""
    found = []
    for name, start in before.items():
        end = after[name]
        for gauge in sorted(start.counts.keys() | end.counts.keys()):
            was, is_now = start.counts.get(gauge, 0), end.counts.get(gauge, 0)
            if was == is_now or (gauge.endswith("objects") and is_now <= was + _LAST_ONES):
                continue
            words = f"{name}: {gauge} {was} before, {is_now} now"
            details = {"tasks": (start.tasks, end.tasks), "descriptors": (start.descriptors, end.descriptors)}
            found.append(f"{words} ({_changes(*details[gauge])})" if gauge in details else words)
    return found


def memory_growth(before: Mapping[str, Gauges], after: Mapping[str, Gauges]) -> dict[str, float]:
    """Return every role's memory now as a multiple of what it was."""
    return {name: after[name].resident_bytes / start.resident_bytes for name, start in before.items()}


async def until_equal(cluster: Cluster, before: Mapping[str, Gauges], *, timeout_s: float) -> list[str]:
    """Wait until everything is as it was; return what is not by then."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = differences(before, await read_gauges(cluster))
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


async def settled_gauges(cluster: Cluster, *, timeout_s: float) -> dict[str, Gauges]:
    """Wait until several readings in a row are alike and no session is left; readings that stay unlike will do.

    Raises:
        TimeoutError: there is still a session, a slot or a request somewhere.
    """
    deadline, alike = time.monotonic() + timeout_s, 0
    last = await read_gauges(cluster)
    while True:
        await asyncio.sleep(2 * _POLL_S)
        now = await read_gauges(cluster)
        held = [name for name, gauges in now.items() if any(gauges.counts.get(gauge) for gauge in _IDLE_GAUGES)]
        alike = alike + 1 if not held and not differences(last, now) else 0
        late = time.monotonic() > deadline
        if late and held:
            raise TimeoutError(f"not idle after {timeout_s:g} s: {', '.join(held)}")
        if late or alike == _ALIKE:
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


def _descriptors(pid: int) -> dict[str, int]:
    """Return the number of a process's descriptors by kind."""
    peers = _peers(pid)
    counts: dict[str, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            # Closed meanwhile.
            continue
        number = target.removeprefix("socket:[").removesuffix("]")
        kind = peers.get(number, "another socket") if target.startswith("socket:") else target.partition(":[")[0]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _peers(pid: int) -> dict[str, str]:
    """Return the port that every TCP socket belongs to, by inode."""
    peers = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            near, far = (int(end.rpartition(":")[2], 16) for end in (local, remote))
            # Of the two ports the lower one is the server's.
            peers[rest[5]] = f"TCP, port {min(near, far) or near}, state {state}"
    return peers


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
