"""The command line of benchmarks/sources.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.end_bench.checkpoints import widen
from benchmarks.source_bench.driving import PassFigures, drive
from benchmarks.source_bench.readings import in_between, line, told
from benchmarks.source_bench.services import MIXTURES, ServiceOptions, Services
from benchmarks.source_bench.workloads import NAMES, Workload, workload
from rich.console import Console
from rich.table import Table


def main(arguments: Sequence[str]) -> int:
    """Runs all workloads in all mixtures; a table, and JSON where it is asked for."""
    chosen = _parse(arguments)
    console = Console(stderr=chosen.json)
    with tempfile.TemporaryDirectory() as folder:
        options = _service_options(chosen, Path(folder))
        with Services(options) as services:
            rows = measure(services, chosen, say=lambda line: console.print(f"[dim]{line}", soft_wrap=True))
    # A terminal may be narrower than the table; a file need not be.
    Console(stderr=chosen.json, width=max(console.width, 150)).print(table(rows))
    if chosen.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    return 0


def measure(services: Services, chosen: argparse.Namespace, *, say: Any) -> list[dict[str, Any]]:
    """A row for each workload, temperature, number of sessions, mixture and pass."""
    asked = [workload(name, chosen.requests) for name in chosen.workloads]
    settings = [(own, heat, sessions) for own in asked for heat in chosen.temperatures for sessions in chosen.sessions]
    known: dict[tuple[str, float], PassFigures] = {}
    began, rows = time.monotonic(), []
    for own, temperature, sessions in settings:
        plain: PassFigures | None = None
        for mixture in chosen.mixtures:
            if chosen.time_limit is not None and time.monotonic() - began > chosen.time_limit:
                say(f"no time is left for {own.name}, temperature {temperature:g}, {sessions} sessions, {mixture}")
                continue
            how = {"sessions": sessions, "temperature": temperature, "max_new_tokens": chosen.max_new_tokens}
            passes = _passes(services, own, mixture, **how)
            plain = passes[0] if mixture == "off" else plain
            truth = known.setdefault((own.name, temperature), passes[0])
            key = {"workload": own.name, "temperature": temperature, "sessions": sessions, "mixture": mixture}
            for number, figures in enumerate(passes, start=1):
                rows.append(key | {"pass": number} | compared(figures, plain, truth, passes[0]))
                say(f"{own.name}, {temperature:g}, {sessions} at a time, {mixture}, pass {number}: {_line(rows[-1])}")
                say(f"    {line(figures.told)}")
            if chosen.output is not None:
                # A run that is cut short leaves what it has.
                chosen.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return rows


def _passes(services: Services, own: Workload, mixture: str, **how: Any) -> list[PassFigures]:
    prompts, sessions = own.prompts, how["sessions"]
    with services.mixture(mixture):
        # Whatever is compiled or cached at first is so for the mixture that comes first, too.
        warm = [f"# {number}\nimport os\n" for number in range(sessions)]
        asyncio.run(drive(services.endpoint, warm, mixture, **how))
        count = 1 if mixture == "off" else own.passes
        return [_pass(services, prompts, mixture, **how) for _ in range(count)]


def _pass(services: Services, prompts: Sequence[str], mixture: str, **how: Any) -> PassFigures:
    before = services.readings()
    figures = asyncio.run(drive(services.endpoint, prompts, mixture, **how))
    figures.told = told(in_between(before, services.readings()), figures.seconds)
    return figures


def compared(figures: PassFigures, plain: PassFigures | None, truth: PassFigures, first: PassFigures) -> dict[str, Any]:
    """A pass beside `off`, the first mixture's outputs, and the first pass of its own."""
    return {
        "tokens_per_s": figures.tokens_per_s,
        "to_off": figures.tokens_per_s / plain.tokens_per_s if plain is not None else None,
        "tpot_ms": statistics.median(figures.tpot_ms),
        "acceptance_length": figures.acceptance_length,
        "to_first_pass": figures.acceptance_length / first.acceptance_length,
        "verify_steps": figures.verify_steps,
        "drafted": figures.drafted,
        "accepted": figures.accepted,
        "sources": {
            word: dict(zip(("drafted", "submitted", "accepted"), counts, strict=True))
            for word, counts in figures.sources.items()
        },
        "told": figures.told,
        # In float32 equal but for ties; in bfloat16 a step's size moves the last bits.
        "different_outputs": sum(a != b for a, b in zip(figures.outputs, truth.outputs, strict=True)),
        "requests": len(figures.outputs),
    }


def _line(row: dict[str, Any]) -> str:
    return f"{row['acceptance_length']:.2f} tokens a verification, {row['tokens_per_s']:.0f} tokens/s"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a row."""
    shown = Table(title="sources of growth where text repeats itself")
    for heading in ("workload", "temperature", "sessions", "mixture", "pass"):
        shown.add_column(heading)
    for heading in ("acceptance length", "by first pass", "tokens/s", "by off", "ms a token", "accepted by", "differ"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(
            row["workload"],
            f"{row['temperature']:g}",
            str(row["sessions"]),
            row["mixture"],
            str(row["pass"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['to_first_pass']:.2f}" if row["pass"] > 1 else "",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["to_off"] is None else f"{row['to_off']:.2f}",
            f"{row['tpot_ms']:.2f}",
            ", ".join(f"{word} {counts['accepted']}" for word, counts in row["sources"].items()),
            f"{row['different_outputs']}/{row['requests']}",
        )
    return shown


def _service_options(chosen: argparse.Namespace, folder: Path) -> ServiceOptions:
    target, draft = chosen.target, chosen.draft
    if chosen.shapes is not None:
        target = widen("target", chosen.shapes[0], folder / "target")
        draft = widen("draft", chosen.shapes[1], folder / "draft")
    most = str(max(chosen.sessions))
    return ServiceOptions(
        target=target,
        draft=draft,
        device=chosen.device,
        gpus=chosen.gpus,
        log_folder=chosen.logs,
        threads=chosen.threads,
        coordinator_args=[
            *(
                "--max-running-sessions",
                most,
                "--max-depth",
                str(chosen.max_depth),
                "--max-nodes",
                str(chosen.max_nodes),
            ),
            *chosen.coordinator_args.split(),
        ],
        target_args=["--max-num-seqs", most, *chosen.target_args.split()],
        draft_args=["--max-num-seqs", most, *chosen.draft_args.split()],
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/sources.py",
        description="Each source of growth, and mixtures of them, where text repeats itself.",
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    add("--mixtures", nargs="+", choices=list(MIXTURES), default=["off", "model", "ngram", "model+ngram"])
    add("--requests", type=int, default=50, help="of each workload (default 50)")
    add("--sessions", type=int, nargs="+", default=[1], help="requests at a time (default 1)")
    add("--temperatures", type=float, nargs="+", default=[0.0])
    add("--max-new-tokens", type=int, default=64, help="of each request (default 64)")
    add("--max-depth", type=int, default=8, help="of trees (default 8)")
    add("--max-nodes", type=int, default=24, help="of trees (default 24)")
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--gpus", type=int, default=1, help="with cuda: 2 puts the draft on a GPU of its own")
    add("--shapes", nargs=2, metavar=("TARGET", "DRAFT"), help="the embedded pair in larger shapes, such as 8b 160m")
    add("--target", type=Path, metavar="FOLDER", help="checkpoint; default the embedded target")
    add("--draft", type=Path, metavar="FOLDER")
    add("--threads", type=int, default=1, help="of a target on a CPU (default 1)")
    add("--coordinator-args", default="", help="further options of the role, in one string; so the next two")
    add("--target-args", default="")
    add("--draft-args", default="")
    add("--time-limit", type=float, help="seconds after which no further mixture is begun")
    add("--output", type=Path, metavar="FILE", help="the figures as JSON")
    add("--logs", type=Path, metavar="FOLDER", help="what the processes say")
    add("--json", action="store_true", help="the figures on standard output, the table on the other")
    chosen = parser.parse_args(arguments)
    if (chosen.target is None) != (chosen.draft is None):
        parser.error("--target and --draft: give both folders or none")
    return chosen
