"""The measurement of `outrider bench`: every prompt without speculation and with it, by the load generator.

Both modes find the same prefix cache, because every prompt is sent once before, for a single token. Half of the prompts
of each category run first without and then with speculation, the other half in the opposite order: a machine that gets
slower or faster meanwhile favours neither.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.coordinator.bench.door import Tokenized, TokenizedPrompt
from outrider.coordinator.loadtest.client_process import Access
from outrider.coordinator.loadtest.driving import COUNTERS, Driver, Job
from outrider.coordinator.loadtest.http_sender import HttpSender
from outrider.coordinator.loadtest.options import LoadtestConfig, Mode, Point
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.senders import Ask
from outrider.coordinator.loadtest.workloads import FromFile, Prompt, Turn

_WARMUP_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request of one prompt."""

    record: RequestRecord
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prompt, answered without speculation and with it."""

    prompt: TokenizedPrompt
    off: Answer
    on: Answer

    @property
    def is_complete(self) -> bool:
        """Neither request has failed."""
        return self.off.record.is_complete and self.on.record.is_complete

    @property
    def is_equal(self) -> bool:
        """Both outputs are the same tokens."""
        return self.off.token_ids == self.on.token_ids


def requests_of(prompts: int) -> int:
    """Return how many requests the measurement of so many prompts sends."""
    return 3 * prompts + 1


async def measure(
    tokenized: Tokenized,
    access: Access,
    *,
    endpoint: str,
    speculation: Mode,
    max_concurrency: int,
    timeout_s: float,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """Return every prompt's two answers, at temperature 0; where Ctrl-C ends it, of the prompts that have both.

    Args:
        speculation: mode that is compared with off.
        on_answer: called after each request, `requests_of` times.
    """
    http = HttpSender([endpoint], model=tokenized.model, tls=access.tls, token=access.token)
    sender = _OutputKeeper(http, on_answer)
    prompts = tokenized.prompts
    config = LoadtestConfig(
        endpoint=endpoint, protocol="openai", num_prompts=len(prompts), ignore_eos=False, timeout=timeout_s
    )

    async def send(mode: Mode, turns: Sequence[Turn]) -> dict[int, Answer]:
        """Answers by the turns' places; fewer than turns where the process is interrupted."""
        own = replace(config, num_prompts=len(turns))
        point = Point(request_rate=math.inf, max_concurrency=max_concurrency, speculation=mode)
        workload = FromFile(entries=[(turn,) for turn in turns], seed=0)
        job = Job(config=own, point=point, workload=workload)
        driven = await Driver(job, sender, begin_s=time.monotonic(), counters=[0] * COUNTERS).run()
        return {record.index: Answer(record=record, token_ids=sender.taken(record.index)) for record in driven.records}

    # The first draft steps of a service are slow. No whole prompt: n-grams would know its output from then on.
    begun = prompts[0].token_ids[: 1 + len(prompts[0].token_ids) // 2]
    first, second = _halves(prompts)
    answers: dict[tuple[Mode, int], Answer] = {}

    async def run() -> None:
        """Run the workload; end early if the process is interrupted."""
        turns = [Turn(prompt=prompt.token_ids, max_new_tokens=1) for prompt in prompts]
        if len(await send("off", turns)) < len(turns):
            return
        if not await send(speculation, [Turn(prompt=begun, max_new_tokens=_WARMUP_TOKENS)]):
            return
        turns = [Turn(prompt=prompt.token_ids, max_new_tokens=prompt.max_new_tokens) for prompt in prompts]
        passes: list[tuple[Mode, list[int]]]
        passes = [("off", first), (speculation, first), (speculation, second), ("off", second)]
        for mode, numbers in passes:
            found = await send(mode, [turns[number] for number in numbers]) if numbers else {}
            answers.update({(mode, numbers[place]): answer for place, answer in found.items()})
            if len(found) < len(numbers):
                return

    try:
        await run()
    finally:
        await sender.close()
    return [
        Pair(prompt=prompt, off=answers["off", number], on=answers[speculation, number])
        for number, prompt in enumerate(prompts)
        if ("off", number) in answers and (speculation, number) in answers
    ]


def _halves(prompts: Sequence[TokenizedPrompt]) -> tuple[list[int], list[int]]:
    """Every other prompt of each category."""
    halves: tuple[list[int], list[int]] = ([], [])
    turns: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        # Categories of one prompt take turns, too.
        turn = turns.get(prompt.prompt.category, len(turns) % 2)
        halves[turn].append(number)
        turns[prompt.prompt.category] = 1 - turn
    return halves


class _OutputKeeper:
    """A sender that keeps every output: the load generator needs none after a conversation's last turn."""

    def __init__(self, sender: HttpSender, on_answer: Callable[[], None]) -> None:
        self._sender, self._on_answer = sender, on_answer
        self._outputs: dict[int, tuple[int, ...]] = {}

    async def send(self, ask: Ask, record: RequestRecord, *, begin_s: float) -> Prompt:
        output = await self._sender.send(replace(ask, keeps_output=True), record, begin_s=begin_s)
        assert isinstance(output, tuple)
        self._outputs[record.index] = output
        self._on_answer()
        return output

    async def close(self) -> None:
        await self._sender.close()

    def taken(self, index: int) -> tuple[int, ...]:
        return self._outputs.pop(index)
