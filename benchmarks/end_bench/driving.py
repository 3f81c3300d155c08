"""Sessions that run one request after the other through the public door, in processes beside the one that measures.

A client costs about as much as a coordinator: many sessions are spread over several processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Literal, cast

import uvloop
from benchmarks.end_bench.prompts import Answer, Prompts

from outrider.client import AsyncClient, GenerateOptions
from outrider.client.outputs import GenerationOutput
from outrider.errors import Overloaded

# Seeds of requests that follow each other in a session lie so far apart.
_SEEDS_APART = 1000
# A request that found no place is sent again after this.
_TRY_AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load that one process drives. Times are of `time.monotonic`, which all processes of a machine share.

    Attributes:
        endpoints: of the coordinators, which sessions are spread over.
        prompts: session s begins with the one at s, and goes on with those after it.
        first, sessions: the sessions' numbers.
        traced: of those at the first coordinator, so many have every verification reported: rounds are numbered by the
            stream between a coordinator and a target.
        mode, temperature, synthetic: as of the cell.
        max_new_tokens: of every request.
        begin_s, end_s: what is counted; sessions start at once and stop at the end. One that has found no place by then
            tries on until the begin, where that is later: nothing is counted, and every session has run once.
    """

    endpoints: Sequence[str]
    prompts: Prompts
    first: int
    sessions: int
    traced: int
    mode: str
    temperature: float
    synthetic: tuple[float, ...]
    max_new_tokens: int
    begin_s: float
    end_s: float

    def options(self, session: int, count: int) -> GenerateOptions:
        """Return the options of a session's request after `count` others."""
        coordinators = len(self.endpoints)
        options: GenerateOptions = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": _SEEDS_APART * session + count,
            "ignore_eos": not self.prompts.categories,
            "speculation": cast("Literal['async', 'sync', 'off']", self.mode),
            "trace": session % coordinators == 0 and session < self.first + self.traced * coordinators,
        }
        return options | {
            "verification": "synthetic" if self.synthetic else "coupled",
            "synthetic_rates": self.synthetic,
        }


@dataclass(frozen=True, slots=True)
class Round:
    """One verification as the coordinator saw it; `Round` of generation.proto."""

    step: int
    result_ns: int
    step_ns: int
    forward_ns: int


@dataclass(kw_only=True)
class Driven:
    """Tokens, times and answers that came between begin and end.

    Attributes:
        tokens: that came.
        tpot_ms, ttft_ms: of the requests that ended.
        answers: these requests, where their prompts belong to categories.
        requests: per traced request, its verifications.
    """

    tokens: int = 0
    tpot_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    requests: list[list[Round]] = field(default_factory=list)


class Drivers:
    """Processes that drive; use with `with`.

    Args:
        processes: most of them.
        sessions_each: sessions that one drives before another is taken.
    """

    def __init__(self, *, processes: int, sessions_each: int = 16) -> None:
        self._processes, self._each = processes, sessions_each
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))

    def __enter__(self) -> Drivers:
        # Imports take longer than a measurement may begin late.
        for future in [self._pool.submit(_nothing) for _ in range(self._processes)]:
            future.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def drive(self, load: Load) -> list[Future[Driven]]:
        """Spread the sessions of `load`; the traced ones are all the first process's."""
        count = min(self._processes, -(-load.sessions // self._each))
        sizes = [load.sessions // count + (number < load.sessions % count) for number in range(count)]
        return [
            self._pool.submit(
                drive,
                replace(load, first=sum(sizes[:number]), sessions=size, traced=0 if number else load.traced),
            )
            for number, size in enumerate(sizes)
        ]


def drive(load: Load) -> Driven:
    """Run the sessions of `load` until its end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_drive(load))


async def _drive(load: Load) -> Driven:
    driven = Driven()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(endpoint)) for endpoint in load.endpoints]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for session in range(load.first, load.first + load.sessions):
            group.create_task(_session(clients[session % len(clients)], load, session, driven))
    return driven


async def _session(client: AsyncClient, load: Load, session: int, driven: Driven) -> None:
    count = 0
    while (now := time.monotonic()) < load.end_s or (not count and now < load.begin_s):
        number = (session + count) % len(load.prompts.token_ids)
        try:
            async with client.stream(load.prompts.token_ids[number], **load.options(session, count)) as stream:
                async for delta in stream:
                    now = time.monotonic()
                    if now >= load.end_s:
                        break
                    if now >= load.begin_s:
                        driven.tokens += len(delta.token_ids)
                else:
                    if time.monotonic() >= load.begin_s:
                        driven.tpot_ms.append(stream.result.timings.tpot_ms)
                        driven.ttft_ms.append(stream.result.timings.ttft_ms)
                        driven.answers += _answers(load, number, stream.result)
        except Overloaded:
            # The places of the last measurement's requests are given back while this one begins.
            if time.monotonic() >= load.begin_s:
                raise
            await asyncio.sleep(_TRY_AGAIN_S)
            continue
        if stream.rounds:
            driven.requests.append(
                [Round(record.step, record.result_ns, record.step_ns, record.forward_ns) for record in stream.rounds]
            )
        count += 1


def _answers(load: Load, number: int, result: GenerationOutput) -> list[Answer]:
    """The answer to a prompt, if that belongs to a category."""
    return [
        Answer(category, result.usage.completion_tokens, result.speculation.verify_steps, result.timings.total_ms / 1e3)
        for category in load.prompts.categories[number : number + 1]
    ]


def _nothing() -> None:
    """Make a process import this module."""
    time.sleep(0.1)
