"""The command line of the simulator."""

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import get_args

import uvloop
from benchmarks.simulation.drive import simulate
from benchmarks.simulation.figures import Figures, figures_of
from benchmarks.simulation.settings import COLLECTORS, MAX_SESSIONS, MAX_WORKERS, Settings
from rich.console import Console
from rich.table import Table

from outrider import collector
from outrider.coordinator.config import RoundTiming
from outrider.coordinator.messages import SpeculationMode
from outrider.errors import OutriderError

_FAILED = 1
_OPTIONS: Sequence[tuple[str, Callable[[str], object], str]] = (
    ("sessions", int, f"that run at a time, at most {MAX_SESSIONS}"),
    ("workers", int, f"draft workers, at most {MAX_WORKERS}"),
    ("targets", int, f"target workers, at most {MAX_WORKERS}"),
    ("target_step_ms", float, "a target's step without rows"),
    ("target_row_us", float, "each row of it more (tree nodes and roots)"),
    ("target_session_us", float, "each session of it more"),
    ("target_stair_rows", int, "charge rows in multiples of this"),
    ("draft_step_ms", float, "a draft's step"),
    ("draft_width", int, "nodes that a draft's step expands, over all sessions"),
    ("draft_rtt_ms", float, "round trip to drafts, added to that of loopback"),
    ("target_rtt_ms", float, "round trip to targets, added to that of loopback"),
    ("spread", float, "half of the positions have a first rate higher by this, half a lower one"),
    ("tokens", int, "of each session, instead of a duration"),
    ("seed", int, "of what is emitted and of which children are right"),
    ("drafts_per_session", int, "drafts that grow one session's tree"),
    ("max_nodes", int, "most nodes of a session in a step"),
    ("max_depth", int, "deepest node"),
    ("max_live_nodes", int, "most nodes that a draft holds for a session"),
    ("max_step_rows", int, "most rows of a target's step"),
    ("wait_cap_ms", float, "longest that a free target waits for growth"),
)
_ROWS: Sequence[tuple[str, str]] = (
    ("rounds", "{:d}"),
    ("tokens_per_s", "{:,.0f}"),
    ("acceptance_length", "{:.2f}"),
    ("tpot_ms", "{:.2f}"),
    ("exposed_ms", "{:.2f}"),
    ("target_step_ms", "{:.2f}"),
    ("target_busy", "{:.1%}"),
    ("nodes_per_step", "{:.1f}"),
    ("scheduling_ms", "{:.2f}"),
    ("held_ms", "{:.2f}"),
    ("own_scheduling_ms", "{:.2f}"),
    ("scheduling_cpu_ms", "{:.2f}"),
    ("coordinator_cpu", "{:.1%}"),
    ("cpu_ms_per_round", "{:.2f}"),
    ("dropped_nodes", "{:d}"),
    ("wrong_tokens", "{:d}"),
)


def run(arguments: Sequence[str]) -> int:
    """A table with a column a mode, and JSON on standard output if asked for; returns the exit code."""
    try:
        modes, as_json, choices = _parse(arguments)
        results = [_simulate(Settings(mode=mode, **choices)) for mode in modes]
    except (ValueError, OutriderError, TimeoutError) as error:
        sys.stderr.write(f"simulate: {error}\n")
        return _FAILED
    Console(stderr=as_json).print(table(results))
    if as_json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return _FAILED if any(result["wrong_tokens"] for result in results) else 0


@contextmanager
def _collector(kind: str) -> Iterator[None]:
    """Python's garbage collector as asked for; afterwards as it was."""
    gc.collect()
    thresholds = gc.get_threshold()
    if kind == "serving":
        collector.begin_serving()
    elif kind == "frozen":
        gc.freeze()
    elif kind == "off":
        gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        gc.enable()


def _simulate(settings: Settings) -> Figures:
    # The loop that a coordinator runs on.
    with _collector(settings.collector), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return figures_of(runner.run(simulate(settings)))


def _parse(arguments: Sequence[str]) -> tuple[list[SpeculationMode], bool, dict]:
    parser = argparse.ArgumentParser(
        prog="benchmarks/simulate.py",
        description="The coordinator under load without a GPU: its own code, and fake workers of given step times.",
        epilog="own_scheduling_ms is the coordinator's own delay between a result and the next batch: less what it "
        "chose to wait (held_ms). benchmarks/simulation/figures.py says what each figure means.",
    )
    defaults = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    for name, kind, text in _OPTIONS:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, default=defaults[name], help=f"{text} (default {defaults[name]})")
    parser.add_argument(
        "--rank-rates", type=float, nargs="+", default=defaults["rank_rates"], metavar="SHARE",
        help="how often the draft's first, second, ... child is the target's choice (default 0.7 0.12 0.05 0.03)",
    )  # fmt: skip
    parser.add_argument(
        "--ahead", action=argparse.BooleanOptionalAction, default=True,
        help="send batches before the step before them has ended, where that is faster (default)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", choices=get_args(RoundTiming), default="learned",
        help="how rounds are timed: the quickest way of all, or always this one (default learned)",
    )  # fmt: skip
    parser.add_argument(
        "--collector", choices=COLLECTORS, default="serving", help="Python's, in this process (default serving)"
    )
    parser.add_argument("--duration", dest="duration_s", type=float, default=5.0, help="seconds measured (default 5)")
    parser.add_argument("--warmup", dest="warmup_s", type=float, default=1.0, help="seconds before (default 1)")
    parser.add_argument(
        "--mode", nargs="+", type=SpeculationMode, choices=list(SpeculationMode), default=[SpeculationMode.ASYNC],
        help="one column each: off, sync, async (default async)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="every figure on standard output, the table on the other")
    choices = vars(parser.parse_args(arguments))
    choices["rank_rates"] = tuple(choices["rank_rates"])
    return choices.pop("mode"), choices.pop("json"), choices


def table(results: Sequence[Figures]) -> Table:
    """One column a run."""
    settings = results[0]["settings"]
    title = f"{settings['sessions']} sessions, {settings['workers']} drafts, {settings['targets']} targets"
    shown = Table(title=title)
    shown.add_column("")
    for result in results:
        shown.add_column(str(result["settings"]["mode"]), justify="right")
    for name, form in _ROWS:
        for part in ("mean", "p50", "p99") if name.endswith("_ms") else ("",):
            shown.add_row(f"{name} {part}".strip(), *(_cell(result[name], part, form) for result in results))
    shown.add_row(
        "late target step p99", *(_cell(result["worker_late_ms"]["target"], "p99", "{:.2f}") for result in results)
    )
    shown.add_row(
        "late draft step p99", *(_cell(result["worker_late_ms"]["draft"], "p99", "{:.2f}") for result in results)
    )
    return shown


def _cell(value: object, part: str, form: str) -> str:
    if isinstance(value, dict):
        value = value[part]
    return "-" if value is None else form.format(value)
