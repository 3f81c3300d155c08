"""The command line of `benchmarks/draft_service.py`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvloop
from benchmarks.draft_service_bench.coordinator import FakeCoordinator, Load, Seen
from rich.console import Console
from rich.table import Table

from outrider.awake import cores_awake

_ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str]) -> int:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(prog="draft_service.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="160m", help="of the model on cuda: the embedded draft's target, widened")
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--round-ms", type=float, default=5.0, help="between two commits of the target, and")
    parser.add_argument("--session-ms", type=float, default=0.15, help="more of it for each session")
    parser.add_argument("--acceptance", type=float, default=0.85, help="of the best child")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--live-nodes", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--device-ms", type=float, default=0.5, help="on cpu: a step of the device")
    parser.add_argument("--launch-ms", type=float, default=0.15, help="on cpu: of the host, to launch it")
    parser.add_argument("--bare-rows", nargs="+", type=int, default=[8, 32, 48, 64], help="of bare steps, by sessions")
    parser.add_argument("--bare-steps", type=int, default=1500)
    parser.add_argument(
        "--steps-begun", type=int, choices=(1, 2), default=2, help="under way at a time; 1: none overlaps another"
    )
    parser.add_argument("--keep-cores-awake", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    if len(options.bare_rows) != len(options.sessions):
        parser.error(f"--bare-rows: {len(options.bare_rows)} given, one for each of --sessions needed")
    console = Console(width=160)
    with _worker(options) as worker, cores_awake(options.keep_cores_awake) as settle:
        serving = _line(worker)
        settle()
        rows = [_measured(options, worker, serving, count) for count in options.sessions]
    console.print(_table(rows))
    console.print(_parts_table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


def _worker(options: argparse.Namespace) -> subprocess.Popen[str]:
    plain = {name: value for name, value in vars(options).items() if name != "json"}
    paths = os.pathsep.join(filter(None, [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.draft_service_bench.worker", json.dumps(plain)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


def _line(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"the worker ended with exit code {worker.wait()}")
    return json.loads(line)


def _measured(
    options: argparse.Namespace, worker: subprocess.Popen[str], serving: dict[str, Any], sessions: int
) -> dict[str, Any]:
    load = Load(
        sessions=sessions,
        prompt_tokens=options.prompt_tokens,
        round_ms=options.round_ms + options.session_ms * sessions,
        acceptance=options.acceptance,
        temperature=options.temperature,
        live_nodes=options.live_nodes,
        vocab_size=serving["vocab_size"],
    )
    coordinator = FakeCoordinator(serving["address"], load)
    seen = uvloop.run(
        coordinator.run(
            warm_s=options.warm_up,
            measure_s=options.seconds,
            begin=lambda: _tell(worker, "begin"),
            end=lambda: _tell(worker, "end"),
        )
    )
    return _figures(sessions, serving["bare"][str(sessions)], seen, _line(worker))


def _tell(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{word}\n")
    worker.stdin.flush()


def _figures(sessions: int, bare: list[float], seen: Seen, own: dict[str, Any]) -> dict[str, Any]:
    ends = dict(own.pop("ends"))
    late = [at - ends[number] for number, at in seen.arrivals if number in ends]
    return {
        "sessions": sessions,
        "bare_ms": bare[0],
        "bare_rows": bare[1],
        "step_ms": 1e3 * own["seconds"] / max(own["steps"], 1),
        "steps_per_s": own["steps"] / own["seconds"],
        "rows": statistics.mean(seen.rows or [0]),
        "tokens_per_round": seen.committed / max(seen.rounds * sessions, 1),
        "to_reader_us": _quantiles(late),
        "commit_to_growth_us": _quantiles(seen.answers),
        **own,
    }


def _quantiles(times_ns: list[int]) -> list[float]:
    """Median and 90th percentile, microseconds."""
    if len(times_ns) < 2:
        return [0.0, 0.0]
    cuts = statistics.quantiles(times_ns, n=10)
    return [cuts[4] * 1e-3, cuts[8] * 1e-3]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="A draft worker that serves")
    for name in (
        "sessions", "bare step, ms", "rows", "step, ms", "rows", "of bare", "steps/s", "tokens a round",
        "step's end to reader, us (p50, p90)", "commit to growth, us (p50, p90)",
        "commits that met 0, 1, 2 steps, %",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["sessions"]), f"{row['bare_ms']:.3f}", f"{row['bare_rows']:.1f}", f"{row['step_ms']:.3f}",
            f"{row['rows']:.1f}", f"{row['step_ms'] / row['bare_ms']:.2f}", f"{row['steps_per_s']:.0f}",
            f"{row['tokens_per_round']:.2f}",
            *(" ".join(f"{value:.0f}" for value in row[name]) for name in ("to_reader_us", "commit_to_growth_us")),
            " ".join(f"{100 * count / max(sum(row['met']), 1):.0f}" for count in row["met"]),
        )  # fmt: skip
    return table


def _parts_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="The growth thread's time, microseconds a step: by the clock / on a processor (calls)")
    names = list(dict.fromkeys(name for row in rows for name in row["wall"]))
    for name in ("sessions", *names):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            f"{row['wall'].get(name, 0):.0f}/{row['cpu'].get(name, 0):.0f} ({row['calls'].get(name, 0):.1f})"
            for name in names
        ]
        table.add_row(str(row["sessions"]), *cells)
    return table
