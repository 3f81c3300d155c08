"""The coordinator's side of a run: the scheduler with its own links, and clients that read what it delivers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from benchmarks.simulation.fake_workers import FakeDraft, FakeTarget, StepTrace
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.worker_process import WorkerProcess

from outrider.coordinator.generation import Generation
from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.messages import GenerationRequest, GrowthBatch, RoundRecord, SpeculationMode, TokenDelta
from outrider.coordinator.scheduler import Scheduler
from outrider.coordinator.text_stream import TextStream
from outrider.errors import OutriderError, WorkerUnavailable
from outrider.sampling import SamplingSpec

_CONNECT_S = 10.0
# No run is long enough to reach it.
_NO_LIMIT = 1 << 30
# Longest that sessions of a given number of tokens may take.
_PATIENCE_S = 300.0


@dataclass
class Departure:
    """One batch: when it was written to its stream, and when the result before it had been read (0: none had).

    `cpu_ns`: what the coordinator's thread has used of a core in between.
    """

    left_ns: int
    result_ns: int
    cpu_ns: int
    step: int
    first_session: int


@dataclass
class Client:
    """One session's reader: what it got and when."""

    key: int
    session_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    deltas: list[tuple[int, int]] = field(default_factory=list)
    """(time, tokens)"""
    held_ns: dict[int, int] = field(default_factory=dict)
    """Step to the time for which its batch was held on purpose since the result before; of traced sessions."""
    waited_ns: dict[int, int] = field(default_factory=dict)
    """The same: for which a free target was held for growth."""


@dataclass(frozen=True, kw_only=True)
class RunTraces:
    """Everything that was recorded between `began_ns` and `ended_ns`, and a little more on both sides."""

    settings: Settings
    began_ns: int
    ended_ns: int
    cpu_ns: int
    clients: list[Client]
    departures: list[list[Departure]]
    targets: list[list[StepTrace]]
    drafts: list[list[StepTrace]]
    wrong_tokens: int
    dropped_nodes: int


class _StampedCall:
    """A target's stream with the times at which batches leave and results come."""

    def __init__(self, call: Any, departures: list[Departure]) -> None:
        self._call, self._departures = call, departures
        self._result_ns = self._result_cpu_ns = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for response in self._call:
            self._result_ns, self._result_cpu_ns = time.monotonic_ns(), time.thread_time_ns()
            yield response

    async def write(self, message: Any) -> None:
        if message.step:
            first = message.trees.session_ids[0]
            cpu_ns = time.thread_time_ns() - self._result_cpu_ns
            self._departures.append(Departure(time.monotonic_ns(), self._result_ns, cpu_ns, message.step, first))
        await self._call.write(message)

    def cancel(self) -> bool:
        return self._call.cancel()


class StampedTargetLink(TargetLink):
    """The coordinator's own link, with stamps at its ends."""

    def __init__(self, address: str, *, on_lost: Callable[[str], None]) -> None:
        self.departures: list[Departure] = []
        super().__init__(address, incarnation=1, on_lost=on_lost)

    def _start(self, call: "grpc.aio.StreamStreamCall") -> None:
        super()._start(_StampedCall(call, self.departures))  # pyright: ignore[reportArgumentType]


class Simulation:
    """One run; `measure` does it."""

    def __init__(self, settings: Settings, *, targets: WorkerProcess, drafts: WorkerProcess) -> None:
        self._settings, self._targets, self._drafts = settings, targets, drafts
        self._scheduler = Scheduler(settings.coordinator_config())
        self._limits = settings.worker_limits()
        self._links: list[TargetLink | DraftLink] = []
        self._failure: asyncio.Future[None]

    async def measure(self) -> RunTraces:
        """Runs all sessions through warm-up and measurement.

        Raises:
            WorkerUnavailable: a worker or the scheduler has failed.
        """
        self._failure = asyncio.get_running_loop().create_future()
        try:
            departures = await self._connect()
            return await self._measure(departures)
        finally:
            await self._scheduler.stop(WorkerUnavailable("the simulation is over"))
            for link in self._links:
                await link.close()

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_exception(WorkerUnavailable(reason))

    async def _connect(self) -> list[list[Departure]]:
        departures = []
        for number, port in enumerate(self._targets.ports()):
            link = StampedTargetLink(f"127.0.0.1:{port}", on_lost=self._fail)
            self._links.append(link)
            await link.ready(timeout_s=_CONNECT_S)
            self._scheduler.add_target(f"target-{number}", link, self._limits, on_failure=self._fail, ahead=True)
            departures.append(link.departures)
        if self._settings.mode is not SpeculationMode.OFF:
            for number, port in enumerate(self._drafts.ports()):
                await self._connect_draft(f"draft-{number}", port)
        return departures

    async def _connect_draft(self, worker_id: str, port: int) -> None:
        def take_growth(growth: GrowthBatch) -> None:
            self._scheduler.take_growth(worker_id, growth)

        def take_error(session_id: int, epoch: int, message: str) -> None:
            self._scheduler.take_draft_error(worker_id, session_id, epoch, message)

        link = DraftLink(
            f"127.0.0.1:{port}",
            incarnation=1,
            vocab_size=_NO_LIMIT,
            on_growth=take_growth,
            on_error=take_error,
            on_lost=self._fail,
        )
        self._links.append(link)
        await link.ready(timeout_s=_CONNECT_S)
        self._scheduler.add_draft(worker_id, link, self._limits)

    async def _measure(self, departures: list[list[Departure]]) -> RunTraces:
        settings = self._settings
        clients = [Client(key) for key in range(1, settings.sessions + 1)]
        generations = [self._submit(client) for client in clients]
        readers = asyncio.gather(*map(_read, clients, generations))
        try:
            if not settings.tokens:
                await self._pass(readers, settings.warmup_s)
            began_ns, began_cpu_ns = time.monotonic_ns(), time.process_time_ns()
            dropped = self._scheduler.totals.dropped_nodes
            await self._pass(readers, _PATIENCE_S if settings.tokens else settings.duration_s)
            ended_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns() - began_cpu_ns
            dropped = self._scheduler.totals.dropped_nodes - dropped
        finally:
            for generation in generations:
                generation.cancel()
            with suppress(OutriderError):
                await readers
        model = PathModel(seed=settings.seed, rank_rates=settings.rank_rates, spread=settings.spread)
        return RunTraces(
            settings=settings,
            began_ns=began_ns,
            ended_ns=ended_ns,
            cpu_ns=cpu_ns,
            clients=clients,
            departures=departures,
            targets=await asyncio.to_thread(self._targets.traces),
            drafts=[] if settings.mode is SpeculationMode.OFF else await asyncio.to_thread(self._drafts.traces),
            wrong_tokens=sum(_wrong_tokens(client, model) for client in clients),
            dropped_nodes=dropped,
        )

    async def _pass(self, readers: "asyncio.Future[Any]", seconds: float) -> None:
        """Lets time pass, until all sessions have ended at most; a failure of any part ends it with its error."""
        done, _ = await asyncio.wait((readers, self._failure), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()

    def _submit(self, client: Client) -> Generation:
        request = GenerationRequest(
            request_id=f"simulated-{client.key}",
            prompt_token_ids=(client.key, 1),
            sampling=SamplingSpec(max_new_tokens=self._settings.tokens or _NO_LIMIT),
            mode=self._settings.mode,
            max_nodes=self._settings.max_nodes,
            max_depth=self._settings.max_depth,
            # The oldest session of a batch tells how long it was held; two a target are enough, and cost little.
            trace=client.key <= 2 * self._settings.targets,
        )
        generation = self._scheduler.submit(request, [TextStream(None)])
        client.session_id = generation.sessions[0].session_id
        return generation


async def _read(client: Client, generation: Generation) -> None:
    async with aclosing(generation):
        async for event in generation:
            if isinstance(event, TokenDelta):
                client.deltas.append((time.monotonic_ns(), len(event.token_ids)))
                client.token_ids.extend(event.token_ids)
            elif isinstance(event, RoundRecord):
                client.held_ns[event.step], client.waited_ns[event.step] = event.held_ns, event.waited_ns


def _wrong_tokens(client: Client, model: PathModel) -> int:
    """Tokens that plain decoding would not have given."""
    # Behind the two tokens of the prompt.
    return sum(token != model.token(client.key, position) for position, token in enumerate(client.token_ids, start=2))


async def simulate(settings: Settings) -> RunTraces:
    """One run with workers of its own."""
    with WorkerProcess(settings, FakeTarget) as targets, WorkerProcess(settings, FakeDraft) as drafts:
        return await Simulation(settings, targets=targets, drafts=drafts).measure()
