"""The command line of `benchmarks/draft_service.py`."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from benchmarks import results
from benchmarks.draft_service_bench.coordinator import FakeCoordinator, Load, Seen
from rich.console import Console
from rich.table import Table

from outrider.roles.awake import cores_awake

_ROOT = Path(__file__).resolve().parents[2]
# Each session makes the time between two commits longer.
_SESSION_MS = 0.15
# Chance that the best child of an accepted node is accepted.
_ACCEPTANCE = 0.85
# Sessions of one coordinator are closed before the next opens its own, and are never mistaken for them.
_incarnations = itertools.count(1)


def run(arguments: list[str]) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="draft_service.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="160m", help="of the model on cuda: the embedded draft's target, widened")
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--repeats", type=int, default=2, help="measurements of each; the table has their medians")
    parser.add_argument("--round-ms", type=float, default=5.0, help="between two commits of a target with few sessions")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--keep-cores-awake", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    console = Console(width=160)
    with _worker(options) as worker, cores_awake(options.keep_cores_awake) as settle, _without_collector():
        serving = _line(worker)
        settle()
        # All numbers of sessions, then all of them again: what drifts shows.
        found = [[_measured(options, worker, serving, count) for count in options.sessions]
                 for _ in range(options.repeats)]  # fmt: skip
    rows = [
        {"sessions": count, "repeats": [repeat[number] for repeat in found]}
        for number, count in enumerate(options.sessions)
    ]
    console.print(_table(rows, options, serving["device"]))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        document = results.provenance("draft_service.py", arguments)
        document |= {"machine": {"name": serving["device"]}, "settings": settings, "rows": rows}
        results.write(document, options.json)
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


def _tell(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{word}\n")
    worker.stdin.flush()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Trees are kept for as long as a measurement lasts, and going through them would hold its messages up."""
    gc.disable()
    yield
    gc.enable()


def _measured(
    options: argparse.Namespace, worker: subprocess.Popen[str], serving: dict[str, Any], sessions: int
) -> dict[str, Any]:
    load = Load(
        sessions=sessions,
        prompt_tokens=options.prompt_tokens,
        round_ms=options.round_ms + _SESSION_MS * sessions,
        acceptance=_ACCEPTANCE,
        temperature=options.temperature,
        vocab_size=serving["vocab_size"],
        max_len=serving["max_len"],
    )
    coordinator = FakeCoordinator(serving["address"], next(_incarnations), load)
    seen = uvloop.run(
        coordinator.run(
            warm_s=options.warm_up,
            measure_s=options.seconds,
            begin=lambda: _tell(worker, "begin"),
            end=lambda: _tell(worker, "end"),
        )
    )
    gc.collect()
    return _figures(_line(worker), seen)


def _figures(own: dict[str, int], seen: Seen) -> dict[str, Any]:
    """Figures of one measurement.

    Returns:
        steps: of the model.
        steps_per_s, nodes_per_s: by the wall clock.
        device_ms: time of a step on the device's clock.
        rows: of a step.
        growing: share of the time in which the worker had something to grow.
        device_idle: share of that in which no step ran on the device.
        commits, tokens_per_commit: of the coordinator.
        answered: share of commits that were continued before their session's next one.
        answer_ms, answer_steps: from a commit to the first growth that continues it: median and 90th percentile.
    """
    seconds, steps = own["ns"] / 1e9, max(own["steps"], 1)
    times, reports = zip(*seen.answers, strict=True) if seen.answers else ((), ())
    return {
        "steps": own["steps"],
        "steps_per_s": own["steps"] / seconds,
        "device_ms": own["device_ns"] / steps / 1e6,
        "rows": own["rows"] / steps,
        "nodes_per_s": own["nodes"] / seconds,
        "growing": own["growing_ns"] / own["ns"],
        "device_idle": 1 - own["growing_device_ns"] / max(own["growing_ns"], 1),
        "commits": seen.commits,
        "tokens_per_commit": seen.tokens / max(seen.commits, 1),
        "answered": len(times) / max(seen.commits, 1),
        "answer_ms": [quantile / 1e6 for quantile in _quantiles(times)],
        "answer_steps": _quantiles(reports),
    }


def _quantiles(values: Sequence[int]) -> list[float]:
    """Median and 90th percentile."""
    if len(values) < 2:
        return [0.0, 0.0]
    cuts = statistics.quantiles(values, n=10)
    return [cuts[4], cuts[8]]


def _table(rows: Sequence[dict[str, Any]], options: argparse.Namespace, device: str) -> Table:
    shape = f", {options.shape}" if options.device == "cuda" else ""
    table = Table(title=f"a draft worker that serves: {device}{shape}, medians of {options.repeats}")
    for name in (
        "sessions", "steps/s", "device, ms", "rows", "nodes/s", "growing, %", "device idle, %", "tokens a commit",
        "answered, %", "commit to growth, ms (p50 p90)", "in steps (p50 p90)",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:

        def median(name: str, place: int | None = None, *, repeats: Sequence[Any] = row["repeats"]) -> float:
            found = [repeat[name] if place is None else repeat[name][place] for repeat in repeats]
            return statistics.median(found)

        table.add_row(
            str(row["sessions"]), f"{median('steps_per_s'):.0f}", f"{median('device_ms'):.3f}", f"{median('rows'):.1f}",
            f"{median('nodes_per_s'):.0f}", f"{100 * median('growing'):.0f}", f"{100 * median('device_idle'):.1f}",
            f"{median('tokens_per_commit'):.2f}", f"{100 * median('answered'):.0f}",
            " ".join(f"{median('answer_ms', place):.2f}" for place in (0, 1)),
            " ".join(f"{median('answer_steps', place):.1f}" for place in (0, 1)),
        )  # fmt: skip
    return table
