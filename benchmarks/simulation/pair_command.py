"""The command line of `benchmarks/pair_rounds.py`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from benchmarks.simulation.embedded_pair import MAX_LEN, StepTimes, record, simulate_pair
from benchmarks.simulation.settings import Settings
from rich.console import Console
from rich.table import Table

from outrider.coordinator.config import RoundTiming
from outrider.coordinator.messages import SpeculationMode

TIMINGS: Sequence[RoundTiming] = ("learned", "wait", "never-wait", "two-groups", "ahead")


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON on standard output if asked for; the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/pair_rounds.py", description="The embedded pair at a large model's step times."
    )
    add, first = parser.add_argument, StepTimes()
    add("--sessions", nargs="+", type=int, default=[1], help="clients (default 1)")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="default 0 1")
    add("--rounds", nargs="+", choices=TIMINGS, default=["learned"], help="default learned")
    add("--live-nodes", nargs="+", type=int, default=[256], help="that a draft may hold for a session (default 256)")
    add("--session-nodes", nargs="+", type=int, default=[16], help="that a draft's step expands of one (default 16)")
    add("--min-path-value", nargs="+", type=float, default=[0.003], help="as of a draft worker (default 0.003)")
    add("--target-step-ms", type=float, default=4.0, help="a target's step without rows (default 4)")
    add("--target-row-us", type=float, default=12.0, help="each row of it more (default 12)")
    add("--target-session-us", type=float, default=40.0, help="each session of it more (default 40)")
    add("--target-rtt-ms", type=float, default=1.0, help="round trip to the target (default 1)")
    add("--draft-step-ms", type=float, default=first.step, help="a draft's step (default 0.4)")
    add("--draft-row-us", type=float, default=1e3 * first.row, help="each row of it more (default 4)")
    add("--draft-session-us", type=float, default=1e3 * first.session, help="each session of it more (default 20)")
    add("--draft-rtt-ms", type=float, default=0.8, help="round trip to the draft (default 0.8)")
    add("--requests", type=int, default=16, help="that clients choose from (default 16)")
    add("--prompt-tokens", type=int, default=1024, help="of a request (default 1024)")
    add("--new-tokens", type=int, default=512, help="of a request (default 512)")
    add("--duration", type=float, default=2.0, help="virtual seconds of each run (default 2)")
    add("--warm-up", type=float, default=0.6, help="virtual seconds before (default 0.6)")
    add("--json", action="store_true", help="figures on standard output, the table on the other")
    chosen = parser.parse_args(arguments)
    if chosen.prompt_tokens + chosen.new_tokens > MAX_LEN:
        parser.error(f"prompt and output have {chosen.prompt_tokens + chosen.new_tokens} tokens, at most {MAX_LEN}")
    if chosen.requests < max(chosen.sessions):
        parser.error(f"{chosen.requests} requests given, at least {max(chosen.sessions)} (sessions) needed")
    recorded = record(
        prompt_tokens=chosen.prompt_tokens,
        new_tokens=chosen.new_tokens,
        requests=chosen.requests,
        temperatures=chosen.temperatures,
    )
    times = StepTimes(step=chosen.draft_step_ms, row=chosen.draft_row_us / 1e3, session=chosen.draft_session_us / 1e3)
    rows: list[dict[str, Any]] = []
    for sessions, temperature in product(chosen.sessions, chosen.temperatures):
        plain = replace(_settings(chosen, sessions), mode=SpeculationMode.OFF)
        off = simulate_pair(plain, recorded[temperature], times).tokens_per_s
        for rounds, live, nodes, least in product(
            chosen.rounds, chosen.live_nodes, chosen.session_nodes, chosen.min_path_value
        ):
            settings = replace(_settings(chosen, sessions), rounds=rounds, max_live_nodes=live)
            figures = simulate_pair(
                settings, recorded[temperature], times, max_session_nodes=nodes, min_path_value=least
            )
            what = {"sessions": sessions, "temperature": temperature, "rounds": rounds}
            drafts = {"live_nodes": live, "session_nodes": nodes, "min_path_value": least}
            rows.append(what | drafts | asdict(figures) | {"of_off": figures.tokens_per_s / off})
    Console(stderr=chosen.json, width=160).print(_table(rows))
    if chosen.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    return 0


def _settings(chosen: argparse.Namespace, sessions: int) -> Settings:
    return Settings(
        sessions=sessions,
        target_step_ms=chosen.target_step_ms,
        target_row_us=chosen.target_row_us,
        target_session_us=chosen.target_session_us,
        target_jitter=0.02,
        target_rtt_ms=chosen.target_rtt_ms,
        draft_rtt_ms=chosen.draft_rtt_ms,
        max_nodes=31,
        max_depth=16,
        duration_s=chosen.duration,
        warmup_s=chosen.warm_up,
    )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="the embedded pair on virtual time")
    for heading in (
        "sessions", "T", "rounds", "live nodes", "session nodes", "least value", "tokens/s", "of off",
        "acceptance length", "nodes", "busy", "draft steps/s", "rows", "idle",
    ):  # fmt: skip
        shown.add_column(heading, justify="left" if heading == "rounds" else "right")
    for row in rows:
        shown.add_row(
            str(row["sessions"]), f"{row['temperature']:g}", row["rounds"], str(row["live_nodes"]),
            str(row["session_nodes"]),
            f"{row['min_path_value']:g}", f"{row['tokens_per_s']:,.0f}", f"{row['of_off']:.2f}",
            f"{row['acceptance_length']:.2f}", f"{row['nodes']:.1f}", f"{row['busy']:.0%}",
            f"{row['draft_steps_per_s']:,.0f}", f"{row['draft_rows']:.1f}", f"{row['draft_idle']:.0%}",
        )  # fmt: skip
    return shown
