"""The run of benchmarks/end_to_end.py: start, measure cell after cell, stop, tell."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import results
from benchmarks.end_bench import arrivals, report
from benchmarks.end_bench.arrivals import Arrivals
from benchmarks.end_bench.cells import Cell, Setup, cells_of, setups_of
from benchmarks.end_bench.driving import Drivers, Load
from benchmarks.end_bench.figures import CellFigures, as_dicts, categories_as_dicts
from benchmarks.end_bench.options import arrivals_of, parse, plan_of, service_options
from benchmarks.end_bench.prompts import Prompts, conversations_of, prompts_of
from benchmarks.end_bench.services import Services
from rich.console import Console

from outrider.errors import OutriderError

# Sessions of a cell whose every verification is reported: reporting all of them would be a load of its own.
_TRACED = 4
# Until all processes have begun to drive.
_LEAD_S = 0.2
# After the end of a cell, the longest that its processes may take to come back.
_BACK_S = 20.0
# For all prompts to be computed once, on a CPU too.
_PREFILL_S = 120.0
_FAILED = 1


@dataclass(kw_only=True)
class Run:
    """A run and what it has found.

    Attributes:
        given: the command line.
        arguments: of it.
        began_s: when it was started.
        cells: measured.
        arrivals: figures of prompts that arrived beside running sessions.
        left_out: names of cells there was no time for.
        failures: names of cells that failed, with what happened.
    """

    given: Sequence[str]
    arguments: argparse.Namespace
    began_s: float
    cells: list[CellFigures] = field(default_factory=list)
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Time that the run may still take."""
        limit_s = self.arguments.time_limit
        return float("inf") if limit_s is None else self.began_s + limit_s - time.monotonic()

    def report(self) -> dict[str, Any]:
        """Return the results for JSON."""
        return results.provenance("end_to_end.py", self.given) | {
            "machine": results.machine(self.arguments.device),
            "settings": {name: value for name, value in vars(self.arguments).items() if name != "output"},
            "cells": as_dicts(self.cells, scale_to=self.arguments.scale_to),
            "categories": categories_as_dicts(self.cells),
            "arrivals": self.arrivals,
            "left_out": self.left_out,
            "failures": self.failures,
        }

    def write(self) -> None:
        """Into the folder that was asked for, if one was."""
        if self.arguments.output is not None:
            results.write(self.report(), self.arguments.output / "end_to_end.json")


def main(given: Sequence[str]) -> int:
    """Print a table on standard error and JSON on standard output; return the exit code."""
    arguments = parse(given)
    console = Console(file=sys.stderr, width=180, highlight=False)
    run = Run(given=given, arguments=arguments, began_s=time.monotonic())
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        measure(run, console)
    except KeyboardInterrupt:
        console.print("interrupted: what follows was measured before")
    except OutriderError as error:
        run.failures["the run"] = str(error)
    found = run.report()
    console.print(report.table(found["cells"], _title(found)))
    if run.arrivals:
        console.print(report.arrivals_table(run.arrivals))
    for name in run.left_out:
        console.print(f"no time was left for {name}", markup=False)
    for name, failure in run.failures.items():
        console.print(f"{name} failed: {failure}", markup=False)
    run.write()
    results.write(found, None)
    return _FAILED if run.failures or not run.cells else 0


def measure(run: Run, console: Console) -> None:
    """Start everything, measure cell after cell, and stop it."""
    arguments = run.arguments

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - run.began_s:6.1f} s  {text}", markup=False)

    cells = cells_of(plan_of(arguments))
    with ExitStack() as stack:
        wanted = setups_of(cells)
        options = service_options(arguments, setups=len(wanted), most_s=run.left_s)
        services = stack.enter_context(Services(options, wanted, say, log_folder=arguments.output))
        bench = Bench(
            services=services,
            drivers=stack.enter_context(Drivers(processes=arguments.clients)),
            prompts=_prompts(arguments),
            max_new_tokens=arguments.max_new_tokens,
            measure_s=arguments.measure,
        )
        _measure_all(run, bench, cells, say)
        for one in arrivals_of(arguments, cells):
            _measure_arrivals(run, bench, one, say)


def _prompts(arguments: argparse.Namespace) -> Prompts:
    if arguments.prompts is None:
        return prompts_of(arguments.prompt_tokens, arguments.target, most=arguments.prompt_count)
    return conversations_of(arguments.prompts, arguments.target)


def _measure_all(run: Run, bench: Bench, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
    known: set[tuple[Setup, str, int]] = set()
    for number, cell in enumerate(cells):
        way = (cell.setup, cell.mode, cell.sessions)
        warm_up_s = run.arguments.warm_up + (0 if way in known else run.arguments.prepare)
        known.add(way)
        if run.left_s < warm_up_s + bench.measure_s + 2 * _LEAD_S:
            run.left_out += [left.name for left in cells[number:]]
            return
        try:
            run.cells.append(bench.figures(cell, warm_up_s=warm_up_s))
        # One cell's failure should not hide the others.
        except (OutriderError, TimeoutError, ExceptionGroup, OSError) as error:
            run.failures[cell.name] = repr(error)
            say(f"{cell.name}: failed: {error!r}")
            bench.services.check_alive()
        else:
            say(f"{cell.name}: {report.line(as_dicts(run.cells)[-1])}")
        run.write()


def _measure_arrivals(run: Run, bench: Bench, asked: Arrivals, say: Callable[[str], None]) -> None:
    if run.left_s <= 0:
        run.left_out.append(asked.name)
        return
    endpoint = bench.services.endpoints[asked.setup][0]
    if bench.services.links is not None:
        bench.services.links.lengthen("", 0.0)
    try:
        found = arrivals.measure(asked, endpoint, bench.prompts.token_ids, max_new_tokens=bench.max_new_tokens)
    except (OutriderError, ExceptionGroup) as error:
        run.failures[asked.name] = repr(error)
        say(f"{asked.name}: failed: {error!r}")
        bench.services.check_alive()
        run.write()
        return
    run.arrivals.append(found)
    first, longest, usual = (found[name][0] for name in ("ttft_ms", "longest_ms", "usual_longest_ms"))
    say(f"{asked.name}: first token after {first:.1f} ms, longest wait {longest:.1f}, without arrivals {usual:.1f}")
    run.write()


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measures cells.

    Attributes:
        services: that are measured.
        drivers: that put them under load.
        prompts: of the requests.
        max_new_tokens: of every request.
        measure_s: how long a cell is looked at.
        prefilled: prompts that a setup's targets have seen, by number of coordinators, which routes them.
    """

    services: Services
    drivers: Drivers
    prompts: Prompts
    max_new_tokens: int
    measure_s: float
    prefilled: dict[tuple[Setup, int], int] = field(default_factory=dict)

    def figures(self, cell: Cell, *, warm_up_s: float) -> CellFigures:
        """Measure one cell, after this many seconds of its load."""
        if self.services.links is not None:
            self.services.links.lengthen(cell.link, cell.added_ms)
        begin_s = time.monotonic() + _LEAD_S + warm_up_s
        load = Load(
            endpoints=self.services.endpoints[cell.setup][: cell.coordinators],
            prompts=self.prompts,
            first=0,
            sessions=cell.sessions,
            # Steps are numbered by target: of several, one is looked at.
            traced=1 if cell.setup.targets > 1 else min(cell.sessions, _TRACED),
            mode=cell.mode,
            temperature=cell.temperature,
            synthetic=cell.synthetic,
            max_new_tokens=self.max_new_tokens,
            begin_s=begin_s,
            end_s=begin_s + self.measure_s,
        )
        # The first ones; all conversations, which are short.
        first = max(cell.sessions, len(self.prompts.categories))
        routed_by = cell.setup, cell.coordinators
        if first > self.prefilled.get(routed_by, 0):
            begin_s += self._prefill(replace(load, sessions=first))
            load = replace(load, begin_s=begin_s, end_s=begin_s + self.measure_s)
            self.prefilled[routed_by] = first
        futures = self.drivers.drive(load)
        time.sleep(max(0.0, load.begin_s - time.monotonic()))
        before = self.services.totals(cell.setup, cell.coordinators)
        time.sleep(max(0.0, load.end_s - time.monotonic()))
        after = self.services.totals(cell.setup, cell.coordinators)
        driven = [future.result(timeout=_BACK_S) for future in futures]
        return CellFigures.of(cell, driven, before, after, begin_s=load.begin_s, end_s=load.end_s)

    def _prefill(self, load: Load) -> float:
        """Have the target see the first prompt of each session of a load once; return how long that took, in seconds.

        Else the first cell would pay for what the others find in the prefix cache.
        """
        began_s = time.monotonic()
        until_s = began_s + _LEAD_S
        once = replace(load, mode="off", synthetic=(), max_new_tokens=1, traced=0)
        for future in self.drivers.drive(replace(once, begin_s=until_s + _BACK_S / 2, end_s=until_s)):
            future.result(timeout=_PREFILL_S)
        return time.monotonic() - began_s


def _title(found: dict[str, Any]) -> str:
    settings = found["settings"]
    pair = f"{settings['target'] or 'the embedded target'} and its draft"
    gpus = found["machine"].get("gpus")
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{found['machine']['cores']} cores"
    return f"{pair}, {where}"
