"""What a coordinator has counted since it started."""

from dataclasses import dataclass, field

from outrider.coordinator.commits import Committed
from outrider.coordinator.draft_demand import DraftDemand
from outrider.coordinator.metrics_counts import ServingCounts


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
    demand: DraftDemand = field(default_factory=DraftDemand)
    serving: ServingCounts = field(default_factory=ServingCounts)

    def note_nodes(self, committed: Committed) -> None:
        """Counts what was verified, with the commit: so are the sources, and a model's share is what they leave."""
        self.drafted_tokens += int(committed.nodes.sum())
        self.accepted_tokens += int(committed.accepted.sum())

    def note_round(self, committed: Committed) -> int:
        """Counts the rest of a step's result; returns the tokens that were emitted."""
        emitted = int(committed.emitted.sum())
        self.verify_steps += len(committed.sessions)
        self.emitted_tokens += emitted
        self.steps += 1
        self.serving.note_round(committed)
        return emitted
