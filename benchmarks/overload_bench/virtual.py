"""The same load on virtual time: the coordinator's scheduler with workers whose steps take their time and no other.

Nothing of this machine is in these figures, and nothing of what the coordinator itself costs: what is left is what the
queue, and the choice of trees, do to those who are let in.
"""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Sequence
from contextlib import aclosing

from benchmarks.overload_bench.figures import Phase, Sample, phase_of
from benchmarks.overload_bench.load import Request, closed_loop, open_loop
from benchmarks.simulation import virtual_time
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation

from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.messages import TokenDelta
from outrider.errors import Overloaded, WorkerUnavailable
from outrider.v1 import generation_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedSettings(Settings):
    """With the coordinator's bounds on its queue."""

    max_queue: int | None = None
    max_queue_wait_s: float | None = None

    def coordinator_config(self) -> CoordinatorConfig:
        """How the coordinator is set up."""
        bounds = {"max_queue": self.max_queue, "max_queue_wait_s": self.max_queue_wait_s}
        return dataclasses.replace(super().coordinator_config(), **bounds)


def run_virtually(
    settings: BoundedSettings,
    *,
    max_new_tokens: int,
    capacity_s: float,
    loads: Sequence[tuple[str, float, float]],
    seed: int,
) -> list[Phase]:
    """The phases of load, each (name, times the capacity, seconds), behind a closed loop that finds the capacity."""
    return virtual_time.run(_Run(settings, max_new_tokens, seed).phases(capacity_s, loads))


class _Run:
    def __init__(self, settings: BoundedSettings, max_new_tokens: int, seed: int) -> None:
        self._settings, self._tokens = settings, max_new_tokens
        self._random = random.Random(seed)
        self._keys = iter(range(1, 1 << 30))

    async def phases(self, capacity_s: float, loads: Sequence[tuple[str, float, float]]) -> list[Phase]:
        self._simulation = VirtualSimulation(self._settings)
        now = asyncio.get_running_loop().time
        asked = closed_loop(self._send, self._settings.sessions, capacity_s, now=now)
        found = [await self._phase("capacity", 0.0, asked)]
        rate = found[0].accepted / found[0].seconds
        for name, times, seconds in loads:
            asked = open_loop(self._send, times * rate, seconds, now=now, choices=self._random)
            found.append(await self._phase(name, times, asked))
        await self._simulation.scheduler.stop(WorkerUnavailable("the simulation is over"))
        return found

    async def _phase(self, name: str, times: float, work: Awaitable[list[Request]]) -> Phase:
        loop, before = asyncio.get_running_loop(), self._info()
        began, samples = loop.time(), list[Sample]()
        watch = asyncio.create_task(self._watch(began, samples))
        requests = await work
        watch.cancel()
        seconds = loop.time() - began
        return phase_of(
            name, times, requests, seconds=seconds, before=before, after=self._info(), late_s=[], samples=samples
        )

    def _info(self) -> generation_pb2.ServerInfo:
        totals = self._simulation.scheduler.totals
        return generation_pb2.ServerInfo(
            emitted_tokens_total=totals.emitted_tokens,
            speculation=generation_pb2.SpeculationStats(
                verify_steps=totals.verify_steps,
                spec_draft_tokens=totals.drafted_tokens,
                spec_accepted_tokens=totals.accepted_tokens,
            ),
        )

    async def _watch(self, began: float, samples: list[Sample]) -> None:
        loop, scheduler = asyncio.get_running_loop(), self._simulation.scheduler
        while True:
            waiting, running = scheduler.waiting_requests, scheduler.running_sessions
            samples.append(
                Sample(at_s=loop.time() - began, rss_mb=1.0, waiting=waiting, running=running, answer_ms=0.0)
            )
            await asyncio.sleep(0.25)

    async def _send(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        request.sent = loop.time()
        try:
            generation = self._simulation.submit(next(self._keys), tokens=self._tokens)
            async with aclosing(generation):
                async for event in generation:
                    if isinstance(event, TokenDelta):
                        request.first_token = request.first_token or loop.time()
                        request.tokens += len(event.token_ids)
            request.status = "OK"
        except Overloaded as error:
            request.status, request.message = "RESOURCE_EXHAUSTED", str(error)
            request.retry_after_s = error.retry_after_s
        request.ended = loop.time()
