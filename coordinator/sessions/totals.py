"""Counters of a coordinator since it started: what its status says, and what its metrics are made of.

A round costs one addition a session and a few more a batch; nothing is formatted, and no clock is read that would not
have been read anyway. `families.py` makes of it what Prometheus reads.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from outrider.coordinator.sessions.messages import Outcome, RoundResults, SpeculationCounts
from outrider.coordinator.workers.draft_demand import DraftDemand
from outrider.drafting.growth_source import NUM_SOURCES, GrowthSource, to_proto
from outrider.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PoisonRequest,
    Superseded,
    Unauthenticated,
    WorkerUnavailable,
)
from outrider.metrics.histogram import Histogram, request_seconds, step_seconds, token_seconds
from outrider.v1 import generation_pb2

if TYPE_CHECKING:
    from outrider.coordinator.sessions.generation import Generation
    from outrider.coordinator.sessions.session import Session

Taken = Sequence[tuple["Session", Outcome, int]]
"""Sessions that a round has given tokens, what of these counts, and when they had their last tokens before."""

# The first that fits counts: PoisonRequest may be one of the others, too.
_REASONS: tuple[tuple[type[OutriderError], str], ...] = (
    (PoisonRequest, "poison"),
    (Overloaded, "overloaded"),
    (InvalidRequest, "invalid"),
    (Unauthenticated, "unauthenticated"),
    (Forbidden, "forbidden"),
    (WorkerUnavailable, "unavailable"),
    (InternalError, "internal"),
)
_ALL_REASONS = (*(reason for _, reason in _REASONS), "other")


class SourceTally:
    """Nodes of each source, grown, verified and accepted, of one choice or of a whole server."""

    __slots__ = ("_accepted", "_grown", "_submitted")

    def __init__(self) -> None:
        self._grown, self._submitted = ([0] * NUM_SOURCES for _ in range(2))
        # By bit set, since that is how nodes come: which sources have proposed them.
        self._accepted = Counter[int]()

    def __add__(self, other: Self) -> Self:
        total = type(self)()
        total._grown = _sums(self._grown, other._grown)
        total._submitted = _sums(self._submitted, other._submitted)
        total._accepted = self._accepted + other._accepted
        return total

    def note_growth(self, source: GrowthSource, nodes: int) -> None:
        """Count nodes received from a source."""
        self._grown[source - 1] += nodes

    def note_round(self, outcome: Outcome) -> None:
        """Count the nodes of a round that were verified, those that were accepted, and what has grown at the target."""
        if any(outcome.grown_by_source):
            self._grown = _sums(self._grown, outcome.grown_by_source)
        if outcome.selected:
            self._submitted, accepted = _sums(self._submitted, outcome.selected_by_source), self._accepted
            for sources in outcome.sources:
                accepted[sources] += 1

    def counts(self) -> list[generation_pb2.SourceStats]:
        """Return statistics by source; a node of several sources counts for each."""
        accepted = {
            source: sum(count for sources, count in self._accepted.items() if sources >> source & 1)
            for source in GrowthSource
        }
        return [
            generation_pb2.SourceStats(
                source=to_proto(source),
                drafted_tokens=grown,
                submitted_tokens=submitted,
                accepted_tokens=accepted[source],
            )
            for source, grown, submitted in zip(GrowthSource, self._grown, self._submitted, strict=True)
            if grown or accepted[source]
        ]


def _sums(own: Sequence[int], more: Sequence[int]) -> list[int]:
    return list(map(operator.add, own, more))


@dataclass(kw_only=True)
class Totals:
    """Counters since start; times in nanoseconds.

    Attributes:
        accepted_depths: draft tokens accepted of a tree, to how many trees had so many: position p of vLLM's metric is
            the sum of all that are above p.
        bare_undrafted: rounds of sessions that speculate, without a node since no draft grows for them.
        bare_drafted: the same, although a draft does: nothing had come, or none of it was worth its row.
        grown_nodes: that drafts have sent.
        failovers: choices that went on at another target, or have to.
        reopened: choices that a worker lost, and that were opened anew.
        lost_workers: by role, whatever was no orderly end.
        quarantines: pauses that workers got, by role.
        refused: requests that never began, by reason.
        finished: choices that ended, by reason.
    """

    requests: int = 0
    emitted_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    dropped_nodes: int = 0
    steps: int = 0
    sources: SourceTally = field(default_factory=SourceTally)
    demand: DraftDemand = field(default_factory=DraftDemand)
    accepted_depths: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    bare_undrafted: int = 0
    bare_drafted: int = 0
    grown_nodes: int = 0
    failovers: int = 0
    reopened: int = 0
    lost_workers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("draft", "target"), 0))
    quarantines: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("draft", "target"), 0))
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ALL_REASONS, 0))
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue: Histogram = field(default_factory=request_seconds)
    prefill: Histogram = field(default_factory=request_seconds)
    decode: Histogram = field(default_factory=request_seconds)
    first_token: Histogram = field(default_factory=request_seconds)
    whole: Histogram = field(default_factory=request_seconds)
    per_token: Histogram = field(default_factory=token_seconds)
    between_tokens: Histogram = field(default_factory=token_seconds)
    step: Histogram = field(default_factory=step_seconds)
    forward: Histogram = field(default_factory=step_seconds)

    @property
    def speculation(self) -> SpeculationCounts:
        """Counts over all requests since the start."""
        return SpeculationCounts(
            verify_steps=self.verify_steps,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            sources=self.sources.counts(),
        )

    def note_round(self, results: RoundResults, taken: Taken, now_ns: int) -> None:
        """One round of a target."""
        # What no round has brought about has no time.
        self.steps += results.report.step_ns > 0
        self.verify_steps += len(taken)
        self.demand.note_round(results, taken)
        self.step.observe(results.report.step_ns)
        self.forward.observe(results.report.forward_ns)
        # Most sessions of a round had their last tokens at one time.
        before = Counter(since_ns for session, _, since_ns in taken if session.verify_steps > 1)
        for since_ns, sessions in before.items():
            self.between_tokens.observe(now_ns - since_ns, sessions)
        for session, outcome, _ in taken:
            self.emitted_tokens += len(outcome.token_ids)
            self.drafted_tokens += outcome.selected
            self.accepted_tokens += outcome.accepted
            self.sources.note_round(outcome)
            if outcome.selected:
                self.accepted_depths[outcome.accepted] += 1
            elif session.may_speculate:
                self.bare_drafted += bool(session.draft_epochs)
                self.bare_undrafted += not session.draft_epochs

    def note_refusal(self, error: OutriderError) -> None:
        """Count a request that was refused before it began; every API calls it."""
        reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "other")
        self.refused[reason] += 1

    def note_end(self, generation: "Generation") -> None:
        """Count a request that has ended, however it did."""
        times, error = generation.times, generation.error
        for session in generation.sessions:
            if session.result is not None:
                self.finished[session.result.finish_reason.value] += 1
            elif error is None or isinstance(error, Superseded):
                self.finished["abort"] += 1
            else:
                self.finished["error"] += 1
        self.prompt_tokens += len(generation.request.prompt_token_ids)
        self.cached_tokens += min((session.cached_tokens or 0 for session in generation.sessions), default=0)
        if times.admitted_ns:
            self.queue.observe(times.admitted_ns - times.arrived_ns)
        if times.first_token_ns:
            self.first_token.observe(times.first_token_ns - times.arrived_ns)
            self.prefill.observe(times.first_token_ns - times.admitted_ns)
        if times.finished_ns:
            self.whole.observe(times.finished_ns - times.arrived_ns)
            if times.first_token_ns:
                self._note_decoding(generation, times.finished_ns - times.first_token_ns)

    def _note_decoding(self, generation: "Generation", lasted_ns: int) -> None:
        self.decode.observe(lasted_ns)
        tokens = sum(session.output_length for session in generation.sessions) / len(generation.sessions)
        if tokens > 1:
            self.per_token.observe(round(lasted_ns / (tokens - 1)))
