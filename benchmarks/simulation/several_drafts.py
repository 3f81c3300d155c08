"""When a second draft worker pays, and for whom: virtual time, real scheduler, loops and mirrors.

Two workers can share the sessions, or both grow every session's tree. What the second way adds depends on how different
the two are: the same model says the same again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import simulate
from rich.console import Console
from rich.table import Table

_SESSIONS = (1, 4, 16)
# (milliseconds of a step, nodes that it expands): a draft on a GPU, the same with little width, and a slow one.
_DRAFTS = ((0.75, 64), (0.75, 8), (2.5, 8))
_KINSHIPS = (1.0, 0.8, 0.5, 0.0)


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON on standard output if asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/several_drafts.py", description="When a second draft pays.")
    parser.add_argument("--duration", type=float, default=4.0, help="virtual seconds of each run (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--json", action="store_true", help="figures on standard output, the table on the other")
    chosen = parser.parse_args(arguments)
    rows = measure(Settings(duration_s=chosen.duration, warmup_s=0.5, seed=chosen.seed), chosen.processes)
    Console(stderr=chosen.json).print(table(rows))
    if chosen.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    return 0


def settings_of(base: Settings) -> list[Settings]:
    """One draft, two that share the sessions, and two for every session, for each kinship; for each load and draft."""
    found = []
    for sessions in _SESSIONS:
        for step_ms, width in _DRAFTS:
            one = replace(base, sessions=sessions, draft_step_ms=step_ms, draft_width=width)
            found += [one, replace(one, workers=2)]
            found += [replace(one, workers=2, drafts_per_session=2, draft_kinship=kinship) for kinship in _KINSHIPS]
    return found


def measure(base: Settings, processes: int) -> list[dict[str, Any]]:
    """A row for each load and draft: tokens per second with one draft, and ratios to it."""
    asked = settings_of(base)
    with ProcessPoolExecutor(processes) as pool:
        figures = list(pool.map(simulate, asked))
    rows = []
    for first in range(0, len(asked), len(_KINSHIPS) + 2):
        one, *others = figures[first : first + len(_KINSHIPS) + 2]
        names = ("sharing", *(f"both, kinship {kinship:g}" for kinship in _KINSHIPS))
        settings = asked[first]
        rows.append(
            {
                "sessions": settings.sessions,
                "draft_step_ms": settings.draft_step_ms,
                "draft_width": settings.draft_width,
                "one_draft": asdict(one),
                "ratios": {
                    name: figure.tokens_per_s / one.tokens_per_s for name, figure in zip(names, others, strict=True)
                },
                "wrong_tokens": sum(figure.wrong_tokens for figure in (one, *others)),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a row."""
    shown = Table(title="tokens per second of two drafts, by one draft's")
    for heading in ("sessions", "draft step ms", "width", "one draft: tokens/s", "accepted", *rows[0]["ratios"]):
        shown.add_column(heading, justify="right")
    for row in rows:
        one = row["one_draft"]
        shown.add_row(
            str(row["sessions"]),
            f"{row['draft_step_ms']:g}",
            str(row["draft_width"]),
            f"{one['tokens_per_s']:,.0f}",
            f"{one['acceptance_length']:.2f}",
            *(f"{ratio:.2f}" for ratio in row["ratios"].values()),
        )
    return shown
