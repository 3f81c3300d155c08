"""The command line of the target worker's benchmark."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
COLUMNS = ("ours", "transformers")
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
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS, help="of the steps (default both)")
    parser.add_argument(
        "--prefill-tokens", type=int, metavar="ROWS", help="most of a step that prefills (default as served)"
    )
    parser.add_argument("--deterministic", action="store_true", help="serve with fixed orders of every sum")
    parser.add_argument(
        "--quantization", choices=["fp8"], help="serve with layers of 8 bits; transformers' columns keep their 16"
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
    points = points_that_fit(model, _points(options), device) if "steps" in options.only else []
    report = Report(
        model=model,
        machine=machine,
        settings=settings,
        rows=[StepRow(point=point) for point in points],
        quantized=options.quantization is not None,
    )
    attempts = _Attempts(report, options.only, console)
    if "ours" in options.columns:
        _measure_worker(report, options, attempts)
    free_memory()
    if "transformers" in options.columns and attempts.wants("steps"):
        compiled = set(ASKED if options.compiled is None else options.compiled)
        repeats = 5 if options.quick else 15
        with attempts.one("steps"):
            measure_transformers(
                model, report.rows, device, attempts.say, repeats=repeats, compiled=compiled.__contains__
            )
    report.failures += [f"{row.point}: {failure}" for row in report.rows for failure in row.failures]
    return report


class _Attempts:
    """Parts of a run, each of which may fail without hiding the figures of the others."""

    def __init__(self, report: Report, wanted: Collection[str], console: Console) -> None:
        self._report, self._wanted, self._console = report, set(wanted), console
        self._began = time.perf_counter()

    def say(self, text: str) -> None:
        """A line with the time since the begin."""
        self._console.print(f"{time.perf_counter() - self._began:6.1f} s  {text}", markup=False)

    def wants(self, name: str) -> bool:
        """Whether the part is asked for, and nobody has interrupted the run."""
        return name in self._wanted

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """A part: what it raises is reported; an interrupt leaves out the parts after it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 told in the report
            traceback.print_exc()
            self._report.failures.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
        except KeyboardInterrupt:
            self._wanted.clear()
            self._report.failures.append(f"{name}: interrupted, and what comes after it was left out")
        self.say(f"{name} done")


def _measure_worker(report: Report, options: argparse.Namespace, attempts: _Attempts) -> None:
    """All but transformers' columns, on one worker, whose memory is free afterwards."""
    worker = Worker(report.model, _config(report, options))
    attempts.say("loaded")
    if attempts.wants("steps"):
        with attempts.one("steps"):
            measure_ours(worker, report.rows, attempts.say, repeats=_repeats(options))
    if any(attempts.wants(name) for name in PARTS[1:]):
        # As a worker does before it serves.
        worker.runner.warm_up()
        attempts.say("graphs captured")
    for name, measure in _serving_parts(report, worker, options):
        if attempts.wants(name):
            with attempts.one(name):
                measure()


def _config(report: Report, options: argparse.Namespace) -> TargetWorkerConfig:
    """A worker that all parts fit in."""
    needs = [{"max_num_seqs": 40, "max_tree_nodes": 64, "max_step_tokens": 512, "max_model_len": 16384, "num_slots": 1}]
    if set(options.only) - {"steps"}:
        # Two groups of sixteen sessions take turns, or a prompt of 8,192 tokens comes.
        needs.append({"num_slots": 1 << 17})
    if "steps" in options.only:
        needs.append(steps_config([row.point for row in report.rows], repeats=_repeats(options)))
    if "mixed" in options.only:
        needs.append(mixed_config(sessions=16, context=1024, prompt=32768, steps=_mixed_steps(options)))
    most = {name: max(need.get(name, 0) for need in needs) for name in needs[0]}
    return worker_config(
        report.model,
        options.device,
        max_prefill_tokens=options.prefill_tokens,
        deterministic=options.deterministic,
        quantization=options.quantization,
        **most,
    )


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
