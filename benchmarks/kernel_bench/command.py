"""The benchmark's command line: which cases, on what, and where the figures go."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks import results
from benchmarks.kernel_bench import attention, pool, probabilities, sampling
from benchmarks.kernel_bench.case import Case, Machine, Work
from benchmarks.kernel_bench.report import LeftOut, Row, Times, make_row, print_report
from benchmarks.kernel_bench.timing import GraphTimer, measure_machine, time_eagerly_us
from rich.console import Console

_GROUPS = (attention, sampling, probabilities, pool)
_NEEDS_CUDA, _FAILED = 2, 1
_QUICK_REPLAYS, _REPLAYS = 5, 21


def all_cases() -> list[Case]:
    """Every case of every group; needs neither CUDA nor FlashInfer."""
    return [case for group in _GROUPS for case in group.cases()]


def run(arguments: Sequence[str]) -> int:
    """Print tables on standard error, and JSON on standard output or in a file; return the exit code."""
    options = _parse(arguments)
    console = Console(file=sys.stderr, width=max(Console(file=sys.stderr).width, 170))
    cases = [case for case in all_cases() if _is_wanted(case, options.only)]
    if not cases:
        console.print(f"no operator is called {' or '.join(options.only)}; --list names them", markup=False)
        return _NEEDS_CUDA
    if options.list:
        for case in cases:
            sys.stdout.write(f"{case.operator}: {case.shape}\n")
        return 0
    if not torch.cuda.is_available():
        console.print("this benchmark needs a CUDA device, and torch finds none; --list shows what it would measure")
        return _NEEDS_CUDA
    flashinfer = _flashinfer(console)
    timer = GraphTimer(torch.device(options.device), replays=_QUICK_REPLAYS if options.quick else _REPLAYS)
    with torch.inference_mode(), torch.cuda.device(timer.device):
        machine = measure_machine(timer)
        rows, left_out = _measure(cases, timer, machine, flashinfer, console, quick=options.quick)
    print_report(rows, left_out, machine, console)
    _write(rows, left_out, machine, options)
    return _FAILED if left_out else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/kernels.py", description="Times the operators of rounds and growth steps on one GPU."
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="operators, by (a part of) their name")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no references")
    parser.add_argument("--list", action="store_true", help="name the cases and stop; needs no GPU")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    return parser.parse_args(arguments)


def _is_wanted(case: Case, only: Sequence[str]) -> bool:
    return not only or any(name in case.operator for name in only)


def _flashinfer(console: Console) -> Any:
    if importlib.util.find_spec("flashinfer") is None:
        console.print("FlashInfer is not installed (pip install 'outrider[flashinfer]'): its columns are left out")
        return None
    return importlib.import_module("flashinfer")


def _measure(
    cases: Sequence[Case], timer: GraphTimer, machine: Machine, flashinfer: Any, console: Console, *, quick: bool
) -> tuple[list[Row], list[LeftOut]]:
    """All cases one after the other, then all once more: the second time shows the noise of the machine."""
    first: dict[int, tuple[Times, Work, float | None]] = {}
    rows, left_out = [], []
    for number, case in enumerate(cases):
        began = time.perf_counter()
        try:
            first[number] = _measure_case(case, timer, flashinfer, with_reference=not quick)
            ours = f"{first[number][0].ours_us:.2f} us"
            console.print(f"{case.operator}, {case.shape}: {ours} ({time.perf_counter() - began:.1f} s)", markup=False)
        except Exception as error:  # noqa: BLE001 one operator that fails must not hide the figures of the others
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            left_out.append(LeftOut(operator=case.operator, shape=case.shape, reason=reason))
        torch.cuda.empty_cache()
    for number, (times, work, reference_us) in first.items():
        again, _, _ = _measure_case(cases[number], timer, flashinfer, with_reference=False)
        rows.append(make_row(cases[number], work, machine, first=times, again=again, reference_us=reference_us))
        torch.cuda.empty_cache()
    return rows, left_out


def _measure_case(
    case: Case, timer: GraphTimer, flashinfer: Any, *, with_reference: bool
) -> tuple[Times, Work, float | None]:
    torch.manual_seed(0)
    subject = case.build(timer.device, flashinfer)
    times = Times(
        ours_us=timer.time_us(subject.ours, subject.restore),
        flashinfer_us=None if subject.flashinfer is None else timer.time_us(subject.flashinfer),
        beside_us={heading: timer.time_us(other) for heading, other in subject.beside.items()},
    )
    reference_us = None
    if with_reference and subject.reference is not None:
        reference_us = time_eagerly_us(subject.reference, repeats=3)
    return times, subject.work, reference_us


def _write(rows: Sequence[Row], left_out: Sequence[LeftOut], machine: Machine, options: argparse.Namespace) -> None:
    document = results.provenance("kernels.py", sys.argv[1:])
    document |= {
        "machine": asdict(machine),
        "settings": {"quick": options.quick, "only": options.only},
        "rows": [row.as_dict() for row in rows],
        "left_out": [asdict(case) for case in left_out],
    }
    results.write(document, options.output_json)
