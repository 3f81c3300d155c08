"""A fake draft whose steps overlap, on virtual time: its host plans, launches and collects, its device computes.

The host does one thing at a time. Up to two steps are launched; the device takes them one after the other. Of the nodes
in flight the best children are promised to the step behind, as in `outrider.draft_worker`. Commits are applied between
what the host does, and make the next step be begun at once where one at most is under way.
"""

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.queued_grower import QueuedGrower
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.tree_grower import GrownRows
from benchmarks.simulation.virtual_workers import VirtualDraft

from outrider.coordinator import clock
from outrider.coordinator.messages import GrowthBatch


@dataclass(frozen=True, kw_only=True)
class DraftTimes:
    """What a step takes, milliseconds.

    Attributes:
        device: of the device.
        begin: of the host, until the device has it.
        finish: of the host, to collect a step.
        hand_out: of the host, to send its growth.
        sends_late: growth always leaves after the next step was begun; else before it where another one is under way,
            as the draft worker does.
        commit: of the host, to apply one.
        begun: steps that may be under way.
    """

    device: float = 0.45
    begin: float = 0.25
    finish: float = 0.14
    hand_out: float = 0.06
    sends_late: bool = False
    commit: float = 0.06
    begun: int = 2


class QueuedDraft(VirtualDraft):
    """See `VirtualDraft`.

    Args:
        times: of its host and device.

    Attributes:
        answers_ns: from when a commit was applied to when growth below its root arrived, where that had no children.
        met: commits, by the steps under way when each was applied.
        steps: that were begun.
    """

    def __init__(
        self, settings: Settings, model: PathModel, times: DraftTimes, *, on_growth: Callable[[GrowthBatch], None]
    ) -> None:
        super().__init__(settings, model, on_growth=on_growth)
        self._times = times
        self._grower: QueuedGrower = QueuedGrower(model, width=settings.draft_width)
        self._arrived: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        # When the device ends each step that is under way.
        self._begun: deque[int] = deque()
        self._free_ns = 0
        self._unsent: list[dict[int, GrownRows]] = []
        self.answers_ns: list[int] = []
        self.met = [0, 0, 0]
        self.steps = 0

    def _arrive(self, command: Callable[[], None]) -> None:
        if self._arrived is None:
            self._arrived = asyncio.Event()
            self._task = asyncio.create_task(self._run())
        elif self._task is not None and self._task.done():
            # It never ends but by an error.
            self._task.result()
        self._commands.append(command)
        self._arrived.set()

    async def _run(self) -> None:
        assert self._arrived is not None
        while True:
            await self._apply_waiting()
            if len(self._begun) < self._times.begun and self._grower.begin():
                self.steps += 1
                await _host(self._times.begin)
                self._free_ns = max(self._free_ns, clock.now_ns()) + round(1e6 * self._times.device)
                self._begun.append(self._free_ns)
                await self._send_grown()
                if len(self._begun) < self._times.begun:
                    continue
            await self._send_grown()
            if not self._begun:
                await self._arrived.wait()
            elif await self._meanwhile():
                await self._collect()

    async def _apply_waiting(self) -> None:
        assert self._arrived is not None
        self._arrived.clear()
        while self._commands:
            command = self._commands.pop(0)
            # Commits are applied by a method; opens and closes are not.
            self.met[len(self._begun)] += isinstance(command, functools.partial)
            command()
            await _host(self._times.commit)

    async def _meanwhile(self) -> bool:
        """Applies what arrives until the first step's end; False where a step can be begun by that before it."""
        assert self._arrived is not None
        while (left := self._begun[0] - clock.now_ns()) > 0:
            try:
                async with asyncio.timeout(left / 1e9):
                    await self._arrived.wait()
            except TimeoutError:
                return True
            await self._apply_waiting()
            if len(self._begun) < self._times.begun and self._grower.best_value > 0:
                return False
        return True

    async def _collect(self) -> None:
        await _host(self._times.finish)
        grown = self._grower.finish()
        self._begun.popleft()
        self._unsent.append(grown)
        if self._begun and not self._times.sends_late:
            await self._send_grown()

    async def _send_grown(self) -> None:
        unsent, self._unsent = self._unsent, []
        for grown in unsent:
            await _host(self._times.hand_out)
            asyncio.get_running_loop().call_later(self._one_way_ns / 1e9, self._leave, grown)

    def _leave(self, grown: dict[int, GrownRows]) -> None:
        self.answers_ns += self._grower.answered(grown, clock.now_ns())
        if grown:
            self._deliver(grown)


async def _host(taken_ms: float) -> None:
    await asyncio.sleep(taken_ms / 1e3)
