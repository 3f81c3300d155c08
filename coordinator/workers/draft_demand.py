"""Counters that tell how many draft workers are worth having: ends of rounds, their cost, and what drafts grow.

A round of a session is one verification of it. It ends

    covered   its last token was a node of the tree, verified or not: the draft is ahead
    missed    nodes stood in the place of its last token, and it is none of them: the draft was wrong
    starved   nothing stood there yet: the draft was behind

as the target tells it.

Nothing is averaged here: everything counts up from the coordinator's start, so that any number of readers may take the
differences over windows of their own. docs/autoscaling.md has the formula that is made of them.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from outrider.coordinator.sessions.messages import RoundResults
from outrider.sampling import SpeculationMode
from outrider.v1 import generation_pb2, target_pb2

if TYPE_CHECKING:
    from outrider.coordinator.sessions.totals import Taken

_ASYNC = SpeculationMode.ASYNC


@dataclass(kw_only=True)
class DraftDemand:
    """Counters since start; field names are those of the message, without `_total`.

    Attributes:
        rounds: verifications of `async` sessions that have a draft.
        tokens: that these emitted.
        target_ns: of all targets' rounds.
        plain_ns: what they would have taken without nodes, by what the targets have learned of their rounds.
        draft_steps: steps of drafts' models for `async` sessions; one that serves sessions of two coordinators counts
            at both, as do steps that travel together.
        draft_ns: what these steps took.
        grown_sessions: sessions in these steps.
        expanded_nodes: nodes in these steps that got children.
    """

    rounds: int = 0
    tokens: int = 0
    missed_rounds: int = 0
    starved_rounds: int = 0
    target_ns: int = 0
    plain_ns: int = 0
    draft_steps: int = 0
    draft_ns: float = 0.0
    grown_sessions: int = 0
    expanded_nodes: int = 0

    def note_growth(self, step_ns: float, *, steps: int, sessions: int, expanded: int) -> None:
        """Count steps of a draft's model.

        Args:
            step_ns: mean time of a step.
            sessions: sum over the steps of the `async` sessions that grew in each.
            expanded: nodes of them that got children.
        """
        if sessions:
            self.draft_steps += steps
            self.draft_ns += steps * step_ns
            self.grown_sessions += sessions
            self.expanded_nodes += expanded

    def note_round(self, results: RoundResults, taken: "Taken") -> None:
        """One round of a target."""
        self.target_ns += results.report.step_ns
        self.plain_ns += results.report.plain_ns
        drafted = [outcome for session, outcome, _ in taken if session.draft_epochs and session.mode is _ASYNC]
        self.rounds += len(drafted)
        self.tokens += sum(len(outcome.token_ids) for outcome in drafted)
        ends = [outcome.tree_end for outcome in drafted]
        self.missed_rounds += ends.count(target_pb2.TREE_END_MISSED)
        self.starved_rounds += ends.count(target_pb2.TREE_END_STARVED)

    def message(self, *, sessions: int, undrafted_sessions: int) -> generation_pb2.DraftDemand:
        """The counters now."""
        totals = {f"{field.name}_total": int(getattr(self, field.name)) for field in fields(self)}
        return generation_pb2.DraftDemand(sessions=sessions, undrafted_sessions=undrafted_sessions, **totals)
