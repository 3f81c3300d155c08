"""Two sources of growth beside each other on virtual time: a model, whose estimates are right, and one with its own.

The second grows every session's tree too, with luck of its own: `rates` is the chance that its r-th child is right,
`claims` what it says of it. The real scheduler, loops and mirrors decide what is submitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.simulation import virtual_time
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualFigures, VirtualSimulation, simulate
from benchmarks.simulation.virtual_workers import VirtualDraft
from rich.console import Console
from rich.table import Table

from outrider.coordinator.messages import GrowthBatch, SourceCounts
from outrider.growth_source import GrowthSource

SECOND = "second"


@dataclass(frozen=True, kw_only=True)
class SecondSource:
    """A source beside the model's.

    Attributes:
        rates: [k] chance of each rank of its children; the sum is at most 1.
        claims: [k] what it says of them.
        step_ms: of its steps.
    """

    rates: Sequence[float]
    claims: Sequence[float]
    step_ms: float = 0.1


class HybridSimulation(VirtualSimulation):
    """A model draft and a second source for every session."""

    def __init__(self, settings: Settings, second: SecondSource) -> None:
        super().__init__(settings)
        model = PathModel(seed=settings.seed, rank_rates=second.rates, spread=0.0, draft=1, kinship=0.0)
        draft = VirtualDraft(replace(settings, draft_step_ms=second.step_ms), model, on_growth=self._take)
        self._claims = np.array(second.claims)
        self.drafts.append(draft)
        limits = settings.worker_limits()
        self.scheduler.add_draft(SECOND, draft, limits, sources=[GrowthSource.NGRAM])  # pyright: ignore[reportArgumentType]

    def _take(self, growth: GrowthBatch) -> None:
        # Children of one node come together, best first.
        first = np.flatnonzero(np.diff(growth.parents, prepend=-1) != 0)
        ranks = np.arange(len(growth.parents)) - np.repeat(first, np.diff(first, append=len(growth.parents)))
        claimed = self._claims[np.minimum(ranks, len(self._claims) - 1)]
        sources = np.full(len(ranks), int(GrowthSource.NGRAM))
        self.scheduler.take_growth(SECOND, replace(growth, acceptance=claimed, sources=sources))


def simulate_hybrid(settings: Settings, second: SecondSource) -> tuple[VirtualFigures, list[SourceCounts]]:
    """One run, from virtual time 0 on, and what each source has grown in it."""

    async def main() -> tuple[VirtualFigures, list[SourceCounts]]:
        simulation = HybridSimulation(settings, second)
        figures = await simulation.measure()
        return figures, simulation.scheduler.source_counts()

    return virtual_time.run(main())


# What the second source's two children are worth, and what it says of them.
_SECONDS = {
    "right and says so": SecondSource(rates=(0.5, 0.1), claims=(0.5, 0.1)),
    "right, says less": SecondSource(rates=(0.5, 0.1), claims=(0.05, 0.01)),
    "half right, says more": SecondSource(rates=(0.5, 0.1), claims=(0.9, 0.5)),
    "wrong, boasts": SecondSource(rates=(0.05, 0.02), claims=(0.9, 0.5)),
    "wrong, is certain": SecondSource(rates=(0.02, 0.0), claims=(1.0, 1.0)),
    "wrong, says so": SecondSource(rates=(0.02, 0.02), claims=(0.02, 0.02)),
}
_SESSIONS = (1, 4, 16)


def run(arguments: Sequence[str]) -> int:
    """A table; the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/hybrid_sources.py",
        description="A model draft and a second source that rates itself as it likes: tokens/s by the model's alone.",
    )
    parser.add_argument("--duration", type=float, default=2.0, help="virtual seconds of each run (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    shown = Table(title="tokens per second of both, by the model's alone")
    for heading in ("second source", *(f"{sessions} sessions" for sessions in _SESSIONS), "its nodes sent", "accepted"):
        shown.add_column(heading, justify="right")
    settings = [
        Settings(sessions=sessions, duration_s=chosen.duration, warmup_s=0.5, seed=chosen.seed)
        for sessions in _SESSIONS
    ]
    alone = [simulate(own).tokens_per_s for own in settings]
    for name, second in _SECONDS.items():
        found = [simulate_hybrid(own, second) for own in settings]
        ratios = [figures.tokens_per_s / base for (figures, _), base in zip(found, alone, strict=True)]
        (own,) = (own for own in found[-1][1] if own.source is GrowthSource.NGRAM)
        counts = (f"{own.submitted / own.drafted:.0%}", f"{own.accepted / max(1, own.submitted):.0%}")
        shown.add_row(name, *(f"{ratio:.2f}" for ratio in ratios), *counts)
    Console().print(shown)
    return 0
