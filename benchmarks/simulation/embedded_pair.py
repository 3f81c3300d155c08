"""The embedded pair on virtual time: what its target emits is recorded first, its draft grows as it does in a worker.

Under the default rule a request's tokens do not depend on what is drafted, so a target's step is a walk along what was
recorded. The draft is `ModelDrafter` with the embedded draft: what it computes is real, how long that takes is given.

On a GPU the host reads a step's report while the device runs the next one: growth leaves `StepTimes.late` after its
step has ended. Commits that come while a step runs are the next one's.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from benchmarks.calibration_bench.workers import Pair, Run, runs_of
from benchmarks.end_bench.options import prompts_of
from benchmarks.simulation import virtual_time
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation
from benchmarks.simulation.virtual_workers import VirtualDraft, VirtualTarget

from outrider.coordinator import clock
from outrider.coordinator.messages import (
    Commit,
    GenerationRequest,
    GrowthBatch,
    SessionOpening,
    TokenDelta,
)
from outrider.coordinator.text_stream import TextStream
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.loading import load_drafters
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, GrowthMode, SessionStart
from outrider.errors import WorkerUnavailable
from outrider.models import embedded_draft_path
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2

MAX_LEN = 2048
_KV_BYTES = 1 << 30
# A session that has ended may still be open at the draft when its client's next one comes.
_PLACES = 2


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What a step of the draft takes, milliseconds.

    Attributes:
        step: whatever is in it,
        row: each row of it more,
        session: each session of it more.
        commit: to apply one.
        late: what growth leaves later by than its step ends.
    """

    step: float = 0.4
    row: float = 0.004
    session: float = 0.02
    commit: float = 0.05
    late: float = 0.3


@dataclass(frozen=True, kw_only=True)
class PairFigures:
    """What a run has shown after its warm-up.

    Attributes:
        tokens_per_s: of virtual time.
        acceptance_length: tokens a verification of one session.
        nodes: of a tree that was verified.
        busy: share of the time that the target was in steps.
        draft_steps_per_s: of virtual time.
        draft_rows: of a step.
        draft_idle: share of the time in which the draft had nothing to grow.
    """

    tokens_per_s: float
    acceptance_length: float
    nodes: float
    busy: float
    draft_steps_per_s: float
    draft_rows: float
    draft_idle: float


class RecordedOutputs(PathModel):
    """What the target emits, by the request's number.

    Args:
        runs: requests with the whole of their outputs.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._numbers = {tuple(run.prompt): number for number, run in enumerate(runs)}
        assert len(self._numbers) == len(runs), "two requests have one prompt"

    def number(self, prompt: Sequence[int]) -> int:
        """Of the request with this prompt."""
        return self._numbers[tuple(prompt)]

    def token(self, session: int, position: int) -> int:
        """See `PathModel`; behind a request's last token there is one that no draft guesses."""
        run = self.runs[session]
        place = position - len(run.prompt)
        return run.output[place] if place < len(run.output) else -1


class _Target(VirtualTarget):
    def key_of(self, prompt: Sequence[int]) -> int:
        assert isinstance(self._model, RecordedOutputs)
        return self._model.number(prompt)


class _Draft(VirtualDraft):
    """A worker's drafters behind the interface of a fake draft."""

    def __init__(
        self,
        settings: Settings,
        model: PathModel,
        drafters: Drafters,
        times: StepTimes,
        *,
        on_growth: Callable[[GrowthBatch], None],
    ) -> None:
        super().__init__(settings, model, on_growth=on_growth)
        self._drafters, self._times = drafters, times
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self.steps = self.rows = self.idle_ns = 0

    def open_session(self, opening: SessionOpening) -> None:
        limits = GrowthLimits(mode=GrowthMode.ASYNC, max_live_nodes=opening.max_live_nodes, max_depth=opening.max_depth)
        start = SessionStart(
            key=(1, opening.session_id),
            owner=self,
            epoch=opening.epoch,
            prompt=opening.prompt,
            output=opening.output,
            sampling=opening.sampling,
            limits=limits,
        )

        def open_it() -> None:
            self._drafters.open(start)

        self._send(open_it)

    def _apply(self, commit: Commit) -> None:
        self._drafters.commit((1, commit.session_id), commit.epoch, commit.position, list(commit.token_ids))

    def close_session(self, session_id: int, epoch: int) -> None:
        self._send(lambda: self._drafters.close((1, session_id), epoch))

    def check(self) -> None:
        """Raises what has ended it, if anything has."""
        if self._task.done():
            self._task.result()

    def stop(self) -> None:
        """Ends its task."""
        self._task.cancel()

    def _arrive(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._arrived.set()

    async def _run(self) -> None:
        while True:
            await self._apply_waiting()
            growths = list(self._drafters.advance())
            for growth in growths:
                await self._step_time(growth)
                self._leave(growth)
            if not growths:
                since_ns = clock.now_ns()
                await self._arrived.wait()
                self.idle_ns += clock.now_ns() - since_ns

    async def _apply_waiting(self) -> None:
        self._arrived.clear()
        while self._commands:
            command = self._commands.pop(0)
            command()
            # Commits are applied by a method; opens and closes are not.
            await asyncio.sleep(isinstance(command, functools.partial) * self._times.commit / 1e3)

    async def _step_time(self, growth: Growth) -> None:
        """Lasts as long as the step; commits are applied meanwhile."""
        times = self._times
        self.steps += 1
        self.rows += growth.rows
        self._step_ns = 1e6 * (times.step + times.row * growth.rows + times.session * growth.num_sessions)
        end_ns = clock.now_ns() + round(self._step_ns)
        while (left_ns := end_ns - clock.now_ns()) > 0:
            try:
                async with asyncio.timeout(left_ns / 1e9):
                    await self._arrived.wait()
            except TimeoutError:
                return
            await self._apply_waiting()

    def _leave(self, growth: Growth) -> None:
        if not growth.node_ids:
            return
        batch = GrowthBatch(
            session_ids=growth.session_ids,
            epochs=growth.epochs,
            as_of=growth.as_of,
            node_counts=growth.counts,
            complete=growth.complete,
            node_ids=np.array(growth.node_ids),
            parents=np.array(growth.parents),
            tokens=np.array(growth.tokens),
            acceptance=np.array(growth.acceptance),
        )
        asyncio.get_running_loop().call_later(self._times.late / 1e3 + self._one_way_ns / 1e9, self._give, batch)

    def _give(self, batch: GrowthBatch) -> None:
        self.step_latency.observe(self._step_ns)
        self._on_growth(batch)


class PairSimulation(VirtualSimulation):
    """Clients that send the recorded requests, one after the other.

    Args:
        recorded: as many requests as clients at least.
        drafters: without sessions.
        times: of its steps.

    Raises:
        ValueError: there are fewer requests than clients.
    """

    def __init__(self, settings: Settings, recorded: RecordedOutputs, drafters: Drafters, times: StepTimes) -> None:
        if len(recorded.runs) < settings.sessions:
            raise ValueError(f"{len(recorded.runs)} requests given, at least {settings.sessions} (sessions) needed")
        self._recorded, self._drafters, self._times = recorded, drafters, times
        super().__init__(settings)

    def make_model(self, *, draft: int) -> PathModel:
        """What was recorded; the draft grows by itself."""
        return self._recorded

    def make_target(self) -> VirtualTarget:
        """One that walks along what was recorded."""
        return _Target(self.settings, self._recorded)

    def _add_draft(self, number: int, limits: registry_pb2.WorkerLimits) -> None:
        worker_id = f"draft-{number}"
        self.draft = _Draft(
            self.settings,
            self._recorded,
            self._drafters,
            self._times,
            on_growth=lambda growth: self.scheduler.take_growth(worker_id, growth),
        )
        self.drafts.append(self.draft)
        self.scheduler.add_draft(worker_id, self.draft, limits)  # pyright: ignore[reportArgumentType] - stands where one does

    async def _client(self, number: int) -> None:
        # Each has requests of its own: no two sessions of one prompt run at a time.
        own = self._recorded.runs[number :: self.settings.sessions]
        count = 0
        while True:
            run = own[count % len(own)]
            count += 1
            request = GenerationRequest(
                request_id=f"client {number}, request {count}",
                prompt_token_ids=tuple(run.prompt),
                sampling=run.sampling,
                mode=self.settings.mode,
                max_nodes=self.settings.max_nodes,
                max_depth=self.settings.max_depth,
            )
            output: list[int] = []
            async with aclosing(self.scheduler.submit(request, [TextStream(None)])) as generation:
                async for event in generation:
                    if isinstance(event, TokenDelta):
                        output.extend(event.token_ids)
            assert output == run.output, f"{request.request_id}: other tokens than the target's"

    async def run(self) -> PairFigures:
        """All clients through warm-up and measurement."""
        clients = [asyncio.create_task(self._client(number)) for number in range(self.settings.sessions)]
        await asyncio.sleep(self.settings.warmup_s)
        before = self._all_counts()
        await asyncio.sleep(self.settings.duration_s)
        after = self._all_counts()
        for client in clients:
            if client.done():
                client.result()
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await self.scheduler.stop(WorkerUnavailable("the simulation is over"))
        if self.drafts:
            self.draft.check()
            self.draft.stop()
        tokens, verifications, _, rows, busy_ns, _, steps, draft_rows, idle_ns = (
            end - begin for begin, end in zip(before, after, strict=True)
        )
        seconds = self.settings.duration_s
        return PairFigures(
            tokens_per_s=tokens / seconds,
            acceptance_length=tokens / verifications,
            nodes=rows / verifications - 1,
            busy=busy_ns / 1e9 / seconds,
            draft_steps_per_s=steps / seconds,
            draft_rows=draft_rows / max(steps, 1),
            draft_idle=idle_ns / 1e9 / seconds,
        )

    def _all_counts(self) -> tuple[int, ...]:
        own = (self.draft.steps, self.draft.rows, self.draft.idle_ns) if self.drafts else (0, 0, 0)
        return *self._counts(), *own


def record(
    *, prompt_tokens: int, new_tokens: int, requests: int, temperatures: Sequence[float]
) -> dict[float, RecordedOutputs]:
    """What the embedded target says to held-out prompts, by temperature."""
    prompts, pair = prompts_of(prompt_tokens, None), Pair(max_len=MAX_LEN)
    # Those next to each other share text.
    prompts = prompts[:: max(1, len(prompts) // requests)][:requests]
    found = {}
    for temperature in temperatures:
        sampling = SamplingSpec(temperature=temperature, max_new_tokens=new_tokens)
        runs = runs_of(prompts, range(1, len(prompts) + 1), sampling)
        pair.continue_plainly(runs)
        found[temperature] = RecordedOutputs(runs)
    return found


def simulate_pair(
    settings: Settings,
    recorded: RecordedOutputs,
    times: StepTimes,
    *,
    max_session_nodes: int = DraftWorkerConfig.max_session_nodes,
    min_path_value: float | None = None,
) -> PairFigures:
    """One run, from virtual time 0 on.

    Args:
        settings: of the target, the ways and the clients.
        recorded: what the clients ask for.
        times: of the draft's steps.
        max_session_nodes: as of a draft worker.
        min_path_value: as of a draft worker; default that on a GPU.
    """
    on_gpu = DraftWorkerConfig(device="cuda").growth(max_model_len=MAX_LEN)
    config = DraftWorkerConfig(
        model_path=embedded_draft_path(),
        max_model_len=MAX_LEN,
        max_num_seqs=_PLACES * settings.sessions,
        kv_bytes=_KV_BYTES,
        max_step_tokens=2048,
        max_live_nodes=settings.max_live_nodes,
        max_step_nodes=on_gpu.max_step_nodes,
        max_session_nodes=max_session_nodes,
        min_path_value=on_gpu.min_path_value if min_path_value is None else min_path_value,
    )
    drafters = load_drafters(config).drafters

    async def main() -> PairFigures:
        return await PairSimulation(settings, recorded, drafters, times).run()

    return virtual_time.run(main())
