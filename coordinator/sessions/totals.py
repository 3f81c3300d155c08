"""Counters of a coordinator since it started."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.coordinator.metrics.counts import ServingCounts
from outrider.coordinator.sessions.messages import Outcome, RoundResults
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.sessions.source_counts import SourceTally
from outrider.coordinator.workers.draft_demand import DraftDemand

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
    sources: SourceTally = field(default_factory=SourceTally)
    demand: DraftDemand = field(default_factory=DraftDemand)
    serving: ServingCounts = field(default_factory=ServingCounts)

    def note_round(self, results: RoundResults, taken: Taken, now_ns: int) -> None:
        """Count a round."""
        # What no round has brought about has no time.
        self.steps += results.report.step_ns > 0
        self.verify_steps += len(taken)
        for _, outcome, _ in taken:
            self.emitted_tokens += len(outcome.token_ids)
            self.drafted_tokens += outcome.selected
            self.accepted_tokens += outcome.accepted
            self.sources.note_round(outcome)
        self.demand.note_round(results, taken)
        self.serving.note_round(results, taken, now_ns)
