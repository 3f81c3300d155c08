"""What is simulated, as plain data that both processes get."""

import math
from dataclasses import dataclass

from outrider.coordinator.config import CoordinatorConfig, RoundTiming
from outrider.coordinator.messages import SpeculationMode
from outrider.v1 import registry_pb2

MAX_SESSIONS, MAX_WORKERS = 1000, 64
COLLECTORS = ("serving", "on", "frozen", "off")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One simulated run.

    Attributes:
        sessions: that run at a time, from the beginning to the end.
        workers: draft workers.
        targets: target workers.
        prompt_steps: steps of its target that a session's prompt takes, one session's behind the other's; until then it
            is deferred (in virtual time only).
        prompt_rows: rows of such a step beside the others'.
        mode: of every session.
        target_step_ms: a target's step without rows.
        target_row_us: each row of it (tree nodes and roots).
        target_session_us: each session of it.
        target_stair_rows: rows are charged in multiples of this.
        target_jitter: a target's step takes longer or shorter by up to this share, by chance (in virtual time only).
        draft_step_ms: a draft's step, whatever its rows.
        draft_width: nodes that one draft step expands, over all sessions.
        draft_rtt_ms: round trip to a draft beside that of loopback, half of it each way.
        target_rtt_ms: the same to a target.
        pause_ms: what some batches are late by on their way to a target (in virtual time only).
        pause_share: of the batches, those.
        rank_rates: chance that the draft's r-th child is what the target chooses, given that their parent is.
        spread: half of the positions have a first rate higher by this, the other half a lower one; the draft knows.
        duration_s: of the measurement; without effect where `tokens` is given.
        warmup_s: before it, not measured.
        tokens: of each session, after which it ends; 0 is no limit.
        drafts_per_session: drafts that grow one session's tree.
        draft_kinship: share of the positions at which all drafts guess alike; at the others each has luck of its own.
            1 is one model, 0 are models that err independently of each other (in virtual time only).
        seed: of what is emitted and of which children are right.
        max_nodes: most nodes of a session in one step.
        max_depth: deepest node.
        max_live_nodes: most nodes that a draft holds for a session.
        max_step_rows: most rows of a target's step.
        wait_cap_ms: longest that a free target waits for growth.
        ahead: batches may be sent before the step before them has ended.
        rounds: how rounds are timed, as in `CoordinatorConfig`.
        collector: Python's garbage collector in the coordinator: "serving" as a coordinator has it, "on" as Python has
            it, "frozen" with what exists before the first session left out of it, "off".

    Raises:
        ValueError: a value out of range, with the value.
    """

    sessions: int = 16
    workers: int = 1
    targets: int = 1
    prompt_steps: int = 0
    prompt_rows: int = 256
    mode: SpeculationMode = SpeculationMode.ASYNC
    target_step_ms: float = 8.0
    target_row_us: float = 10.0
    target_session_us: float = 0.0
    target_stair_rows: int = 1
    target_jitter: float = 0.0
    draft_step_ms: float = 0.75
    draft_width: int = 64
    draft_rtt_ms: float = 0.0
    target_rtt_ms: float = 0.0
    pause_ms: float = 0.0
    pause_share: float = 0.0
    rank_rates: tuple[float, ...] = (0.7, 0.12, 0.05, 0.03)
    spread: float = 0.2
    duration_s: float = 5.0
    warmup_s: float = 1.0
    tokens: int = 0
    drafts_per_session: int = 1
    draft_kinship: float = 1.0
    seed: int = 0
    max_nodes: int = 24
    max_depth: int = 8
    max_live_nodes: int = 128
    max_step_rows: int = 4096
    wait_cap_ms: float = 20.0
    ahead: bool = True
    rounds: RoundTiming = "learned"
    collector: str = "serving"

    def __post_init__(self) -> None:
        for name, most in (("sessions", MAX_SESSIONS), ("workers", MAX_WORKERS), ("targets", MAX_WORKERS)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: {getattr(self, name)} given, 1 to {most} needed")
        for name in (
            "target_stair_rows",
            "draft_width",
            "drafts_per_session",
            "max_nodes",
            "max_depth",
            "max_live_nodes",
            "max_step_rows",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 needed")
        for name in ("target_step_ms", "draft_step_ms", "duration_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} given, more than 0 needed")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} given, 0 or more needed")
        if not 0 <= self.draft_kinship <= 1:
            raise ValueError(f"draft_kinship: {self.draft_kinship} given, 0 to 1 needed")
        if self.collector not in COLLECTORS:
            raise ValueError(f"collector: {self.collector!r} given, one of {', '.join(COLLECTORS)} needed")
        if not self.rank_rates or min(self.rank_rates) < 0 or sum(self.rank_rates) > 1 + 1e-9:
            raise ValueError(f"rank_rates: {self.rank_rates} given, shares with a sum of at most 1 needed")
        if not self.spread <= self.rank_rates[0] <= 1 - self.spread + 1e-9:
            raise ValueError(
                f"spread: {self.spread} given, the first rate {self.rank_rates[0]} leaves less to both sides"
            )

    def target_step_ns(self, *, rows: int, sessions: int) -> int:
        """T(rows, sessions), the time of one step of a target."""
        stairs = math.ceil(rows / self.target_stair_rows) * self.target_stair_rows
        return round(
            self.target_step_ms * 1e6 + (self.target_row_us * stairs + self.target_session_us * sessions) * 1e3
        )

    def coordinator_config(self) -> CoordinatorConfig:
        """How the coordinator is set up."""
        return CoordinatorConfig(
            max_running_sessions=self.sessions,
            max_queue=self.sessions,
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            drafts_per_session=self.drafts_per_session,
            max_live_nodes=max(self.max_live_nodes, self.max_nodes),
            verify_wait_cap_ms=self.wait_cap_ms,
            ahead=self.ahead,
            rounds=self.rounds,
        )

    def worker_limits(self) -> registry_pb2.WorkerLimits:
        """What each worker says that it takes."""
        return registry_pb2.WorkerLimits(
            max_sessions=self.sessions, max_tree_nodes=self.max_nodes, max_step_tokens=self.max_step_rows
        )


_NOT_NEGATIVE = (
    "prompt_steps",
    "prompt_rows",
    "target_jitter",
    "target_row_us",
    "target_session_us",
    "draft_rtt_ms",
    "target_rtt_ms",
    "pause_ms",
    "pause_share",
    "spread",
    "warmup_s",
    "tokens",
    "wait_cap_ms",
)
