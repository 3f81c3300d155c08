"""One run on virtual time: the coordinator's scheduler, loops and mirrors with virtual workers."""

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass

from benchmarks.simulation import virtual_time
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_workers import VirtualDraft, VirtualTarget

from outrider.coordinator.generation import Generation
from outrider.coordinator.messages import GenerationRequest, GrowthBatch, SpeculationMode, TokenDelta
from outrider.coordinator.scheduler import Scheduler
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.verify_loop import VerifyLoop
from outrider.errors import OutriderError, WorkerUnavailable
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2

_NO_LIMIT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class VirtualFigures:
    """What a run has shown after its warm-up.

    Attributes:
        tokens_per_s: of virtual time.
        acceptance_length: tokens a verification of one session.
        target_busy: share of the time in steps, mean over targets.
        rows_per_step: roots and nodes.
        slowest_session: tokens of the session that got least, by the mean.
        wrong_tokens: that plain decoding would not have given.
        dropped_nodes: of growth.
    """

    tokens_per_s: float
    acceptance_length: float
    target_busy: float
    rows_per_step: float
    slowest_session: float
    wrong_tokens: int
    dropped_nodes: int


class VirtualSimulation:
    """A scheduler with virtual workers; made on the loop that runs it.

    Args:
        loop_type: how the targets' loops decide.
    """

    def __init__(self, settings: Settings, loop_type: type[VerifyLoop] = VerifyLoop) -> None:
        self.settings = settings
        self.model = self.make_model(draft=0)
        self.scheduler = Scheduler(settings.coordinator_config(), loop_type=loop_type)
        limits = settings.worker_limits()
        self.targets = [self.make_target() for _ in range(settings.targets)]
        for number, target in enumerate(self.targets):
            self.scheduler.add_target(f"target-{number}", target, limits, ahead=True)  # pyright: ignore[reportArgumentType]
        self.drafts: list[VirtualDraft] = []
        if settings.mode is not SpeculationMode.OFF:
            for number in range(settings.workers):
                self._add_draft(number, limits)
        self.received: dict[int, list[int]] = {}

    def _add_draft(self, number: int, limits: registry_pb2.WorkerLimits) -> None:
        worker_id = f"draft-{number}"

        def take_growth(growth: GrowthBatch) -> None:
            self.scheduler.take_growth(worker_id, growth)

        draft = VirtualDraft(self.settings, self.make_model(draft=number), on_growth=take_growth)
        self.drafts.append(draft)
        self.scheduler.add_draft(worker_id, draft, limits)  # pyright: ignore[reportArgumentType]

    def make_target(self) -> VirtualTarget:
        """One of the targets."""
        return VirtualTarget(self.settings, self.model)

    def make_model(self, *, draft: int) -> PathModel:
        """What the target and this draft draw from."""
        return PathModel(
            seed=self.settings.seed,
            rank_rates=self.settings.rank_rates,
            spread=self.settings.spread,
            draft=draft,
            kinship=self.settings.draft_kinship,
        )

    def submit(self, key: int, *, tokens: int = _NO_LIMIT, temperature: float = 0.0) -> Generation:
        """One session's request."""
        request = GenerationRequest(
            request_id=f"virtual-{key}",
            prompt_token_ids=(key, 1),
            sampling=SamplingSpec(temperature=temperature, max_new_tokens=tokens),
            mode=self.settings.mode,
            max_nodes=self.settings.max_nodes,
            max_depth=self.settings.max_depth,
        )
        return self.scheduler.submit(request, [TextStream(None)])

    async def read(self, key: int, generation: Generation) -> None:
        """Reads what a session emits into `received`."""
        token_ids = self.received.setdefault(key, [])
        async with aclosing(generation):
            async for event in generation:
                if isinstance(event, TokenDelta):
                    token_ids.extend(event.token_ids)

    async def measure(self) -> VirtualFigures:
        """All sessions through warm-up and measurement."""
        keys = range(1, self.settings.sessions + 1)
        readers = asyncio.gather(*(self.read(key, self.submit(key)) for key in keys))
        try:
            await asyncio.sleep(self.settings.warmup_s)
            before = self._counts()
            got = [len(token_ids) for token_ids in self.received.values()]
            await asyncio.sleep(self.settings.duration_s)
            after = self._counts()
            got = [len(token_ids) - had for token_ids, had in zip(self.received.values(), got, strict=True)]
        finally:
            await self.scheduler.stop(WorkerUnavailable("the simulation is over"))
            with suppress(OutriderError):
                await readers
        tokens, verifications, steps, rows, busy_ns, dropped = (
            end - start for start, end in zip(before, after, strict=True)
        )
        return VirtualFigures(
            tokens_per_s=tokens / self.settings.duration_s,
            acceptance_length=tokens / verifications,
            target_busy=busy_ns / 1e9 / self.settings.duration_s / len(self.targets),
            rows_per_step=rows / steps,
            slowest_session=min(got) * len(got) / max(1, sum(got)),
            wrong_tokens=sum(self._wrong_tokens(key) for key in keys),
            dropped_nodes=dropped,
        )

    def _counts(self) -> tuple[int, ...]:
        totals = self.scheduler.totals
        return (
            totals.emitted_tokens,
            totals.verify_steps,
            sum(target.steps for target in self.targets),
            sum(target.rows for target in self.targets),
            sum(target.busy_ns for target in self.targets),
            totals.dropped_nodes,
        )

    def _wrong_tokens(self, key: int) -> int:
        # Behind the two tokens of the prompt.
        return sum(token != self.model.token(key, at) for at, token in enumerate(self.received[key], start=2))


def simulate(settings: Settings, loop_type: type[VerifyLoop] = VerifyLoop) -> VirtualFigures:
    """One run, from virtual time 0 on."""

    async def main() -> VirtualFigures:
        return await VirtualSimulation(settings, loop_type).measure()

    return virtual_time.run(main())
