"""The benchmark's command line, and plain rounds of a model on several GPUs: one row a session, behind a context."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import results
from benchmarks.kernel_bench.timing import GraphTimer, measure_machine
from benchmarks.parallel_bench.models import BenchModel
from benchmarks.rounds.driving import BenchSession, Driver, Recorder
from benchmarks.rounds.figures import figures
from benchmarks.rounds.loading import Target, load_target
from rich.console import Console
from rich.table import Table

from outrider.errors import OutriderError
from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig

_SESSIONS = (1, 8, 64)
_CONTEXT = 1024
# For the rounds of one number of sessions; ranks that wait for one another wait no longer.
_PATIENCE_S = 60.0
# Tokens of each session that run beside prefill, and before all sessions run.
_SPARE_TOKENS = 256
_NEEDS_CUDA, _FAILED = 2, 1


def run(arguments: Sequence[str]) -> int:
    """Print tables on standard error, and JSON on standard output or in a file; return the exit code."""
    options = _parse(arguments)
    console = Console(file=sys.stderr, width=150)
    most = max(ranks for _, ranks in options.models)
    if torch.cuda.device_count() < most:
        console.print(f"{most} CUDA devices are needed, torch finds {torch.cuda.device_count()}")
        return _NEEDS_CUDA
    found = results.provenance("tensor_parallel.py", arguments) | {"machine": results.machine("cuda")}
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
    results.write(found, options.output_json)
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


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Medians over the rounds of so many sessions, in milliseconds.

    Attributes:
        sessions: S, and rows of a round.
        round_ms: from the end of a round to the end of the next one.
        forward_ms: of it, the forward pass.
    """

    sessions: int
    round_ms: float
    forward_ms: float


def load(model: BenchModel, ranks: int, *, sessions: int, context: int, rounds: int) -> Target:
    """Load a shape on so many GPUs, for `measure_rounds` of up to so many sessions."""
    config = TargetWorkerConfig(
        model_path=model.folder,
        device="cuda",
        max_num_seqs=sessions,
        max_model_len=context + rounds + _SPARE_TOKENS,
        num_slots=sessions * (context + rounds + 2 * _SPARE_TOKENS),
        tensor_parallel_size=ranks,
        enable_prefix_caching=False,
    )
    return load_target(config, source=model.source())


def measure_rounds(target: Target, sessions: int, *, context: int, rounds: int) -> RoundTimes:
    """Return the times of at least so many rounds of sessions side by side, each behind so many tokens."""
    recorder = Recorder()
    driver = Driver(target.loop, None, recorder, may_measure=lambda: True)
    driver.generate(
        [
            BenchSession(
                number=number,
                prompt=_prompt(number, context, target.runner.vocab_size),
                sampling=SamplingSpec(max_new_tokens=rounds + _SPARE_TOKENS),
            )
            for number in range(1, sessions + 1)
        ],
        is_enough=lambda: recorder.counted >= rounds,
    )
    found = figures(recorder.rounds)
    return RoundTimes(sessions=sessions, round_ms=found["round_ms"][0], forward_ms=found["forward_ms"][0])


def _prompt(number: int, length: int, vocab_size: int) -> Sequence[int]:
    return random.Random(number).choices(range(vocab_size), k=length)
