"""The table on the terminal and the JSON file, which is written anew after every cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_COLUMNS: Sequence[tuple[str, str, str]] = (
    ("setup", "setup", "{}"),
    ("mode", "mode", "{}"),
    ("T", "temperature", "{:g}"),
    ("sessions", "sessions", "{}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("speed-up", "speedup", "{:.2f}"),
    ("tokens/s a GPU", "tokens_per_s_per_gpu", "{:.0f}"),
    ("TPOT ms", "tpot_ms", "{:.2f}"),
    ("scaled TPOT ms", "scaled_tpot_ms", "{:.2f}"),
    ("TTFT ms", "ttft_ms", "{:.0f}"),
    ("acceptance length", "acceptance_length", "{:.2f}"),
    ("nodes", "nodes", "{:.1f}"),
    ("draft steps/s", "draft_steps_per_s", "{:.0f}"),
    ("round ms", "round_ms", "{:.2f}"),
    ("step ms", "step_ms", "{:.2f}"),
    ("exposed ms", "exposed_ms", "{:.2f}"),
    ("busy", "busy", "{:.0%}"),
    ("device", "device", "{:.0%}"),
    ("coordinators busy", "coordinator_busy", "{:.0%}"),
)
_WORDS = ("setup", "mode")


def table(cells: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row a cell."""
    shown = Table(title=title)
    columns = [column for column in _COLUMNS if any(column[1] in cell for cell in cells)]
    for heading, name, _ in columns:
        shown.add_column(heading, justify="left" if name in _WORDS else "right")
    for cell in cells:
        values = [_shown(cell.get(name), form) for _, name, form in columns]
        if cell["synthetic"]:
            values[1] += ", synthetic"
        shown.add_row(*values)
    return shown


def arrivals_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """One row for prompts of one length in one way of serving."""
    shown = Table(title="prompts that arrive beside running sessions: medians and largest")
    for heading in ("setup", "mode", "T", "sessions", "prompt", "TTFT ms", "longest wait ms", "without arrivals ms"):
        shown.add_column(heading, justify="left" if heading in _WORDS else "right")
    for row in found:
        times = (
            " ".join(f"{value:.2f}" for value in row[name]) for name in ("ttft_ms", "longest_ms", "usual_longest_ms")
        )
        numbers = (f"{row['temperature']:g}", str(row["running"]), str(row["prompt_tokens"]))
        shown.add_row(row["setup"], row["mode"], *numbers, *times)
    return shown


def line(cell: Mapping[str, Any]) -> str:
    """One cell in a line of progress."""
    parts = [f"{cell['tokens_per_s']:.0f} tokens/s", f"acceptance length {cell['acceptance_length']:.2f}"]
    if cell["rounds"]:
        parts.append(f"round {cell['round_ms']:.2f} ms, exposed {cell['exposed_ms']:.2f}, busy {cell['busy']:.0%}")
    return ", ".join(parts)


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
