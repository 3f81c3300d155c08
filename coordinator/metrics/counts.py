"""What the coordinator counts for its metrics, beside what its own decisions need: whole numbers that are added up.

A round costs one addition a session and a few more a batch; nothing is formatted, and no clock is read that would not
have been read anyway. `metrics.py` makes of it what Prometheus reads.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from outrider.coordinator.sessions.generation import Generation
    from outrider.coordinator.sessions.messages import RoundResults
    from outrider.coordinator.sessions.totals import Taken

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
REASONS = (*(reason for _, reason in _REASONS), "other")
FINISHED = ("stop", "length", "abort", "error")


def _zeros(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


@dataclass(kw_only=True)
class ServingCounts:
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

    accepted_depths: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    bare_undrafted: int = 0
    bare_drafted: int = 0
    grown_nodes: int = 0
    failovers: int = 0
    reopened: int = 0
    lost_workers: dict[str, int] = field(default_factory=lambda: _zeros("draft", "target"))
    quarantines: dict[str, int] = field(default_factory=lambda: _zeros("draft", "target"))
    refused: dict[str, int] = field(default_factory=lambda: _zeros(*REASONS))
    finished: dict[str, int] = field(default_factory=lambda: _zeros(*FINISHED))
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

    def note_round(self, results: "RoundResults", taken: "Taken", now_ns: int) -> None:
        """One round of a target."""
        self.step.observe(results.report.step_ns)
        self.forward.observe(results.report.forward_ns)
        # Most sessions of a round had their last tokens at one time.
        before = Counter(since_ns for session, _, since_ns in taken if session.verify_steps > 1)
        for since_ns, sessions in before.items():
            self.between_tokens.observe(now_ns - since_ns, sessions)
        for session, outcome, _ in taken:
            if outcome.selected:
                self.accepted_depths[outcome.accepted] += 1
            elif session.may_speculate:
                self.bare_drafted += bool(session.draft_epochs)
                self.bare_undrafted += not session.draft_epochs

    def note_refusal(self, error: OutriderError) -> None:
        """A request was refused before it began; for every door to call."""
        reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "other")
        self.refused[reason] += 1

    def note_end(self, generation: "Generation") -> None:
        """A request has ended, in whatever way."""
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
