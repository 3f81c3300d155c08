"""Two files of figures side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from outrider.coordinator.loadtest import report_json

# (key, whether more is better); None is neither.
COMPARED: tuple[tuple[str, bool | None], ...] = (
    ("completed", True),
    ("failed", False),
    ("duration", None),
    ("request_throughput", True),
    ("request_goodput", True),
    ("output_throughput", True),
    ("total_token_throughput", True),
    *(
        (f"{each}_{name}_ms", False)
        for name in ("ttft", "tpot", "itl", "e2el")
        for each in ("mean", "median", "p90", "p99")
    ),
    ("spec_decode_acceptance_length", True),
    ("spec_decode_acceptance_rate", True),
)
# A ratio within it is left without a colour.
_SAME = 0.02


def ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float]:
    """Second over first, of every figure that both have and that is not 0 in the first."""
    return {
        key: second[key] / first[key]
        for key, _ in COMPARED
        if _is_number(first.get(key)) and _is_number(second.get(key)) and first[key]
    }


def pairs(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Runs that belong together: those with the same label; where none are, in their order."""
    by_label = {run.get("label"): run for run in second}
    same = [(run, by_label[run["label"]]) for run in first if run.get("label") in by_label and run.get("label")]
    return same or list(zip(first, second, strict=False))


def compare(first: Path, second: Path) -> list[Table]:
    """One table a pair of runs.

    Raises:
        InvalidRequest: a file holds something else than figures.
        OSError: a file cannot be read.
    """
    return [
        _table(one, other, names=(first.name, second.name))
        for one, other in pairs(report_json.read(first), report_json.read(second))
    ]


def _table(one: Mapping[str, Any], other: Mapping[str, Any], *, names: tuple[str, str]) -> Table:
    labels = dict.fromkeys(str(run.get("label") or "") for run in (one, other))
    # Files and labels are called as somebody likes, in brackets too.
    title = escape(" / ".join(filter(None, labels))) or None
    table = Table("figure", *map(escape, names), "ratio", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    found = ratios(one, other)
    for key, more_is_better in COMPARED:
        if not (_is_number(one.get(key)) and _is_number(other.get(key))):
            continue
        ratio = found.get(key)
        shown = "" if ratio is None else _coloured(ratio, more_is_better)
        table.add_row(key, f"{one[key]:,.4g}", f"{other[key]:,.4g}", shown)
    return table


def _coloured(ratio: float, more_is_better: bool | None) -> str:
    text = f"{ratio:.3f}"
    if more_is_better is None or abs(ratio - 1) <= _SAME:
        return text
    return f"[{'green' if (ratio > 1) is more_is_better else 'red'}]{text}[/]"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
