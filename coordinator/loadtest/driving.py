"""One client process: begins conversations when their time has come, and notes what came of them."""

import asyncio
import math
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count as counting
from itertools import takewhile
from typing import Any, cast

from outrider.coordinator.loadtest.lag import ClientLoad, LagMeter
from outrider.coordinator.loadtest.options import LoadtestConfig, Point
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.senders import Ask, Sender
from outrider.coordinator.loadtest.workloads import Conversation, FromFile, Prompt, Turn, Workload
from outrider.errors import LoadtestFailed

# Places in the row of counters that the progress bar shows.
BEGUN, ENDED, FAILED, TOKENS, FIRST_TOKENS, TTFT_US = range(6)
COUNTERS = 6
# Timers of event loops count in whole milliseconds: what is left after them is waited for turn by turn.
_TIMER_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process's share of a run.

    Attributes:
        process: its number, from 0; conversation i is process (i mod processes)'s.
        processes: how many there are.
        traced: conversations whose requests are traced, by number.
    """

    config: LoadtestConfig
    point: Point
    workload: Workload
    process: int = 0
    processes: int = 1
    traced: frozenset[int] = frozenset()

    @property
    def places(self) -> int | None:
        """Requests that this process may have under way; the processes share the places as evenly as they go."""
        cap = self.point.max_concurrency
        if cap is None:
            return None
        return cap // self.processes + (self.process < cap % self.processes)

    @property
    def is_closed_loop(self) -> bool:
        """True if a request starts whenever a slot is free, without an intended time."""
        return (
            self.places is not None
            and self.config.arrivals_of(self.point).is_all_at_once
            and (self.config.dataset_name != "trace")
        )

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """(number, seconds from the beginning) of this process's conversations."""
        times: Iterable[float] = self.config.arrivals_of(self.point).times()
        if isinstance(self.workload, FromFile) and self.workload.arrivals_s is not None:
            end_s = math.inf if self.config.duration is None else self.config.duration
            times = takewhile(lambda at_s: at_s < end_s, self.workload.arrivals_s[: self.config.num_prompts])
        elif self.is_closed_loop and self.config.num_prompts is None and self.config.duration is not None:
            times = (0.0 for _ in counting())
        for number, at_s in enumerate(times):
            if number % self.processes == self.process:
                yield number, at_s


@dataclass(kw_only=True)
class Driven:
    """Result of a job."""

    records: list[RequestRecord] = field(default_factory=list)
    load: ClientLoad = field(default_factory=ClientLoad)
    is_interrupted: bool = False


class Driver:
    """Runs one job.

    Args:
        begin_s: of `time.monotonic`, the beginning of the run; all processes of a machine share that clock.
        counters: `COUNTERS` numbers of this process for who watches, written as it goes on.
    """

    def __init__(self, job: Job, sender: Sender, *, begin_s: float, counters: MutableSequence[int]) -> None:
        self._job, self._sender, self._begin_s, self._counters = job, sender, begin_s, counters
        self._gate = None if job.places is None else asyncio.Semaphore(job.places)
        self._driven = Driven()

    async def run(self) -> Driven:
        """Drive the job; return when all requests have ended, or at once if the process is interrupted."""
        async with LagMeter() as load:
            work = asyncio.create_task(self._all())
            try:
                with on_interrupt(work.cancel):
                    # What ended it is in its result: a failure is raised below.
                    await asyncio.wait([work])
            finally:
                work.cancel()
        if work.cancelled():
            self._driven.is_interrupted = True
        else:
            work.result()
        self._driven.load = load
        return self._driven

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for number, intended_s in self._due():
                group.create_task(self._conversation(number, intended_s))

    async def warm_up(self, requests: int) -> None:
        """The workload's first prompts, one after the other; nothing of it is counted.

        Raises:
            LoadtestFailed: a request has failed, with its error.
        """
        for number in range(requests):
            conversation = self._job.workload.conversation(number)
            turn = conversation.turns[0]
            ask = self._ask(conversation, turn.prompt, turn, number=-1, is_last=True)
            record = RequestRecord(index=number)
            await self._sender.send(ask, record, begin_s=self._begin_s)
            if record.error:
                raise LoadtestFailed(f"warm-up request {number} failed: {record.error}")

    async def _due(self) -> AsyncIterator[tuple[int, float]]:
        """Conversations when their time has come, with that time."""
        if self._job.is_closed_loop:
            async for due in self._when_free(cast("asyncio.Semaphore", self._gate)):
                yield due
            return
        for number, at_s in self._job.arrivals():
            await self._sleep_until(at_s)
            yield number, at_s

    async def _when_free(self, gate: asyncio.Semaphore) -> AsyncIterator[tuple[int, float]]:
        """The same of a closed loop: the first ones at once, the others when a place is free."""
        duration_s, free = self._job.config.duration, self._job.places or 0
        for begun, (number, _) in enumerate(self._job.arrivals()):
            await gate.acquire()
            at_s = 0.0 if begun < free else self._now_s()
            if duration_s is not None and at_s >= duration_s:
                gate.release()
                return
            yield number, at_s

    async def _sleep_until(self, at_s: float) -> None:
        left_s = at_s - self._now_s()
        if left_s > _TIMER_S:
            await asyncio.sleep(left_s - _TIMER_S)
        while self._now_s() < at_s:  # noqa: ASYNC110 two milliseconds at most, to the microsecond
            await asyncio.sleep(0)

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    async def _conversation(self, number: int, intended_s: float) -> None:
        try:
            await self._turns(number, intended_s)
        finally:
            if self._job.is_closed_loop and self._gate is not None:
                self._gate.release()

    async def _turns(self, number: int, intended_s: float) -> None:
        conversation = self._job.workload.conversation(number)
        prompt: Prompt | None = None
        for place, turn in enumerate(conversation.turns):
            prompt = turn.prompt if prompt is None else _joined(prompt, turn.prompt)
            if place:
                # The next turn is due some time after the answer: this loop is the user's, not the generator's.
                intended_s = self._now_s() + self._job.config.think_time
                await self._sleep_until(intended_s)
            record = RequestRecord(index=number, turn=place, intended_s=intended_s, started_s=self._now_s())
            is_last = place == len(conversation.turns) - 1
            ask = self._ask(conversation, prompt, turn, number=number, is_last=is_last)
            output = await self._send(ask, record)
            if record.error:
                return
            prompt = _joined(prompt, output)

    async def _send(self, ask: Ask, record: RequestRecord) -> Prompt:
        gate = nullcontext() if self._gate is None or self._job.is_closed_loop else self._gate
        async with gate:
            self._counters[BEGUN] += 1
            try:
                output = await self._sender.send(ask, record, begin_s=self._begin_s)
            except asyncio.CancelledError:
                # It was interrupted, and neither came to its end nor failed.
                raise
            except BaseException:
                self._note_end(record)
                raise
            self._note_end(record)
            return output

    def _note_end(self, record: RequestRecord) -> None:
        record.over_s = self._now_s()
        self._driven.records.append(record)
        counters = self._counters
        counters[ENDED] += 1
        counters[FAILED] += not record.is_complete
        counters[TOKENS] += record.output_tokens
        if record.is_complete:
            counters[FIRST_TOKENS] += 1
            counters[TTFT_US] += round(record.ttft_s * 1e6)

    def _ask(self, conversation: Conversation, prompt: Prompt, turn: Turn, *, number: int, is_last: bool) -> Ask:
        config = self._job.config
        return Ask(
            prompt=prompt,
            max_new_tokens=turn.max_new_tokens,
            seed=conversation.seed,
            temperature=config.temperature,
            ignore_eos=config.ignore_eos,
            speculation=self._job.point.speculation,
            is_traced=number in self._job.traced,
            keeps_output=not is_last,
            timeout_s=config.timeout,
            sources=config.source_words,
        )


@contextmanager
def on_interrupt(end: Callable[[], object]) -> Iterator[None]:
    """Have the first Ctrl-C call `end`; the next one ends the process as usual."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        end()

    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def split(job: Job, processes: int) -> list[Job]:
    """The same job for several processes; no more of them than there are places."""
    cap = job.point.max_concurrency
    count = processes if cap is None else min(processes, cap)
    return [replace(job, process=number, processes=count) for number in range(count)]


def _joined(first: Prompt, second: Any) -> Prompt:
    return first + second
