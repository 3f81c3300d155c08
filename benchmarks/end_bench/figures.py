"""Figures of cells, from rounds and answers.

    exposed     of a round, the time between two results less the target's own step: what is not hidden behind it
    busy        the target's steps as a share of the time
    device      the model's forwards, by the device's own clock, as a share of the time

A step is the target's own account of itself (`StepReport`). Rounds come from the traces of a few sessions; two results
count as a round where their messages follow each other on the target's stream and a traced request was there from the
first to the second, so that a session's idling between two requests is nobody's exposed time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.end_bench.cells import Cell
from benchmarks.end_bench.driving import Driven, Round
from benchmarks.end_bench.prompts import CategoryFigures, by_category

from outrider.v1 import common_pb2, generation_pb2, registry_pb2

_MS, _S = 1e6, 1e9


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """Figures of the rounds of one target; medians but for the shares.

    Attributes:
        rounds: that were seen.
        round_ms: from result to result.
        step_ms: of it, the target's own step.
        device_ms: of that, the device's.
        exposed_ms: of round_ms, what is not step_ms.
        exposed_mean_ms: the same, its mean.
        busy, device: shares of the time.
    """

    rounds: int
    round_ms: float
    step_ms: float
    device_ms: float
    exposed_ms: float
    exposed_mean_ms: float
    busy: float
    device: float

    @classmethod
    def of(cls, requests: Iterable[Sequence[Round]], *, begin_s: float, end_s: float) -> RoundFigures | None:
        """Return the figures of rounds whose results came in between; None if there are none."""
        by_step: dict[int, Round] = {}
        joined: set[int] = set()
        for rounds in requests:
            inside = [one for one in rounds if begin_s * _S <= one.result_ns < end_s * _S]
            by_step |= {one.step: one for one in inside}
            if inside:
                joined.update(range(inside[0].step, inside[-1].step))
        pairs = [(by_step[step], by_step[step + 1]) for step in joined if step in by_step and step + 1 in by_step]
        if not pairs:
            return None
        spans = [later.result_ns - earlier.result_ns for earlier, later in pairs]
        exposed = [span - later.step_ns for span, (_, later) in zip(spans, pairs, strict=True)]
        total = sum(spans)
        return cls(
            rounds=len(pairs),
            round_ms=statistics.median(spans) / _MS,
            step_ms=statistics.median(later.step_ns for _, later in pairs) / _MS,
            device_ms=statistics.median(later.forward_ns for _, later in pairs) / _MS,
            exposed_ms=statistics.median(exposed) / _MS,
            exposed_mean_ms=statistics.fmean(exposed) / _MS,
            busy=sum(later.step_ns for _, later in pairs) / total,
            device=sum(later.forward_ns for _, later in pairs) / total,
        )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums of the counters of a setup's coordinators since they began.

    Attributes:
        verified: verifications of a session.
        nodes: verified in them.
        accepted: of these.
        steps: of targets; one with sessions of two coordinators counts twice.
        cpu_s: that the coordinators' processes have computed.
        workers: as the first of them knows them; they serve all.
    """

    verified: int
    nodes: int
    accepted: int
    steps: int
    cpu_s: float
    workers: Sequence[generation_pb2.WorkerStatus]

    @classmethod
    def of(cls, infos: Sequence[generation_pb2.ServerInfo], *, cpu_s: float) -> Totals:
        """From what each of them says, and their CPU time."""
        return cls(
            verified=sum(info.speculation.verify_steps for info in infos),
            nodes=sum(info.speculation.spec_draft_tokens for info in infos),
            accepted=sum(info.speculation.spec_accepted_tokens for info in infos),
            steps=sum(info.steps_total for info in infos),
            cpu_s=cpu_s,
            workers=infos[0].workers,
        )


@dataclass(frozen=True, kw_only=True)
class CellFigures:
    """One cell.

    Attributes:
        cell: what was measured.
        seconds: how long.
        requests: that ended meanwhile.
        tokens_per_s: that clients received.
        tokens_per_s_per_gpu: by the GPUs that served.
        tpot_ms, ttft_ms: medians over the requests that ended; None where none did.
        acceptance_length: emitted by a verification of a session.
        nodes: verified in one.
        sessions_per_step: of one coordinator in a step of a target.
        draft_steps_per_s: of the drafts, as they last reported them: to within a heartbeat.
        target_busy: share of the time that each target spent in steps by its last heartbeat's account.
        draft_busy: likewise each draft.
        coordinator_busy: cores that the coordinators' processes took, summed; 0 where the system does not tell.
        rounds: None where no two rounds were seen.
        categories: of the requests that ended.
    """

    cell: Cell
    seconds: float
    requests: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tpot_ms: float | None
    ttft_ms: float | None
    acceptance_length: float
    nodes: float
    sessions_per_step: float
    draft_steps_per_s: float
    target_busy: tuple[float, ...]
    draft_busy: tuple[float, ...]
    coordinator_busy: float
    rounds: RoundFigures | None
    categories: Sequence[CategoryFigures]

    @classmethod
    def of(
        cls,
        cell: Cell,
        driven: Sequence[Driven],
        before: Totals,
        after: Totals,
        *,
        begin_s: float,
        end_s: float,
    ) -> CellFigures:
        """From what the clients saw, and the coordinators' totals at begin and end."""
        seconds = end_s - begin_s
        tokens = sum(one.tokens for one in driven)
        tpot, ttft = ([value for one in driven for value in getattr(one, name)] for name in ("tpot_ms", "ttft_ms"))
        verified = after.verified - before.verified
        requests = [request for one in driven for request in one.requests]
        return cls(
            cell=cell,
            seconds=seconds,
            requests=len(tpot),
            tokens_per_s=tokens / seconds,
            tokens_per_s_per_gpu=tokens / seconds / cell.gpus,
            tpot_ms=statistics.median(tpot) if tpot else None,
            ttft_ms=statistics.median(ttft) if ttft else None,
            acceptance_length=1 + (after.accepted - before.accepted) / max(verified, 1),
            nodes=(after.nodes - before.nodes) / max(verified, 1),
            sessions_per_step=verified / max(after.steps - before.steps, 1),
            draft_steps_per_s=(_draft_steps(after) - _draft_steps(before)) / seconds,
            target_busy=_busy(after, registry_pb2.WORKER_ROLE_TARGET),
            draft_busy=_busy(after, registry_pb2.WORKER_ROLE_DRAFT),
            coordinator_busy=(after.cpu_s - before.cpu_s) / seconds,
            rounds=RoundFigures.of(requests, begin_s=begin_s, end_s=end_s),
            categories=by_category(answer for one in driven for answer in one.answers),
        )


def _busy(totals: Totals, role: registry_pb2.WorkerRole) -> tuple[float, ...]:
    return tuple(load.busy for load in _loads(totals, role))


def _draft_steps(totals: Totals) -> int:
    return sum(load.steps for load in _loads(totals, registry_pb2.WORKER_ROLE_DRAFT))


def _loads(totals: Totals, role: registry_pb2.WorkerRole) -> list[common_pb2.WorkerLoad]:
    return [worker.load for worker in totals.workers if worker.introduction.role == role]


def speedups(cells: Sequence[CellFigures]) -> list[float | None]:
    """Tokens per second of each, relative to `off` with one target at the same load."""
    plain: dict[tuple[int, int, float], float] = {}
    for one in cells:
        if one.cell.mode == "off" and one.cell.setup.targets == 1:
            # The first is that of the setup that others are compared with.
            plain.setdefault(_compared_by(one.cell), one.tokens_per_s)
    rates = [plain.get(_compared_by(one.cell)) for one in cells]
    return [one.tokens_per_s / rate if rate else None for one, rate in zip(cells, rates, strict=True)]


def _compared_by(cell: Cell) -> tuple[int, int, float]:
    return cell.coordinators, cell.sessions, cell.temperature


def as_dicts(cells: Sequence[CellFigures], *, scale_to: float | None = None) -> list[dict[str, Any]]:
    """Return flat dicts for JSON, each with its speed-up.

    Args:
        cells: that were measured.
        scale_to: an acceptance length: times per token are told as if it had been that, the rounds as they were.
    """
    found = []
    for one, speedup in zip(cells, speedups(cells), strict=True):
        figures = asdict(one)
        cell, rounds, _ = (figures.pop(name) for name in ("cell", "rounds", "categories"))
        more: dict[str, Any] = {"gpus": one.cell.gpus, "speedup": speedup}
        if scale_to is not None and one.cell.mode != "off" and one.tpot_ms is not None:
            more["scaled_tpot_ms"] = one.tpot_ms * one.acceptance_length / scale_to
        cell["setup"] = one.cell.setup.name
        found.append(cell | figures | more | (rounds or {"rounds": 0}))
    return found


def categories_as_dicts(cells: Sequence[CellFigures]) -> list[dict[str, Any]]:
    """Return rows for JSON, one for each category of each cell."""
    return [
        {
            "setup": one.cell.setup.name,
            "mode": one.cell.mode,
            "temperature": one.cell.temperature,
            "sessions": one.cell.sessions,
            "coordinators": one.cell.coordinators,
            **asdict(category),
        }
        for one in cells
        for category in one.categories
    ]
