"""One row a case, one table an operator; JSON with the same content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.kernel_bench.case import Case, Machine, Work
from benchmarks.kernel_bench.targets import TARGETS
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Times:
    """One measurement of a case, in microseconds; None for what was left out."""

    ours_us: float
    flashinfer_us: float | None = None
    beside_us: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case, measured.

    Attributes:
        operator, shape: of the case.
        first: the measurement that ratios and target are taken from.
        again: a second one of the same, which shows the noise.
        reference_us: plain torch on the GPU, on the host's clock; None where it does not take CUDA tensors.
        floor_us: the least that the hardware needs.
        floor_bound: "bytes" or "FLOPs".
        work: what the floor was computed from.
        target: in words; None where there is none.
        target_met: None where there is none, or where what it hangs on was not measured.
    """

    operator: str
    shape: str
    first: Times
    again: Times
    reference_us: float | None
    floor_us: float
    floor_bound: str
    work: Work
    target: str | None
    target_met: bool | None

    @property
    def over_floor(self) -> float:
        """Ours / floor."""
        return self.first.ours_us / self.floor_us

    @property
    def flashinfer_over_ours(self) -> float | None:
        """FlashInfer / ours."""
        return None if self.first.flashinfer_us is None else self.first.flashinfer_us / self.first.ours_us

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, with its ratios."""
        return {**asdict(self), "over_floor": self.over_floor, "flashinfer_over_ours": self.flashinfer_over_ours}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A case that could not be measured, and why."""

    operator: str
    shape: str
    reason: str


def make_row(
    case: Case, work: Work, machine: Machine, *, first: Times, again: Times, reference_us: float | None
) -> Row:
    """The row of a case measured twice; ratios and targets are those of the first time."""
    floor_us = work.floor_us(machine)
    target = TARGETS[case.target] if case.target is not None else None
    met = None
    if target is not None:
        met = target.is_met(
            first.ours_us, floor_us=floor_us, flashinfer_us=first.flashinfer_us, beside_us=first.beside_us
        )
    return Row(
        operator=case.operator,
        shape=case.shape,
        first=first,
        again=again,
        reference_us=reference_us,
        floor_us=floor_us,
        floor_bound=work.bound(machine),
        work=work,
        target=None if target is None else str(target),
        target_met=met,
    )


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table an operator, in the order of the rows; a column that would be empty is left out."""
    by_operator: dict[str, list[Row]] = {}
    for row in rows:
        by_operator.setdefault(row.operator, []).append(row)
    return [_table(operator, of_operator) for operator, of_operator in by_operator.items()]


def _table(operator: str, rows: Sequence[Row]) -> Table:
    headings = list(dict.fromkeys(heading for row in rows for heading in row.first.beside_us))
    columns: dict[str, list[str]] = {
        "shape": [row.shape for row in rows],
        "ours": [_us(row.first.ours_us) for row in rows],
        "again": [_us(row.again.ours_us) for row in rows],
        "reference": [_us(row.reference_us) for row in rows],
        "FlashInfer": [_us(row.first.flashinfer_us) for row in rows],
        **{heading: [_us(row.first.beside_us.get(heading)) for row in rows] for heading in headings},
        "floor": [_us(row.floor_us) for row in rows],
        "of": [row.floor_bound for row in rows],
        "ours / floor": [_ratio(row.over_floor) for row in rows],
        "FlashInfer / ours": [_ratio(row.flashinfer_over_ours) for row in rows],
        "target": [row.target or "" for row in rows],
        "met": [_met(row) for row in rows],
    }
    table = Table(title=f"{operator} (microseconds)", title_justify="left")
    for heading, cells in columns.items():
        if any(cells):
            table.add_column(heading, justify="left" if heading in ("shape", "of", "target", "met") else "right")
    shown = [cells for cells in columns.values() if any(cells)]
    for cells in zip(*shown, strict=True):
        table.add_row(*cells)
    return table


def print_report(rows: Sequence[Row], left_out: Sequence[LeftOut], machine: Machine, console: Console) -> None:
    """Tables, then what is missing."""
    console.print(describe(machine))
    for table in tables(rows):
        console.print(table)
    for case in left_out:
        console.print(f"left out: {case.operator}, {case.shape}: {case.reason}", markup=False)


def describe(machine: Machine) -> str:
    """The machine on one line."""
    return (
        f"{machine.name}: copy {machine.copy_bytes_per_s / 1e12:.2f} TB/s, bfloat16 product "
        f"{machine.flops_per_s / 1e12:.0f} TFLOP/s, smallest kernel {machine.launch_us:.1f} us"
    )


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _met(row: Row) -> str:
    if row.target is None:
        return ""
    return {True: "yes", False: "no", None: "not measured"}[row.target_met]
