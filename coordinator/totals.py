"""What a coordinator has counted since it started."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.coordinator.draft_demand import DraftDemand
from outrider.coordinator.messages import Outcome, RoundResults, SourceCounts
from outrider.coordinator.metrics_counts import ServingCounts
from outrider.coordinator.session import Session
from outrider.coordinator.source_counts import source_counts
from outrider.growth_source import GrowthSource

Taken = Sequence[tuple[Session, Outcome, int]]
"""Sessions that a round has given tokens, what of these counts, and when they had their last tokens before."""


@dataclass(kw_only=True)
class Totals:
    """Counters since start."""

    requests: int = 0
    emitted_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    dropped_nodes: int = 0
    steps: int = 0
    grown: dict[GrowthSource, int] = field(default_factory=lambda: dict.fromkeys(GrowthSource, 0))
    submitted: dict[GrowthSource, int] = field(default_factory=lambda: dict.fromkeys(GrowthSource, 0))
    accepted: dict[GrowthSource, int] = field(default_factory=lambda: dict.fromkeys(GrowthSource, 0))
    demand: DraftDemand = field(default_factory=DraftDemand)
    serving: ServingCounts = field(default_factory=ServingCounts)

    def note_round(self, results: RoundResults, taken: Taken, now_ns: int) -> None:
        """Count a round."""
        self.steps += 1
        self.verify_steps += len(taken)
        for session, outcome, _ in taken:
            self.emitted_tokens += len(outcome.token_ids)
            self.drafted_tokens += outcome.selected
            self.accepted_tokens += outcome.accepted
            if (only := session.only_source) is not None:
                self.submitted[only] += outcome.selected
            for sources in outcome.sources:
                for source in GrowthSource:
                    self.accepted[source] += sources >> source & 1
        self.demand.note_round(results.step_ns, taken)
        self.serving.note_round(results, taken, now_ns)

    def source_counts(self) -> list[SourceCounts]:
        """What each source of growth has grown, and what became of it."""
        return source_counts(self.grown, self.submitted, self.accepted)
