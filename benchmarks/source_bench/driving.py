"""All requests of a workload, so many at a time, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from outrider.client import AsyncClient, GenerateOptions, GenerationOutput


@dataclass(kw_only=True)
class PassFigures:
    """One pass over a workload's requests.

    Attributes:
        seconds: from the first request's start to the last one's end.
        outputs: token ids of each request, in the requests' order.
        sources: by source, tokens drafted, submitted and accepted.
        told: what the processes counted meanwhile (`readings.told`).
    """

    seconds: float
    outputs: list[tuple[int, ...]]
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tpot_ms: list[float] = field(default_factory=list)
    sources: dict[str, list[int]] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of all outputs."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together, prefill included."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification, the target's own one included."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else 1.0


def options_of(mixture: str, *, temperature: float, max_new_tokens: int, seed: int) -> GenerateOptions:
    """How a request of a mixture is asked for."""
    options: GenerateOptions = {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "ignore_eos": True,
        "speculation": "off" if mixture == "off" else "async",
    }
    if mixture != "off":
        options["sources"] = cast("Any", mixture.replace("/", "+").split("+"))
    return options


async def drive(
    endpoint: str,
    prompts: Sequence[str],
    mixture: str,
    *,
    sessions: int,
    temperature: float,
    max_new_tokens: int,
) -> PassFigures:
    """Sends all prompts, `sessions` at a time; a request's seed is its place."""
    results: dict[int, GenerationOutput] = {}
    waiting = iter(enumerate(prompts))

    async def session(client: AsyncClient) -> None:
        for place, prompt in waiting:
            asked = options_of(mixture, temperature=temperature, max_new_tokens=max_new_tokens, seed=place)
            results[place] = await client.generate(prompt, **asked)

    async with AsyncClient(endpoint) as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(session(client))
        seconds = time.perf_counter() - began
    return _figures([results[place] for place in range(len(prompts))], seconds)


def _figures(results: Sequence[GenerationOutput], seconds: float) -> PassFigures:
    figures = PassFigures(seconds=seconds, outputs=[tuple(result.token_ids) for result in results])
    for result in results:
        own = result.speculation
        figures.verify_steps += own.verify_steps
        figures.drafted += own.drafted_tokens
        figures.accepted += own.accepted_tokens
        figures.tpot_ms.append(result.timings.tpot_ms)
        for word, source in own.sources.items():
            sums = figures.sources.setdefault(word, [0, 0, 0])
            for place, more in enumerate((source.drafted_tokens, source.submitted_tokens, source.accepted_tokens)):
                sums[place] += more
    return figures
