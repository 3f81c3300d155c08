"""The command line of the target worker's benchmark."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers
from benchmarks.kernel_bench.report import describe
from benchmarks.kernel_bench.timing import GraphTimer, measure_machine
from benchmarks.target_bench.models import BenchModel, folder_model, shape_model
from benchmarks.target_bench.points import ASKED, CONTEXTS, QUICK, Point, grid
from benchmarks.target_bench.report import Report
from benchmarks.target_bench.serving import measure_idle, measure_mixed, measure_prefill, mixed_config
from benchmarks.target_bench.steps import StepRow, measure_ours, measure_transformers, points_that_fit, steps_config
from benchmarks.target_bench.trace import measure_trace
from benchmarks.target_bench.transformers_steps import free_memory
from benchmarks.target_bench.worker import Worker, worker_config
from rich.console import Console

from outrider.models.widen import SHAPES
from outrider.target_worker.config import TargetWorkerConfig

PARTS = ("steps", "idle", "prefill", "mixed", "trace")
_NEEDS_CUDA, _FAILED = 2, 1
_REPLAYS = 9


def run(arguments: Sequence[str]) -> int:
    """Tables on standard error, JSON on standard output or in a file; returns the exit code."""
    options = _parse(arguments)
    console = Console(file=sys.stderr, width=max(Console(file=sys.stderr).width, 190))
    if options.list:
        for point in _points(options):
            sys.stdout.write(f"{point.tokens}x{point.sessions}@{point.context}\n")
        return 0
    if not torch.cuda.is_available():
        console.print("this benchmark needs a CUDA device, and torch finds none; --list shows what it would measure")
        return _NEEDS_CUDA
    device = torch.device(options.device)
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        model = (
            folder_model(options.model)
            if options.model is not None
            else stack.enter_context(shape_model(options.shape, device, widened=False))
        )
        report = _measure(model, device, options, console)
    for table in report.tables():
        console.print(table)
    for failure in report.failures:
        console.print(f"failed: {failure}", markup=False)
    text = json.dumps(report.as_dict(), indent=2) + "\n"
    if options.output_json is None:
        sys.stdout.write(text)
    else:
        options.output_json.write_text(text, encoding="utf-8")
    return _FAILED if report.failures else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/target_step.py",
        description="How fast the target worker is on one GPU, and how fast it could be.",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="with random weights (default 8b)")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint instead of a shape")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default everything)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument(
        "--points", nargs="+", type=_point, metavar="TOKENSxSESSIONS@CONTEXT", help="instead of the grid"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="of the grid")
    parser.add_argument(
        "--compiled", nargs="*", type=_point, metavar="POINT", default=None,
        help="where transformers is compiled as well: takes most of the time (default: where a target is stated)",
    )  # fmt: skip
    parser.add_argument("--without-transformers", action="store_true", help="Outrider and the floor alone")
    parser.add_argument(
        "--prefill-tokens", type=int, metavar="ROWS", help="most of a step that prefills (default as served)"
    )
    parser.add_argument("--list", action="store_true", help="name the sizes and stop; needs no GPU")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    return parser.parse_args(arguments)


def _point(text: str) -> Point:
    try:
        return Point.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _points(options: argparse.Namespace) -> list[Point]:
    if options.points:
        return list(options.points)
    return list(QUICK) if options.quick else grid(options.contexts)


def _measure(model: BenchModel, device: torch.device, options: argparse.Namespace, console: Console) -> Report:
    with torch.inference_mode():
        machine = measure_machine(GraphTimer(device, replays=_REPLAYS))
    free_memory()
    console.print(describe(machine))
    settings = {name: str(value) for name, value in vars(options).items()} | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
    report = Report(model=model, machine=machine, settings=settings)
    points = points_that_fit(model, _points(options), device)
    report.rows = rows = [StepRow(point=point) for point in points] if "steps" in options.only else []

    def say(text: str) -> None:
        console.print(text, markup=False)

    def attempt(name: str, measure: Callable[[], None]) -> None:
        if name not in options.only:
            return
        began = time.perf_counter()
        try:
            measure()
        except Exception as error:  # noqa: BLE001 one part that fails must not hide the figures of the others
            traceback.print_exc()
            report.failures.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
        say(f"{name}: {time.perf_counter() - began:.1f} s")

    _measure_worker(report, points, options, attempt, say)
    free_memory()
    if not options.without_transformers:
        compiled = set(ASKED if options.compiled is None else options.compiled)
        repeats = 5 if options.quick else 15
        attempt("steps", lambda: measure_transformers(
            model, rows, device, say, repeats=repeats, compiled=compiled.__contains__
        ))  # fmt: skip
    report.failures += [f"{row.point}: {failure}" for row in rows for failure in row.failures]
    return report


def _measure_worker(
    report: Report,
    points: Sequence[Point],
    options: argparse.Namespace,
    attempt: Callable[[str, Callable[[], None]], None],
    say: Callable[[str], None],
) -> None:
    """All parts but transformers' columns, on one worker, whose memory is free afterwards."""
    worker = Worker(report.model, _config(report.model, points, options))
    attempt("steps", lambda: measure_ours(worker, report.rows, say, repeats=_repeats(options)))
    for name, measure in _serving_parts(report, worker, options):
        attempt(name, measure)


def _config(model: BenchModel, points: Sequence[Point], options: argparse.Namespace) -> TargetWorkerConfig:
    """A worker that all parts fit in."""
    limits = {
        "max_num_seqs": 40,
        "max_tree_nodes": 64,
        "max_step_tokens": 512,
        "max_model_len": 16384,
        "num_slots": 1 << 17,
    }
    needs = [limits]
    if "steps" in options.only:
        needs.append(steps_config(points, repeats=_repeats(options)))
    if "mixed" in options.only:
        needs.append(mixed_config(sessions=16, context=1024, prompt=32768, steps=_mixed_steps(options)))
    most = {name: max(need.get(name, 0) for need in needs) for name in limits}
    return worker_config(model, options.device, max_prefill_tokens=options.prefill_tokens, **most)


def _repeats(options: argparse.Namespace) -> int:
    return 10 if options.quick else 25


def _mixed_steps(options: argparse.Namespace) -> int:
    return 100 if options.quick else 300


def _serving_parts(
    report: Report, worker: Worker, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is measured of a running worker, by the name of its part."""
    quick = options.quick

    def idle(sessions: int, rows: int) -> None:
        steps = 60 if quick else 200
        report.idle.append(measure_idle(worker, sessions=sessions, rows=rows, context=1024, steps=steps))

    def prefill() -> None:
        report.prefill.append(measure_prefill(worker, report.machine, prompt=8192, prompts=2 if quick else 5))

    def mixed() -> None:
        steps = _mixed_steps(options)
        report.mixed.append(measure_mixed(worker, sessions=16, rows=8, context=1024, prompt=32768, steps=steps))

    def trace() -> None:
        report.trace.append(measure_trace(worker, point=Point(1024, 16, 128), steps=40))

    yield "idle", lambda: idle(1, 64)
    yield "idle", lambda: idle(16, 8)
    yield "prefill", prefill
    yield "mixed", mixed
    yield "trace", trace
