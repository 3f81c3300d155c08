"""What a phase of load was like, in numbers."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.overload_bench.load import Request

from outrider.v1 import generation_pb2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The coordinator at one moment: its memory, its queue, and how long it took to say so."""

    at_s: float
    rss_mb: float
    waiting: int
    running: int
    answer_ms: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """p50, p99 and the most, in milliseconds."""

    p50: float
    p99: float
    most: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f} / {self.most:.1f}"


def spread_ms(seconds: Sequence[float]) -> Spread:
    """Of times in seconds; NaN where there are none."""
    if not seconds:
        return Spread(p50=float("nan"), p99=float("nan"), most=float("nan"))
    ranked = sorted(seconds)
    p50, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.99))
    return Spread(p50=p50 * 1e3, p99=p99 * 1e3, most=ranked[-1] * 1e3)


@dataclass(kw_only=True)
class Phase:
    """One phase.

    Attributes:
        load: times capacity; 0 for the closed loops.
        refusal, ttft, tpot, latency: of refused and of accepted requests, from the moment when they were to be sent.
        served_refusal: of refused requests from the moment when they were sent: what the service took.
        stolen_s: processor time that this machine was not given by its own host, over all cores; NaN if not known.
        with_retry_info: of the refused, how many were told when to come back.
        retry_after_s: least and most that they were told.
        others: statuses beside OK and refusals, with their number.
        nodes_per_step: tree nodes that a session sent at a verification.
        client_lag: of this process's event loop.
    """

    name: str
    load: float
    seconds: float
    requests: int
    accepted: int
    refused: int
    with_retry_info: int
    retry_after_s: tuple[float, float]
    others: dict[str, int]
    tokens_per_s: float
    refusal: Spread
    served_refusal: Spread
    ttft: Spread
    tpot: Spread
    latency: Spread
    nodes_per_step: float
    acceptance_length: float
    client_lag: Spread
    stolen_s: float
    samples: list[Sample] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def phase_of(
    name: str,
    load: float,
    requests: Sequence[Request],
    *,
    seconds: float,
    before: generation_pb2.ServerInfo,
    after: generation_pb2.ServerInfo,
    late_s: Sequence[float],
    stolen_s: float = float("nan"),
    samples: Sequence[Sample],
) -> Phase:
    """The figures of what was sent between two looks at the server."""
    accepted = [request for request in requests if request.is_accepted]
    refused = [request for request in requests if request.is_refused]
    told = [request.retry_after_s for request in refused if request.retry_after_s is not None]
    others: dict[str, int] = {}
    for request in requests:
        if not request.is_accepted and not request.is_refused:
            others[request.status] = others.get(request.status, 0) + 1
    steps = after.speculation.verify_steps - before.speculation.verify_steps
    drafted = after.speculation.spec_draft_tokens - before.speculation.spec_draft_tokens
    right = after.speculation.spec_accepted_tokens - before.speculation.spec_accepted_tokens
    return Phase(
        name=name,
        load=load,
        seconds=seconds,
        requests=len(requests),
        accepted=len(accepted),
        refused=len(refused),
        with_retry_info=len(told),
        retry_after_s=(min(told, default=0.0), max(told, default=0.0)),
        others=others,
        tokens_per_s=(after.emitted_tokens_total - before.emitted_tokens_total) / seconds,
        refusal=spread_ms([request.ended - request.due for request in refused]),
        served_refusal=spread_ms([request.ended - request.sent for request in refused]),
        ttft=spread_ms([request.first_token - request.due for request in accepted]),
        tpot=spread_ms(
            [(r.ended - r.first_token) / (r.tokens - 1) for r in accepted if r.tokens > 1],
        ),
        latency=spread_ms([request.ended - request.due for request in accepted]),
        nodes_per_step=drafted / max(steps, 1),
        acceptance_length=1 + right / max(steps, 1),
        client_lag=spread_ms(late_s),
        stolen_s=stolen_s,
        samples=list(samples),
    )


def table(phases: Sequence[Phase]) -> str:
    """Lines for people; times are p50 / p99 / most in milliseconds."""
    lines = [
        f"{'phase':<10} {'load':>5} {'requests':>8} {'served':>7} {'refused':>7} {'told':>6} {'tok/s':>7} "
        f"{'refusal':>22} {'first token':>26} {'per token':>22} {'latency':>26} {'nodes':>6} {'queue':>6} {'lag':>20}"
    ]
    for phase in phases:
        queue = max((sample.waiting for sample in phase.samples), default=0)
        lines.append(
            f"{phase.name:<10} {phase.load:>5.2g} {phase.requests:>8} {phase.accepted:>7} {phase.refused:>7} "
            f"{phase.with_retry_info:>6} {phase.tokens_per_s:>7.0f} {phase.refusal!s:>22} {phase.ttft!s:>26} "
            f"{phase.tpot!s:>22} {phase.latency!s:>26} {phase.nodes_per_step:>6.2f} {queue:>6} {phase.client_lag!s:>20}"
        )
        if phase.refused and not math.isnan(phase.stolen_s):
            lines.append(
                f"           refusals from when they were sent: {phase.served_refusal!s} ms; "
                f"processor time taken from this machine: {phase.stolen_s:.2f} s in {phase.seconds:.0f} s"
            )
        if phase.others:
            lines.append(f"           others: {phase.others}")
    return "\n".join(lines)


def verdicts(normal: Phase, overload: Phase) -> list[str]:
    """Return what was asked for, and whether it came true."""

    def line(holds: bool, text: str) -> str:
        return f"{'holds' if holds else 'MISSED'}: {text}"

    settled = [sample.rss_mb for sample in overload.samples[len(overload.samples) // 6 :]]
    growth = settled[-1] / settled[0] - 1 if settled else float("nan")
    found = [
        line(
            overload.refused > 0 and overload.refusal.p99 <= _REFUSAL_MS,
            f"{overload.refused} refused, p99 {overload.refusal.p99:.1f} ms, most {overload.refusal.most:.1f} ms "
            f"(asked: {_REFUSAL_MS:g} ms)",
        ),
        line(abs(growth) <= _MEMORY_SHARE, f"the coordinator's memory: {growth:+.1%} over the last five sixths"),
    ]
    found.append(
        line(
            overload.with_retry_info == overload.refused and not overload.others,
            f"{overload.with_retry_info} of {overload.refused} refusals have RetryInfo, of "
            f"{overload.retry_after_s[0]:.1f} to {overload.retry_after_s[1]:.1f} s; others: {overload.others}",
        )
    )
    for name in ("ttft", "tpot", "latency"):
        usual, now = getattr(normal, name).p99, getattr(overload, name).p99
        found.append(
            line(now <= 2 * usual, f"p99 of {name}: {now:.1f} ms, {usual:.1f} ms at normal, {now / usual:.2f} times")
        )
    found.append(
        line(
            overload.nodes_per_step <= normal.nodes_per_step,
            f"speculation: {overload.nodes_per_step:.2f} nodes a verification, {normal.nodes_per_step:.2f} at normal",
        )
    )
    return found


_REFUSAL_MS = 50.0
_MEMORY_SHARE = 0.05
