"""The benchmark's command line."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernel_bench.timing import GraphTimer, measure_machine
from benchmarks.parallel_bench.models import BenchModel
from benchmarks.parallel_bench.steps import load, measure_rounds
from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError

_SESSIONS = (1, 8, 64)
_CONTEXT = 1024
# For the rounds of one number of sessions; ranks that wait for one another wait no longer.
_PATIENCE_S = 60.0
_NEEDS_CUDA, _FAILED = 2, 1


def run(arguments: Sequence[str]) -> int:
    """Tables on standard error, JSON on standard output or in a file; returns the exit code."""
    options = _parse(arguments)
    console = Console(file=sys.stderr, width=150)
    most = max(ranks for _, ranks in options.models)
    if torch.cuda.device_count() < most:
        console.print(f"{most} CUDA devices are needed, torch finds {torch.cuda.device_count()}")
        return _NEEDS_CUDA
    found: dict[str, Any] = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        machine = measure_machine(GraphTimer(torch.device("cuda", 0), replays=5))
    found["copy_bytes_per_s"] = machine.copy_bytes_per_s
    console.print(f"{machine.name}, copies {machine.copy_bytes_per_s / 1e12:.2f} TB/s")
    found["rounds"], code = [], 0
    for shape, ranks in options.models:
        began = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                model = BenchModel.of(shape, Path(folder), layers=options.layers)
                rows = _measure_model(model, ranks, machine, options)
        except OutriderError as error:
            console.print(f"{shape} on {ranks}: {error}", markup=False)
            code = _FAILED
            continue
        found["rounds"] += rows
        console.print(_rounds_table(rows, f"{shape} on {ranks}, {time.perf_counter() - began:.0f} s in all"))
    text = json.dumps(found, indent=1)
    if options.output_json is None:
        sys.stdout.write(text + "\n")
    else:
        options.output_json.write_text(text + "\n", encoding="utf-8")
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/tensor_parallel.py", description="Times a model's rounds on several GPUs of one host."
    )
    parser.add_argument("models", nargs="+", type=_model, metavar="SHAPE@GPUS", help="such as 8b@1 8b@2 70b@2")
    parser.add_argument("--layers", type=int, help="of the shapes, fewer than theirs: to try it out")
    parser.add_argument("--sessions", type=int, nargs="+", default=list(_SESSIONS), help="rows of a round")
    parser.add_argument("--rounds", type=int, default=50, help="that count")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    return parser.parse_args(arguments)


def _model(text: str) -> tuple[str, int]:
    shape, _, ranks = text.partition("@")
    return shape, int(ranks or 1)


def _measure_model(model: BenchModel, ranks: int, machine: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    target = load(model, ranks, sessions=max(options.sessions), context=_CONTEXT, rounds=options.rounds)
    floor_ms = 1e3 * model.read_bytes(torch.bfloat16, ranks) / machine.copy_bytes_per_s
    rows = []
    try:
        for sessions in options.sessions:
            with target.runner.ranks.guard(_PATIENCE_S):
                times = measure_rounds(target, sessions, context=_CONTEXT, rounds=options.rounds)
            rows.append({"shape": model.name, "ranks": ranks, "floor_ms": floor_ms, **asdict(times)})
    finally:
        target.runner.close()
        del target
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _rounds_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table("sessions", "floor ms", "forward ms", "x floor", "round ms", "x floor", title=title)
    for row in rows:
        floor_ms, forward_ms, round_ms = row["floor_ms"], row["forward_ms"], row["round_ms"]
        cells = (floor_ms, forward_ms, forward_ms / floor_ms, round_ms, round_ms / floor_ms)
        table.add_row(str(row["sessions"]), *(f"{cell:.3f}" for cell in cells))
    return table
