"""A fuzzing run: so many messages at one service, a correct request now and then, and what is left behind."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from benchmarks.fuzz_bench.calls import Answer, Target, call
from benchmarks.fuzz_bench.evil_workers import EvilKind, EvilMessages, EvilWorker, evil_request
from benchmarks.fuzz_bench.services import targets_of
from benchmarks.fuzz_bench.tiny_service import Gauges, TinyService, exceeded, tiny_service

from outrider.coordinator.commands.client import status_dict
from outrider.rpc import CHANNEL_OPTIONS
from outrider.v1 import generation_pb2

_PROBE_EVERY = 500
# A worker that cannot be dialled takes a while to be given up.
_AT_ONCE = 4
# At the start, what is allocated once and kept: caches, buffers, the allocator's own.
WARM_UP_SHARE = 0.2
# A worker that is lost again and again is what is wanted here.
_PATIENT = {"quarantine_losses": 10**9}
# Evil targets, and clients of theirs.
_TARGETS_AT_ONCE = 24
# A request goes on at one of them after the other.
_MOVING_S = 60.0
_ROLES = {"TargetService": "target", "DraftService": "draft"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An answer that was wrong, with the bytes that brought it about."""

    method: str
    payloads: Sequence[bytes]
    fault: str


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        codes: how many calls ended with each status.
        findings: wrong answers.
        left: gauges that did not come back.
        rss_mb: of this process, after the warm-up and at the end.
        slowest_s: the longest call.
        seconds: of it all.
        rss_curve_mb: at every correct request between.
        probes: correct requests that got the same tokens as the first one.
    """

    service: str
    messages: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    rss_mb: tuple[float, float] = (0.0, 0.0)
    rss_curve_mb: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0
    probes: int = 0


async def fuzz(
    served: TinyService, service: str, *, messages: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Send fuzzed conversations to one service of a running deployment.

    Args:
        service: one of `services.SERVICES`.
        say: takes lines of progress.
    """
    return await _Run(served, service, seed, say).run(messages)


async def fuzz_answers(
    folder: Path, kind: EvilKind, *, messages: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Let workers answer a coordinator with fuzzed messages until they have sent `messages`."""
    roles = () if kind.is_target else ("target",)
    async with tiny_service(folder, roles=roles, **_PATIENT) as served:
        return await _AnswersRun(served, kind, seed, say).run(messages)


class _AnswersRun:
    """Several evil workers of one coordinator, and as many clients, each of which asks again and again."""

    def __init__(self, served: TinyService, kind: EvilKind, seed: int, say: Callable[[str], None]) -> None:
        self._served, self._kind, self._say = served, kind, say
        self._outcome = Outcome(service=kind.name)
        self._evil = EvilMessages(kind, seed=seed)
        self._judge = next(target for target in targets_of("GenerationService", tokenizer_hash="")).judge
        self._wanted: list[dict[int, list[int]]] = []
        self._numbers = itertools.count()
        self._rss = rss_mb()

    async def run(self, messages: int) -> Outcome:
        outcome, served, began = self._outcome, self._served, time.monotonic()
        at_once = _TARGETS_AT_ONCE if self._kind.is_target and messages > _PROBE_EVERY else _AT_ONCE
        address = served.addresses["coordinator"]
        tokenizer_hash = served.coordinator.registry._model.tokenizer_hash
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            if self._kind.has_target:
                self._wanted = [tokens_of(await self._ask(channel, number)) for number in range(2)]
            before = served.gauges()
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(at_once):
                    worker = EvilWorker(address, self._evil, tokenizer_hash=tokenizer_hash)
                    await stack.enter_async_context(worker.serving())
                async with asyncio.TaskGroup() as clients:
                    for _ in range(at_once):
                        clients.create_task(self._ask_again(channel, messages))
        gc.collect()
        outcome.messages, outcome.rss_mb = self._evil.sent, (self._rss, rss_mb())
        outcome.left = exceeded(await served.quiet(before), before)
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _ask(self, channel: grpc.aio.Channel, number: int) -> Answer:
        path = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name["Generate"]
        return await call(channel, path, [evil_request(number, self._kind)], timeout_s=_MOVING_S)

    async def _ask_again(self, channel: grpc.aio.Channel, messages: int) -> None:
        outcome, served = self._outcome, self._served
        while self._evil.sent < messages:
            # Somebody evil is there; else nothing would be fuzzed.
            await served.until(lambda: served.serving > len(self._wanted[:1]))
            number, began = next(self._numbers), time.monotonic()
            answer = await self._ask(channel, number)
            outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
            outcome.codes[answer.code.name] += 1
            try:
                self._check(number, answer)
            except (AssertionError, ValueError) as error:
                payloads = list(self._evil.last)
                outcome.findings.append(Finding(method=self._kind.name, payloads=payloads, fault=str(error)))
                self._say(f"{self._kind.name}: {error!s:.300}")
            self._note_memory(messages)

    def _check(self, number: int, answer: Answer) -> None:
        assert answer.code.name in self._kind.codes, f"{answer.code.name}: {answer.details}"
        self._judge([evil_request(number, self._kind)], answer)
        if self._wanted:
            assert tokens_of(answer) == self._wanted[number % 2], "other tokens than without this worker"
            self._outcome.probes += 1
        self._served.check_alive()
        # What everybody is shown who asks for the service's state.
        json.dumps(status_dict(self._served.coordinator.info()), allow_nan=False)

    def _note_memory(self, messages: int) -> None:
        if self._evil.sent // _PROBE_EVERY > len(self._outcome.rss_curve_mb):
            gc.collect()
            self._outcome.rss_curve_mb.append(rss_mb())
        if self._evil.sent < messages * WARM_UP_SHARE:
            self._rss = rss_mb()


def tokens_of(answer: Answer) -> dict[int, list[int]]:
    """The output of each choice."""
    tokens: dict[int, list[int]] = {}
    for data in answer.responses:
        event = generation_pb2.GenerateResponse.FromString(data)
        if event.HasField("delta"):
            tokens.setdefault(event.delta.index, []).extend(event.delta.token_ids)
    return tokens


class _Run:
    def __init__(self, served: TinyService, service: str, seed: int, say: Callable[[str], None]) -> None:
        self._served, self._seed, self._say = served, seed, say
        self._outcome = Outcome(service=service)
        self._address = served.addresses[_ROLES.get(service, "coordinator")]

    async def run(self, messages: int) -> Outcome:
        outcome, served = self._outcome, self._served
        wanted = await served.probe()
        before = self._settled()
        began, rss = time.monotonic(), rss_mb()
        targets = targets_of(outcome.service, tokenizer_hash=served.coordinator.registry._model.tokenizer_hash)
        sources = {id(target): target.conversations(self._seed) for target in targets}
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            for number in range(0, messages, _AT_ONCE):
                batch = [targets[place % len(targets)] for place in range(number, min(number + _AT_ONCE, messages))]
                calls = (self._one(channel, target, next(sources[id(target)])) for target in batch)
                await asyncio.gather(*calls)
                if number // _PROBE_EVERY > outcome.probes:
                    await self._probe(wanted, number)
                if number <= messages * WARM_UP_SHARE:
                    rss = rss_mb()
            await self._probe(wanted, messages)
        gc.collect()
        outcome.rss_mb = rss, rss_mb()
        outcome.left = exceeded(await served.quiet(before), before)
        outcome.messages, outcome.seconds = messages, time.monotonic() - began
        return outcome

    def _settled(self) -> Gauges:
        """The gauges with nothing of a request in them."""
        gc.collect()
        now = self._served.gauges()
        return dataclasses.replace(now, sessions=0, at_workers=0)

    async def _one(self, channel: grpc.aio.Channel, target: Target, payloads: Sequence[bytes]) -> None:
        outcome, began = self._outcome, time.monotonic()
        answer = await call(
            channel, target.method, payloads, most_responses=target.most_responses, linger_s=target.linger_s
        )
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
        outcome.codes[answer.code.name] += 1
        try:
            target.check(payloads, answer)
            self._served.check_alive()
        except (AssertionError, RuntimeError) as error:
            fault = f"{error} {error.__cause__ or ''}"
            outcome.findings.append(Finding(method=target.method.name, payloads=payloads, fault=fault))
            self._say(f"{outcome.service}: {fault[:300]}")
            if isinstance(error, RuntimeError):
                raise

    async def _probe(self, wanted: Sequence[int], number: int) -> None:
        got = await self._served.probe()
        self._outcome.probes += 1
        # The draft has told Python's collector to come seldom, and here it is everyone's.
        gc.collect()
        self._outcome.rss_curve_mb.append(rss_mb())
        assert got == wanted, f"after {number} messages a correct request gets {got}, {wanted} before"


def rss_mb() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20
