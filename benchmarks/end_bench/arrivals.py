"""Prompts that arrive beside running sessions: time to the first token, and how long the others wait meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.end_bench.cells import Setup

from outrider.client import AsyncClient

# Until all running sessions have got far, and as long as they are looked at without arrivals.
_RUN_IN_S, _USUAL_S = 3.0, 1.0
# Arrivals that do not count: the target learns from them what prefill takes.
_WARM_UPS = 2
# For a first token.
_PATIENCE_S = 60.0
# Between a first token and the next arrival, and how much of that belongs to the arrival.
_APART_S, _BEHIND_S = 0.2, 0.05


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Prompts of one length that arrive one after the other.

    Attributes:
        setup: which workers serve.
        mode: of all sessions: off, sync or async.
        temperature: of all sessions.
        running: sessions beside them, each a request after the other.
        prompt_tokens: of each prompt that arrives.
        count: of them.
    """

    setup: Setup
    mode: Literal["async", "sync", "off"]
    temperature: float
    running: int
    prompt_tokens: int
    count: int

    @property
    def name(self) -> str:
        """In a line of progress."""
        return (
            f"{self.mode} {self.setup.name}, prompts of {self.prompt_tokens} tokens beside {self.running} sessions, "
            f"temperature {self.temperature:g}"
        )


def measure(
    arrivals: Arrivals, endpoint: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> dict[str, Any]:
    """Return the figures of arrivals at a service.

    Args:
        arrivals: which.
        endpoint: of the coordinator.
        prompts: of the running sessions, as token ids; those that arrive are made of them.
        max_new_tokens: of each of the running sessions' requests.

    Returns:
        What `arrivals` says, and as medians and largest: ttft_ms; longest_ms, the longest time of an arrival in which a
        running session got no token; usual_longest_ms, the same of equally long spans without one.

    Raises:
        ExceptionGroup: a request failed, or a prompt got no token for a minute.
    """
    return asyncio.run(_measure(arrivals, endpoint, prompts, max_new_tokens))


async def _measure(
    arrivals: Arrivals, endpoint: str, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> dict[str, Any]:
    async with AsyncClient(endpoint) as client, asyncio.TaskGroup() as group:
        sessions = [_Session() for _ in range(arrivals.running)]
        tasks = [
            group.create_task(session.run(client, prompts, number, arrivals, max_new_tokens))
            for number, session in enumerate(sessions)
        ]
        await asyncio.sleep(_RUN_IN_S)
        began_s = time.monotonic()
        await asyncio.sleep(_USUAL_S)
        usual_end_s = time.monotonic()
        firsts_s, longest_s = list[float](), list[float]()
        for number in range(_WARM_UPS + arrivals.count):
            sent_s = time.monotonic()
            await _first_token(client, _prompt(prompts, arrivals, number), arrivals)
            got_s = time.monotonic()
            await asyncio.sleep(_APART_S)
            if number >= _WARM_UPS:
                firsts_s.append(got_s - sent_s)
                longest_s.append(_longest_s(sessions, sent_s, got_s + _BEHIND_S))
        span_s = min(statistics.median(firsts_s) + _BEHIND_S, usual_end_s - began_s)
        starts_s = [began_s + place * span_s for place in range(int((usual_end_s - began_s) / span_s))]
        for task in tasks:
            task.cancel()
    return {
        "setup": arrivals.setup.name,
        "mode": arrivals.mode,
        "temperature": arrivals.temperature,
        "running": arrivals.running,
        "prompt_tokens": arrivals.prompt_tokens,
        "count": arrivals.count,
        "ttft_ms": _median_and_largest_ms(firsts_s),
        "longest_ms": _median_and_largest_ms(longest_s),
        "usual_longest_ms": _median_and_largest_ms([_longest_s(sessions, at, at + span_s) for at in starts_s]),
    }


class _Session:
    """One that runs: when its tokens have come, request by request."""

    def __init__(self) -> None:
        self.requests: list[list[float]] = []

    async def run(
        self,
        client: AsyncClient,
        prompts: Sequence[Sequence[int]],
        number: int,
        arrivals: Arrivals,
        max_new_tokens: int,
    ) -> None:
        for count in itertools.count(number):
            times = list[float]()
            self.requests.append(times)
            stream = client.stream(
                prompts[count % len(prompts)],
                max_new_tokens=max_new_tokens,
                temperature=arrivals.temperature,
                seed=count,
                ignore_eos=True,
                speculation=arrivals.mode,
            )
            async with stream:
                async for delta in stream:
                    if delta.token_ids:
                        times.append(time.monotonic())


def _longest_s(sessions: Sequence[_Session], began_s: float, ended_s: float) -> float:
    """The longest time between tokens of one request that overlaps a span of time; 0 without any."""
    # A session that still waits does so until now.
    now = time.monotonic()
    requests = itertools.chain.from_iterable(
        [*session.requests[:-1], [*session.requests[-1], now]] for session in sessions if session.requests
    )
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, requests))
    return max((after - before for before, after in pairs if after >= began_s and before <= ended_s), default=0.0)


async def _first_token(client: AsyncClient, prompt: Sequence[int], arrivals: Arrivals) -> None:
    stream = client.stream(
        prompt, max_new_tokens=2, temperature=arrivals.temperature, seed=1, ignore_eos=True, speculation=arrivals.mode
    )
    async with asyncio.timeout(_PATIENCE_S), stream:
        async for delta in stream:
            if delta.token_ids:
                return


def _prompt(prompts: Sequence[Sequence[int]], arrivals: Arrivals, number: int) -> list[int]:
    """Tokens of all prompts in an order of its own: no target has the keys and values of its beginning."""
    tokens = [token for prompt in prompts for token in prompt]
    return random.Random(f"{arrivals.name} {number}").choices(tokens, k=arrivals.prompt_tokens)


def _median_and_largest_ms(values_s: Sequence[float]) -> list[float]:
    return [round(1e3 * statistics.median(values_s), 3), round(1e3 * max(values_s), 3)]
