"""The command line of `benchmarks/draft_step.py`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.draft_bench.drive import Measured, Point, measure
from benchmarks.draft_bench.models import growth_config, idle_growth, shape_growth
from benchmarks.draft_bench.parts import host_parts
from rich.console import Console
from rich.table import Table

from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.engine.model_runner import ModelRunner

_POINTS = [Point(sessions=sessions, width=width) for sessions in (1, 16) for width in (8, 16, 64) if width >= sessions]
_PARTS = ("parts", "host", "device")
_WAYS = ("graph", "one at a time", "logits")
# Milliseconds of a period, for up to 64 nodes.
_TARGETS = {"160m": 0.75, "1b": 1.5}


def run(arguments: list[str]) -> int:
    """Measures what was asked for and prints the table."""
    parser = argparse.ArgumentParser(prog="draft_step.py")
    parser.add_argument("--only", nargs="+", choices=_PARTS, help="default: all that this machine can do")
    parser.add_argument("--shape", nargs="+", choices=tuple(_TARGETS), default=list(_TARGETS))
    parser.add_argument("--points", nargs="+", type=_point, default=_POINTS, help="SESSIONSxWIDTH")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--steps", type=int, default=300, help="steps of each measurement")
    parser.add_argument(
        "--graph-cuts",
        nargs="+",
        type=_cuts,
        default=[GrowthConfig.graph_cuts],
        help="of the device's steps: each the layers that graphs of a step end with, such as 2,8, or none",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    parts = options.only or [part for part in _PARTS if part != "device" or torch.cuda.is_available()]
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if "host" in parts:
        for point in options.points:
            with idle_growth(point) as growth:
                rows.append(_row("host alone", "", point, measure(growth, point, steps=options.steps, warm=40)))
    if "device" in parts:
        for shape in options.shape:
            for cuts in options.graph_cuts:
                with shape_growth(shape, options.points) as runner:
                    rows += _device_rows(shape, runner, options, cuts)
                torch.cuda.empty_cache()
    if rows:
        Console(width=140).print(_table(rows))
    if "parts" in parts:
        Console(width=140).print(_parts_table(options.points, options.steps))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


def _parts_table(points: list[Point], steps: int) -> Table:
    table = Table(title="host, microseconds of processor time: lowest tenths")
    for point in points:
        with idle_growth(point) as growth:
            found = host_parts(growth, point, steps=steps)
        if not table.columns:
            for name in ("sessions", "width", *found):
                table.add_column(name, justify="right")
        table.add_row(str(point.sessions), str(point.width), *(f"{value:.0f}" for value in found.values()))
    return table


def _device_rows(
    shape: str, runner: ModelRunner, options: argparse.Namespace, cuts: tuple[int, ...]
) -> list[dict[str, Any]]:
    rows = []
    begin = time.perf_counter()
    widest = growth_config(max(options.points, key=lambda point: point.width))
    TreeGrowth(runner, replace(widest, graph_cuts=cuts)).warm_up()
    assert runner.steps is not None
    Console().print(f"{shape}, cuts {cuts}: {runner.steps.graphs} graphs in {time.perf_counter() - begin:.1f} s")
    for point in options.points:
        for way in options.ways:
            growth = TreeGrowth(runner, growth_config(point))
            if way == "logits":
                growth._launcher._steps = None
            elif way == "one at a time":
                growth.most_begun = 1

            def settle() -> None:
                assert runner.steps is not None
                while (bucket := runner.steps.missing) is not None:
                    runner.steps.capture(bucket)

            try:
                found = measure(growth, point, steps=options.steps, warm=40, settle=settle)
            except Exception as error:  # noqa: BLE001 - the other points are measured all the same
                Console().print(f"{shape} {way} {point}: {error!r}")
                continue
            rows.append(_row(shape, way, point, found) | {"cuts": ",".join(map(str, cuts)) or "none"})
            Console(width=160).print({name: _short(value) for name, value in rows[-1].items()})
    return rows


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _row(model: str, way: str, point: Point, found: Measured) -> dict[str, Any]:
    return {"model": model, "way": way, "sessions": point.sessions, "width": point.width, **asdict(found)}


def _point(text: str) -> Point:
    sessions, width = text.split("x")
    return Point(sessions=int(sessions), width=int(width))


def _cuts(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(int, text.split(",")))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="a growth step, milliseconds")
    for name in (
        "model", "way", "cuts", "sessions", "width", "period", "p90", "mean", "launch to children", "device",
        "commit, us", "target",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{row[name]:.3f}" for name in ("period", "high", "mean", "forward", "device")]
        target = str(_TARGETS.get(row["model"], "")) if row["way"] == "graph" else ""
        names = [str(row.get(name, "")) for name in ("model", "way", "cuts", "sessions", "width")]
        table.add_row(*names, *times, f"{row['commit']:.0f}", target)
    return table
