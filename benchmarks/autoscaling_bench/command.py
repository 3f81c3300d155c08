"""The command line of benchmarks/autoscaling.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.autoscaling_bench import report
from benchmarks.autoscaling_bench.load import Record, drive
from rich.console import Console
from rich.table import Table

from outrider.deploy.cluster import Deployment
from outrider.deploy.config import DeployConfig

_COLUMNS = (
    "clients",
    "seconds",
    "serving_at_start",
    "serving_at_end",
    "most_serving_after_s",
    "least_serving_after_s",
    "tpot_ms_first_third",
    "tpot_ms_last_third",
)


def run(arguments: Sequence[str]) -> int:
    """A table, JSON and a picture; the exit code says whether the drafts reached their maximum in time."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/autoscaling.py",
        description="Load that triples for a while, and drafts that follow it.",
    )
    parser.add_argument("--clients", type=int, default=4, help="before and after (default 4)")
    parser.add_argument("--factor", type=int, default=3, help="times as many in between (default 3)")
    parser.add_argument("--seconds", type=float, nargs=3, default=(20.0, 60.0, 75.0), help="before, peak, after")
    parser.add_argument("--max-drafts", type=int, default=3)
    parser.add_argument("--drafts-fixed", type=int, help="so many throughout instead of autoscaling, to compare")
    parser.add_argument("--draft-cost", type=float, default=DeployConfig.autoscale_draft_cost)
    parser.add_argument("--down-s", type=float, default=DeployConfig.autoscale_down_s)
    parser.add_argument("--within-s", type=float, default=15.0, help="promised time to the most drafts (default 15)")
    parser.add_argument("--output", type=Path, default=Path("autoscaling"), help="folder for the JSON and the picture")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    plan = list(zip((chosen.clients, chosen.clients * chosen.factor, chosen.clients), chosen.seconds, strict=True))
    record, status = asyncio.run(_measure(chosen, plan))
    found = report.phases(record, plan)
    seconds = report.bins(record, seconds=sum(chosen.seconds))
    chosen.output.mkdir(parents=True, exist_ok=True)
    result = {
        "arguments": {name: str(value) for name, value in vars(chosen).items()},
        "phases": found,
        "seconds": seconds,
        "decisions": status["autoscaler"]["decisions"],
        "failures": record.failures,
    }
    (chosen.output / "autoscaling.json").write_text(json.dumps(result, indent=1) + "\n")
    console = Console()
    try:
        report.draw(seconds, chosen.output / "autoscaling.png", _title(chosen))
    except ImportError:
        console.print('no picture: matplotlib is not installed; pip install "outrider[plots]"', markup=False)
    console.print(_table(found))
    for own in result["decisions"]:
        console.print(f"{own['before']} to {own['drafts']}: {own['reason']}")
    peak = found[1]
    in_time = (peak["most_serving_after_s"] or float("inf")) <= chosen.within_s
    reached = chosen.drafts_fixed is not None or (peak["serving_at_end"] == chosen.max_drafts and in_time)
    return 0 if reached and not record.failures else 1


async def _measure(chosen: argparse.Namespace, plan: Sequence[tuple[int, float]]) -> tuple[Record, dict[str, Any]]:
    scaling: dict[str, Any] = {"drafts": chosen.drafts_fixed}
    if chosen.drafts_fixed is None:
        scaling = {"drafts": 1, "min_drafts": 1, "max_drafts": chosen.max_drafts}
        scaling |= {"autoscale_draft_cost": chosen.draft_cost, "autoscale_down_s": chosen.down_s}
    config = DeployConfig(name="autoscaling", port=0, start_timeout_s=120.0, target_threads=1, **scaling)
    async with Deployment(config) as deployment:
        record = await drive(deployment, plan)
        return record, await deployment.status()


def _title(chosen: argparse.Namespace) -> str:
    return f"{chosen.clients} clients, {chosen.factor} times as many for {chosen.seconds[1]:g} s"


def _table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="load that grows and goes")
    for name in _COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    for phase in found:
        cells = (phase[name] for name in _COLUMNS)
        table.add_row(
            *("-" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
        )
    return table
