"""A fuzzing run: so many messages at one service, a correct request now and then, and what is left behind."""

import asyncio
import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from benchmarks.fuzz_bench.calls import Answer, Target, call
from benchmarks.fuzz_bench.evil_workers import EvilKind, EvilWorker, evil_request
from benchmarks.fuzz_bench.services import targets_of
from benchmarks.fuzz_bench.tiny_service import Gauges, TinyService, exceeded, tiny_service

from outrider.rpc import CHANNEL_OPTIONS
from outrider.v1 import generation_pb2

_PROBE_EVERY = 500
# A worker that cannot be dialled takes a while to be given up.
_AT_ONCE = 4
# At the start, what is allocated once and kept: caches, buffers, the allocator's own.
_WARM_UP_SHARE = 0.2
# A worker that is lost again and again is what is wanted here; one that says nothing is given up soon.
_PATIENT = {"quarantine_losses": 10**9, "step_timeout_s": 0.5}
_ROLES = {"TargetService": "target", "DraftService": "draft"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An answer that was wrong, with the bytes that brought it about."""

    method: str
    payloads: Sequence[bytes]
    fault: str


@dataclass(kw_only=True)
class Outcome:
    """What came of a run.

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
    """Sends so many fuzzed conversations to one service of a whole one.

    Args:
        service: one of `services.SERVICES`.
        say: takes lines of progress.
    """
    return await _Run(served, service, seed, say).run(messages)


async def fuzz_answers(
    folder: Path, kind: EvilKind, *, messages: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Lets a worker answer a coordinator with fuzzed messages until it has sent so many."""
    roles = ("target",) if kind.has_target else ()
    async with tiny_service(folder, roles=roles, **_PATIENT) as served:
        outcome, began = Outcome(service=kind.name), time.monotonic()
        path = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name["Generate"]
        judge = next(target for target in targets_of("GenerationService", tokenizer_hash="")).judge
        tokenizer_hash = served.coordinator.registry._model.tokenizer_hash
        evil = EvilWorker(served.addresses["coordinator"], kind=kind, tokenizer_hash=tokenizer_hash, seed=seed)
        async with grpc.aio.insecure_channel(served.addresses["coordinator"], options=CHANNEL_OPTIONS) as channel:
            wanted = {}
            if kind.has_target:
                for number in range(2):
                    wanted[number] = tokens_of(await call(channel, path, [evil_request(number, kind)]))
            before = served.gauges()
            async with evil.serving():
                number, rss, probe = 0, rss_mb(), 0
                while outcome.messages < messages:
                    await served.until(lambda: served.serving == len(roles) + 1)
                    evil.begin_case()
                    payload = evil_request(number, kind)
                    called = time.monotonic()
                    answer = await call(channel, path, [payload])
                    outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - called)
                    outcome.codes[answer.code.name] += 1
                    try:
                        assert answer.code.name in kind.codes, f"{answer.code.name}: {answer.details}"
                        judge([payload], answer)
                        if wanted:
                            assert tokens_of(answer) == wanted[number % 2], "other tokens than without this draft"
                        served.check_alive()
                    except AssertionError as error:
                        outcome.findings.append(Finding(method=kind.name, payloads=list(evil.sent), fault=str(error)))
                        say(f"{kind.name}: {error!s:.300}")
                    outcome.messages += len(evil.sent)
                    number += 1
                    if outcome.messages // _PROBE_EVERY > probe:
                        probe = outcome.messages // _PROBE_EVERY
                        gc.collect()
                        outcome.rss_curve_mb.append(rss_mb())
                    if outcome.messages < messages * _WARM_UP_SHARE:
                        rss = rss_mb()
        gc.collect()
        outcome.rss_mb = rss, rss_mb()
        outcome.left = exceeded(await served.quiet(before), before)
        outcome.seconds = time.monotonic() - began
        return outcome


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
                if number <= messages * _WARM_UP_SHARE:
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
        answer = await call(channel, target.method, payloads, most_responses=target.most_responses)
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
