"""Tables on the terminal and JSON with the same content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.kernel_bench.case import Machine
from benchmarks.target_bench.models import BenchModel
from benchmarks.target_bench.points import Point, step_floor
from benchmarks.target_bench.serving import REQUEST_TOKENS, IdleResult, MixedResult, PrefillResult
from benchmarks.target_bench.steps import StepRow, first, ratio
from benchmarks.target_bench.trace import TraceResult
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Target:
    """At most so many milliseconds, or so many times the floor."""

    ms: float | None = None
    times_floor: float | None = None

    def is_met(self, ours_ms: float, floor_ms: float) -> bool:
        """By one measurement."""
        return ours_ms <= (self.ms if self.ms is not None else (self.times_floor or 0) * floor_ms)

    def __str__(self) -> str:
        return f"{self.ms} ms" if self.ms is not None else f"{self.times_floor} x floor"


# Of the 8B shape in bfloat16 on one H200.
STEP_TARGETS: Mapping[Point, Target] = {
    Point(1024, 1, 1): Target(ms=4.5),
    Point(1024, 1, 64): Target(ms=4.9),
    Point(2048, 32, 256): Target(times_floor=1.35),
}
_PARTS = ("idle", "prefill", "mixed", "trace")
IDLE_TARGET_MS, PREFILL_TARGET_SHARE, MIXED_TARGET_RATIO = 0.15, 0.5, 1.5


@dataclass(kw_only=True)
class Report:
    """Everything that one run measured; None or empty for what was left out; `quantized`: layers of 8 bits."""

    model: BenchModel
    machine: Machine
    settings: Mapping[str, Any]
    rows: Sequence[StepRow] = ()
    idle: list[IdleResult] = field(default_factory=list)
    prefill: list[PrefillResult] = field(default_factory=list)
    mixed: list[MixedResult] = field(default_factory=list)
    trace: list[TraceResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    quantized: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": {"name": self.model.name, **asdict(self.model.sizes)},
            "machine": asdict(self.machine),
            "settings": dict(self.settings),
            "steps": [self._step(row) for row in self.rows],
            **{part: [asdict(result) for result in getattr(self, part)] for part in _PARTS},
            "failures": self.failures,
        }

    def tables(self) -> list[Table]:
        """Those that have rows."""
        tables = (
            *(self._steps_table(), self._idle_table(), self._prefill_table(), self._mixed_table()),
            self._trace_table(),
        )
        return [table for table in tables if table.row_count]

    def _step(self, row: StepRow) -> dict[str, Any]:
        """Floor and ratios included; ratios are of the first measurements."""
        floor = step_floor(self.model.sizes, row.point, self.machine, quantized=self.quantized)
        ours = row.ours[0].device_ms if row.ours else None
        target = STEP_TARGETS.get(row.point) if self.model.name == "8b" and not self.quantized else None
        return {
            **asdict(row),
            "floor": {**asdict(floor), "ms": floor.ms},
            "ours_over_floor": ratio(ours, floor.ms),
            "eager_over_ours": ratio(first(row.eager_ms), ours),
            "compiled_over_ours": ratio(first(row.compiled_ms), ours),
            "target": None if target is None else str(target),
            "target_met": None if target is None or ours is None else target.is_met(ours, floor.ms),
        }

    def _steps_table(self) -> Table:
        names = (
            *("context", "sessions", "rows", "ours", "again", "with the host", "floor", "of", "ours / floor"),
            *("eager", "again", "eager / ours", "compiled + graph", "again", "compiled / ours", "target", "met"),
        )
        layers = ", layers of 8 bits" if self.quantized else ""
        table = _table(
            f"A step of the {self.model.name} shape{layers} (milliseconds)", names, left=("of", "target", "met")
        )
        for row in self.rows:
            entry, ours = self._step(row), [times.device_ms for times in row.ours]
            table.add_row(
                *(str(value) for value in (row.point.context, row.point.sessions, row.point.tokens)),
                *_twice(ours),
                _ms(row.ours[0].wall_ms if row.ours else None),
                _ms(entry["floor"]["ms"]),
                entry["floor"]["bound"],
                _ratio(entry["ours_over_floor"]),
                *_twice(row.eager_ms),
                _ratio(entry["eager_over_ours"]),
                *_twice(row.compiled_ms),
                _ratio(entry["compiled_over_ours"]),
                entry["target"] or "",
                _met(entry["target_met"]),
            )
        return table

    def _idle_table(self) -> Table:
        names = ("sessions", "rows each", "context", "steps", "step", "idle p50", "p90", "max", "target", "met")
        table = _table("The device between two steps of a saturated worker (milliseconds)", names)
        for idle in self.idle:
            table.add_row(
                f"2 x {idle.sessions}",
                *(str(value) for value in (idle.rows, idle.context, idle.steps)),
                *(_ms(value) for value in (idle.step_ms, idle.idle_p50_ms, idle.idle_p90_ms, idle.idle_max_ms)),
                f"{IDLE_TARGET_MS} ms",
                _met(idle.idle_p50_ms < IDLE_TARGET_MS),
            )
        return table

    def _prefill_table(self) -> Table:
        names = ("prompt", "rows a step", "seconds", "tokens/s", "TFLOP/s", "of peak", "target", "met")
        table = _table("Prefill, one prompt at a time", names)
        for prefill in self.prefill:
            table.add_row(
                str(prefill.prompt),
                str(prefill.max_prefill_tokens),
                f"{prefill.seconds:.3f}",
                f"{prefill.tokens_per_second:.0f}",
                f"{prefill.tflops:.0f}",
                f"{prefill.share_of_peak:.1%}",
                f"{PREFILL_TARGET_SHARE:.0%}",
                _met(prefill.share_of_peak >= PREFILL_TARGET_SHARE),
            )
        return table

    def _mixed_table(self) -> Table:
        tpot = f"p99 TPOT of {REQUEST_TOKENS} tokens"
        names = (
            *("running", "long prompt", "took, s", "", "steps", "gap p50", "gap p99", tpot),
            *("ratio of gap p99", "ratio of p99 TPOT", "target", "met"),
        )
        table = _table("Running sessions with a long prompt beside them (milliseconds)", names)
        for mixed in self.mixed:
            running = f"{mixed.sessions} x {mixed.rows} rows at {mixed.context}"
            for name, pace in (("alone", mixed.alone), ("beside", mixed.beside)):
                beside = name == "beside"
                table.add_row(
                    running if not beside else "",
                    str(mixed.prompt) if beside else "",
                    f"{mixed.prompt_seconds:.2f}" if beside else "",
                    name,
                    str(pace.steps),
                    *(_ms(value) for value in (pace.gap_p50_ms, pace.gap_p99_ms, pace.tpot_p99_ms)),
                    _ratio(mixed.gap_p99_ratio) if beside else "",
                    _ratio(mixed.tpot_p99_ratio) if beside else "",
                    f"{MIXED_TARGET_RATIO}" if beside else "",
                    _met(mixed.tpot_p99_ratio < MIXED_TARGET_RATIO) if beside else "",
                )
        return table

    def _trace_table(self) -> Table:
        table = _table("A steady loop of steps, a step", ("sessions", "rows each", "steps", "what", "times"))
        for trace in self.trace:
            counts = {"kernels, copies, fills": trace.kernels, "torch allocations": trace.allocations, **trace.calls}
            for number, (name, count) in enumerate(counts.items()):
                place = (f"2 x {trace.sessions}", str(trace.rows), str(trace.steps)) if not number else ("", "", "")
                table.add_row(*place, name, f"{count:.2f}")
        return table


def _table(title: str, names: Sequence[str], *, left: Sequence[str] = ("target", "met")) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def _twice(values: Sequence[float]) -> tuple[str, str]:
    return _ms(values[0] if values else None), _ms(values[1] if len(values) > 1 else None)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _met(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"
