"""The measurement of `outrider bench`: every prompt without speculation and with it, by the load generator.

Both modes find the same prefix cache, because every prompt is sent once before, for a single token. Half of the prompts
of each category run first without and then with speculation, the other half in the opposite order: a machine that gets
slower or faster meanwhile favours neither.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.coordinator.bench.door import Tokenized, TokenizedPrompt
from outrider.coordinator.loadtest.client_process import Access
from outrider.coordinator.loadtest.driving import COUNTERS, Driver, Job
from outrider.coordinator.loadtest.http_sender import HttpSender
from outrider.coordinator.loadtest.options import LoadtestConfig, Mode
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.senders import Ask
from outrider.coordinator.loadtest.workloads import FromFile, Prompt, Turn
from outrider.security.tls import TlsConfig


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request of one prompt.

    Attributes:
        record: times and counts.
        token_ids: of the output.
    """

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
    """Return every prompt's two answers, at temperature 0.

    Args:
        tokenized: the prompts.
        access: how clients get in.
        endpoint: host:port of the OpenAI door.
        speculation: mode that is compared with off.
        max_concurrency: requests under way.
        timeout_s: after which a request has failed.
        on_answer: called after each request, three times a prompt.

    Raises:
        LoadtestFailed: the service refuses the first request.
    """
    tls = None if access.tls_ca is None else TlsConfig(ca=access.tls_ca)
    sender = _OutputKeeper(HttpSender([endpoint], model=tokenized.model, tls=tls, token=access.token), on_answer)
    prompts = tokenized.prompts
    config = LoadtestConfig(
        endpoint=endpoint,
        protocol="openai",
        max_concurrency=max_concurrency,
        num_prompts=len(prompts),
        ignore_eos=False,
        timeout=timeout_s,
    )

    async def run(mode: Mode, numbers: Sequence[int], *, is_warmup: bool = False) -> dict[int, Answer]:
        turns = [
            Turn(prompt=prompts[number].token_ids, max_new_tokens=1 if is_warmup else prompts[number].max_new_tokens)
            for number in numbers
        ]
        job = _job(config, mode, turns)
        driver = Driver(job, sender, begin_s=time.monotonic(), counters=[0] * COUNTERS)
        records = (await driver.run()).records
        return {
            numbers[record.index]: Answer(record=record, token_ids=sender.taken(record.index)) for record in records
        }

    answers: dict[Mode, dict[int, Answer]] = {"off": {}, speculation: {}}
    try:
        if prompts:
            for mode in answers:
                await Driver(
                    _job(config, mode, [Turn(prompt=prompts[0].token_ids, max_new_tokens=prompts[0].max_new_tokens)]),
                    sender,
                    begin_s=time.monotonic(),
                    counters=[0] * COUNTERS,
                ).warm_up(1)
        await run("off", range(len(prompts)), is_warmup=True)
        first, second = _halves(prompts)
        for mode, numbers in (("off", first), (speculation, first), (speculation, second), ("off", second)):
            answers[mode] |= await run(mode, numbers)
    finally:
        await sender.close()
    return [
        Pair(prompt=prompt, off=answers["off"][number], on=answers[speculation][number])
        for number, prompt in enumerate(prompts)
    ]


def _job(config: LoadtestConfig, mode: Mode, turns: Sequence[Turn]) -> Job:
    own = replace(config, num_prompts=max(1, len(turns)), speculation=mode)
    return Job(config=own, point=own.points()[0], workload=FromFile(entries=[(turn,) for turn in turns], seed=0))


def _halves(prompts: Sequence[TokenizedPrompt]) -> tuple[list[int], list[int]]:
    """Every other prompt of each category."""
    halves: tuple[list[int], list[int]] = ([], [])
    seen: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        place = seen[prompt.prompt.category] = seen.get(prompt.prompt.category, -1) + 1
        halves[place % 2].append(number)
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
