"""What a draft's host is worth to a service: its time, steps that overlap, when growth is sent, the nodes it may hold.

Virtual time, with the real scheduler, loops and mirrors, and a draft whose host and device take turns (`queued_draft`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from benchmarks.simulation import virtual_time
from benchmarks.simulation.queued_draft import DraftTimes, QueuedDraft
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation
from rich.console import Console
from rich.table import Table

from outrider.v1 import registry_pb2

# First children right in 45, 65, 80 of 100 cases.
_RATES = {
    "45": ((0.45, 0.15, 0.08, 0.05), 0.2),
    "65": ((0.65, 0.12, 0.06, 0.03), 0.2),
    "80": ((0.80, 0.08, 0.03, 0.02), 0.15),
}
_FIRST = DraftTimes()
_WAYS = {
    "as it is": _FIRST,
    "sent behind the next begin": replace(_FIRST, sends_late=True),
    "one step at a time": replace(_FIRST, begun=1),
    "half the host's time": replace(_FIRST, begin=_FIRST.begin / 2, finish=_FIRST.finish / 2),
}


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON on standard output if asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/draft_host.py", description="What a draft's host is worth.")
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--live-nodes", nargs="+", type=int, default=[128, 256, 512])
    parser.add_argument(
        "--right", nargs="+", choices=tuple(_RATES), default=list(_RATES), help="first children, of 100"
    )
    parser.add_argument("--duration", type=float, default=3.0, help="virtual seconds of each run (default 3)")
    parser.add_argument("--json", action="store_true", help="figures on standard output, the table on the other")
    chosen = parser.parse_args(arguments)
    rows = []
    for sessions in chosen.sessions:
        for right in chosen.right:
            for live_nodes in chosen.live_nodes:
                settings = settings_of(sessions, right, live_nodes, chosen.duration)
                rows += [
                    {"sessions": sessions, "right": right, "live_nodes": live_nodes, "way": way}
                    | simulate_host(settings, times)
                    for way, times in _WAYS.items()
                ]
    Console(stderr=chosen.json, width=140).print(_table(rows))
    if chosen.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    return 0


def settings_of(sessions: int, right: str, live_nodes: int, duration_s: float) -> Settings:
    """A target of 4.2 ms and a draft next to it."""
    rates, spread = _RATES[right]
    return Settings(
        sessions=sessions,
        target_step_ms=4.2,
        target_row_us=8.0,
        target_jitter=0.05,
        rank_rates=rates,
        spread=spread,
        draft_rtt_ms=0.3,
        target_rtt_ms=0.3,
        max_nodes=32,
        max_depth=12,
        max_live_nodes=live_nodes,
        duration_s=duration_s,
        warmup_s=0.3,
    )


class _Simulation(VirtualSimulation):
    """With drafts whose steps overlap."""

    times = _FIRST

    def _add_draft(self, number: int, limits: registry_pb2.WorkerLimits) -> None:
        worker_id = f"draft-{number}"
        draft = QueuedDraft(
            self.settings, self.model, self.times, on_growth=lambda grown: self.scheduler.take_growth(worker_id, grown)
        )
        self.drafts.append(draft)
        self.scheduler.add_draft(worker_id, draft, limits)  # pyright: ignore[reportArgumentType] - stands where one does


def simulate_host(settings: Settings, times: DraftTimes) -> dict[str, Any]:
    """One run, from virtual time 0 on; all of its drafts are the same model."""

    async def main() -> dict[str, Any]:
        simulation = type("_Timed", (_Simulation,), {"times": times})(settings)
        figures = await simulation.measure()
        (draft,) = simulation.drafts
        assert isinstance(draft, QueuedDraft)
        return asdict(figures) | {
            "answer_ms": median(draft.answers_ns or [0]) / 1e6,
            "met": draft.met,
            "draft_steps": draft.steps,
        }

    return virtual_time.run(main())


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="a draft's host on virtual time")
    for heading in (
        "sessions", "right", "live nodes", "way", "tokens/s", "accepted", "commit to growth, ms", "draft steps",
        "commits that met 0, 1, 2 steps, %",
    ):  # fmt: skip
        shown.add_column(heading, justify="right")
    for row in rows:
        met = " ".join(f"{100 * count / max(sum(row['met']), 1):.0f}" for count in row["met"])
        shown.add_row(
            str(row["sessions"]), row["right"], str(row["live_nodes"]), row["way"], f"{row['tokens_per_s']:,.0f}",
            f"{row['acceptance_length']:.2f}", f"{row['answer_ms']:.2f}", str(row["draft_steps"]), met,
        )  # fmt: skip
    return shown
