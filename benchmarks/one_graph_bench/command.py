"""The command line of the benchmark of one-graph rounds."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.one_graph_bench.contenders import Bench
from benchmarks.one_graph_bench.counting import count_rounds
from benchmarks.target_bench.models import BenchModel, folder_model, shape_model
from rich.console import Console
from rich.table import Table

from outrider.engine.eagle_random import write_random_eagle
from outrider.engine.one_graph_shape import RoundShape
from outrider.models import embedded_target_path
from outrider.models.widen import SHAPES

# In an order in which a run that is cut short has told most.
_SESSIONS = (64, 128, 1, 16, 256, 32, 96, 192, 4, 8)
# Rows of a random head's own output layer: as published heads of this size have them.
_DRAFT_VOCAB = 32_000


def run(arguments: Sequence[str]) -> int:
    """Tables on standard error, JSON on standard output or in a file; returns the exit code."""
    options = _parse(arguments)
    began = time.perf_counter()
    console = Console(file=sys.stderr, width=max(Console(file=sys.stderr).width, 150))
    with ExitStack() as stack:
        device = torch.device(options.device)
        model = _model(options, device, stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trained = options.head is not None
        vocab = min(_DRAFT_VOCAB, model.sizes.vocab)
        head = options.head or write_random_eagle(folder / "head", model.folder, draft_vocab_size=vocab)
        shapes = [RoundShape(steps=steps, candidates=candidates) for steps, candidates in options.shapes]
        bench = Bench(
            model,
            head,
            device=options.device,
            context=options.context,
            most=max(options.sessions),
        )
        console.print(f"loaded in {time.perf_counter() - began:.1f} s; {_what(options, model)}")
        rows: list[dict[str, Any]] = []
        for count in options.sessions:
            if time.perf_counter() - began > options.seconds:
                console.print(f"{count} sessions left out: {options.seconds:g} s are over")
                continue
            for temperature in options.temperatures:
                paces = bench.measure(
                    count, shapes, rounds=options.rounds, contenders=options.contenders, temperature=temperature
                )
                rows += [
                    {"sessions": count, "temperature": temperature, "contender": name} | asdict(pace)
                    | {"tokens_per_second": pace.tokens_per_second, "round_ms": pace.round_ms,
                       "free_tokens_per_second": pace.free_tokens_per_second, "tokens_per_round": pace.tokens_per_round,
                       "assumed_tokens_per_second": None if trained else _assumed(name, pace, options.assume)}
                    for name, pace in paces.items()
                ]  # fmt: skip
                told = (f"{name} {pace.tokens_per_second:.0f}/s in {pace.round_ms:.2f} ms"
                        for name, pace in paces.items())  # fmt: skip
                console.print(
                    f"{time.perf_counter() - began:.0f} s, {count} sessions at {temperature:g}: {', '.join(told)}"
                )
                _write(options, rows, None)
        calls = None
        if device.type == "cuda" and options.count and "one-graph" in options.contenders:
            counted = min(options.count, max(options.sessions))
            verifier, sessions = bench.warm_rounds(counted, shapes[0])
            calls = count_rounds(verifier, sessions, rounds=8).as_dict()
            console.print(f"{counted} sessions, a round: {calls}")
    console.print(_table(rows, trained=trained))
    _write(options, rows, calls)
    return 0


def _model(options: argparse.Namespace, device: torch.device, stack: ExitStack) -> BenchModel:
    if options.shape is None:
        return folder_model(options.model or embedded_target_path())
    return stack.enter_context(shape_model(options.shape, device, widened=True))


def _what(options: argparse.Namespace, model: BenchModel) -> str:
    head = f"head {options.head}" if options.head else f"random head, candidates accepted as {options.assume} in `at`"
    return f"{model.name}, {head}, torch {torch.__version__}"


def _assumed(name: str, pace: Any, rate: float) -> float:
    """Tokens a second of rounds of this length, had every step's candidates been right so often."""
    if not name.startswith("one-graph"):
        return pace.tokens_per_second
    steps = int(name.split()[1].partition("x")[0])
    per_round = sum(rate**step for step in range(steps + 1))
    return per_round * pace.sessions * pace.rounds / pace.seconds


def _table(rows: Sequence[dict[str, Any]], *, trained: bool) -> Table:
    columns = [
        "sessions",
        "temperature",
        "contender",
        "tokens/s",
        "without drafting",
        "ms a round",
        "tokens a round",
        "to off",
    ]
    table = Table(*(columns if trained else [*columns, "at"]), title="one-graph rounds")
    off = {_batch(row): row["tokens_per_second"] for row in rows if row["contender"] == "off"}
    for row in sorted(rows, key=_batch):
        base = off.get(_batch(row))
        cells = [
            f"{row['sessions']}",
            f"{row['temperature']:g}",
            row["contender"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['free_tokens_per_second']:.0f}" if row["drafting_seconds"] else "",
            f"{row['round_ms']:.2f}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second'] / base:.2f}" if base else "",
        ]
        if not trained:
            cells.append(f"{row['assumed_tokens_per_second']:.0f}")
        table.add_row(*cells)
    return table


def _batch(row: dict[str, Any]) -> tuple[float, int]:
    return row["temperature"], row["sessions"]


def _write(options: argparse.Namespace, rows: Sequence[dict[str, Any]], calls: dict[str, Any] | None) -> None:
    settings = {name: str(value) for name, value in vars(options).items()}
    text = json.dumps({"settings": settings, "rows": list(rows), "calls": calls}, indent=2) + "\n"
    if options.output_json is not None:
        options.output_json.write_text(text, encoding="utf-8")
    elif calls is not None or options.device == "cpu":
        sys.stdout.write(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/one_graph.py", description="One-graph rounds over batch sizes.")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=sorted(SHAPES), help="the embedded target widened to it, in memory")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint (default the embedded target)")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="an EAGLE head for it (default a random one)")
    parser.add_argument("--sessions", type=int, nargs="+", default=_SESSIONS, help="batch sizes, in this order")
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", default=[(1, 1)], metavar="STEPSxCANDIDATES", help="of rounds (1x1)"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=["off", "tree", "one-graph"], default=["off", "tree", "one-graph"]
    )
    parser.add_argument("--rounds", type=int, default=24, help="measured of each")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0], help="of all sessions (0: greedy, which soon repeats)"
    )
    parser.add_argument("--assume", type=float, default=0.75, help="acceptance of a random head's candidates")
    parser.add_argument("--count", type=int, default=64, help="sessions of the rounds whose calls are counted; 0: none")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further batch size is begun after so many")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    return parser.parse_args(arguments)


def _shape(text: str) -> tuple[int, int]:
    steps, _, candidates = text.partition("x")
    try:
        return int(steps), int(candidates)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} given, such as 2x1 needed") from error
