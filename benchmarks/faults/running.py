"""Injects the faults of a schedule while load runs, and keeps what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.faults.processes import Cluster
from benchmarks.faults.proxy import Conditions
from benchmarks.faults.schedule import ENDS_PROCESS, FaultKind, PlannedFault

from outrider.errors import OutriderError

# From the end of a fault until its role is back everywhere; quarantine and a slow machine included.
_RECOVERY_TIMEOUT_S = 90.0
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a fault.

    Attributes:
        began_s, lifted_s: by the monotonic clock; a kill is lifted when its role's new process serves.
        recovered_s: its role is back at every coordinator; None if that did not happen.
        trouble: what went wrong beside it; empty as a rule.
        hit: whether there was anything to hurt: a connection to reset, a link that did not suffer already.
    """

    fault: PlannedFault
    began_s: float
    lifted_s: float
    recovered_s: float | None
    trouble: str = ""
    hit: bool = True


class FaultRun:
    """One schedule against one cluster.

    Args:
        at_once: faults at a time, never two of one role.
        say: takes a line of progress.

    Attributes:
        outcomes: so far.
        crashes: roles that ended though nobody ended them, with their last words.
    """

    def __init__(
        self, cluster: Cluster, schedule: Sequence[PlannedFault], *, at_once: int, say: Callable[[str], None]
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.crashes: list[str] = []
        self._cluster, self._schedule, self._say = cluster, schedule, say
        self._places = asyncio.Semaphore(at_once)
        self._hit = {name: asyncio.Lock() for name in cluster.roles}

    async def run(self) -> None:
        """All faults, to the end of the last one."""
        watch = asyncio.create_task(self._restart_crashed())
        try:
            async with asyncio.TaskGroup() as tasks:
                for fault in self._schedule:
                    await asyncio.sleep(fault.gap_s)
                    await self._places.acquire()
                    tasks.create_task(self._one(fault))
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _one(self, fault: PlannedFault) -> None:
        try:
            async with self._hit[fault.role]:
                outcome = await self._inject(fault)
        finally:
            self._places.release()
        self.outcomes.append(outcome)
        back = "never" if outcome.recovered_s is None else f"{outcome.recovered_s - outcome.began_s:.1f} s after it"
        self._say(f"{fault}; back {back}{f' ({outcome.trouble})' if outcome.trouble else ''}")

    async def _inject(self, fault: PlannedFault) -> Outcome:
        began_s, trouble, hit = time.monotonic(), "", True
        try:
            hit = await self._disturb(fault)
        except (OutriderError, ProcessLookupError, AssertionError) as error:
            trouble = f"{type(error).__name__}: {error}"
        lifted_s = time.monotonic()
        recovered_s = None
        try:
            await self._cluster.until_whole(
                timeout_s=_RECOVERY_TIMEOUT_S, about=fault.role, suffering=lambda: self._hit_beside(fault.role)
            )
            recovered_s = time.monotonic()
        except TimeoutError as error:
            trouble = f"{trouble} {error}".strip()
        return Outcome(
            fault=fault, began_s=began_s, lifted_s=lifted_s, recovered_s=recovered_s, trouble=trouble, hit=hit
        )

    async def _disturb(self, fault: PlannedFault) -> bool:
        """Carry out a fault from its beginning to its end; return whether there was anything to hurt."""
        cluster, role = self._cluster, self._cluster.roles[fault.role]
        if fault.kind in ENDS_PROCESS:
            await cluster.kill(role.name)
            await asyncio.sleep(fault.duration_s)
            await cluster.launch(role.name, open_pause_s=fault.open_pause_s)
        elif fault.kind is FaultKind.FREEZE:
            cluster.freeze(role.name)
            await asyncio.sleep(fault.duration_s)
            cluster.thaw(role.name)
        elif fault.kind is FaultKind.BLOCKED_LOG:
            role.log.block()
            await asyncio.sleep(fault.duration_s)
            role.log.drain()
        elif fault.kind is FaultKind.RESET:
            resets = role.reset()
            await asyncio.sleep(fault.duration_s)
            return resets + role.reset() > 0
        else:
            assert fault.conditions is not None
            proxies = role.disturb(fault.conditions, links=fault.links)
            await asyncio.sleep(fault.duration_s)
            for proxy in proxies:
                proxy.conditions = Conditions()
            return bool(proxies)
        return True

    def _hit_beside(self, role: str) -> list[str]:
        return [name for name, lock in self._hit.items() if lock.locked() and name != role]

    async def _restart_crashed(self) -> None:
        """Restart roles that have crashed, as their operator would, and note the crash."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for role in self._cluster.roles.values():
                process = role.process
                if process is None or process.is_running or role.is_starting:
                    continue
                code = process.process.returncode
                self.crashes.append(f"{role.name} ended by itself with code {code}: {role.last_words()}")
                self._say(f"{role.name} ended by itself")
                try:
                    await self._cluster.kill(role.name)
                    await self._cluster.launch(role.name)
                except (OutriderError, AssertionError) as error:
                    # Another attempt of whoever wanted it down, or the next look.
                    self._say(f"{role.name} cannot be started: {error}")
