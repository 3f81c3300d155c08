"""The command line that counts choices which differ from those of sessions alone."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.rounds.loading import load_target
from benchmarks.target_bench.forced import MIXES, Difference, Pass, Runs, Text
from benchmarks.target_bench.models import BenchModel, folder_model, shape_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from outrider.models import embedded_target_path, held_out_prompts
from outrider.models.widen import SHAPES
from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig

_FAILED = 1
# In float32 two scores so near each other may change places; what is further apart must not.
_NEAR = 1e-4
_LONGEST_PROMPT = 96
_STEP_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Line:
    """One pass at one temperature.

    Attributes:
        mix: name of the pass.
        temperature: of its texts.
        compared: positions.
        rounds, accepted: rounds of the pass, and nodes accepted in them, all temperatures together.
        differences: choices that differ.
        counted: of these, the ones that fail the run.
        gaps: between the scores of both tokens, of the differences that were looked at.
    """

    mix: str
    temperature: float
    compared: int
    rounds: int
    accepted: int
    differences: int
    counted: int
    gaps: list[float]

    @property
    def share(self) -> float:
        """Of the positions."""
        return self.differences / max(self.compared, 1)


def run(arguments: Sequence[str]) -> int:
    """Table on standard error, JSON on standard output or in a file; returns the exit code."""
    options = _parse(arguments)
    console = Console(file=sys.stderr, width=max(Console(file=sys.stderr).width, 150))
    device = torch.device(options.device)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if options.shape is not None:
            model = stack.enter_context(shape_model(options.shape, device))
        else:
            model = folder_model(options.model or embedded_target_path())
        lines = _measure(model, options, console)
    console.print(_table(lines, model, options))
    report = {
        "model": model.name,
        "settings": {name: str(value) for name, value in vars(options).items()} | {"torch": torch.__version__},
        "lines": [{**asdict(line), "share": line.share} for line in lines],
    }
    text = json.dumps(report, indent=2) + "\n"
    if options.output_json is None:
        sys.stdout.write(text)
    else:
        options.output_json.write_text(text, encoding="utf-8")
    return _FAILED if any(line.counted for line in lines) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="benchmarks/same_tokens.py", description="How often a token depends on what else its round computes."
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="FOLDER", help="default: the embedded target")
    model.add_argument("--shape", choices=sorted(SHAPES), help="the embedded target, widened in memory")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default the device's own")
    parser.add_argument("--deterministic", action="store_true", help="serve with fixed sums; nothing may differ then")
    parser.add_argument("--sessions", type=int, default=32 if on_gpu else 4, help="texts side by side")
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 64, help="of each text")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="texts take turns")
    parser.add_argument("--looked-at", type=int, default=128, help="most differences whose scores are looked at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    return parser.parse_args(arguments)


def _measure(model: BenchModel, options: argparse.Namespace, console: Console) -> list[Line]:
    texts = _texts(model, options)
    # A session that is opened anew stands beside the one that it follows until rounds under way have ended.
    sessions, longest = 2 * options.sessions, _LONGEST_PROMPT + options.tokens
    config = TargetWorkerConfig(
        model_path=model.folder,
        device=options.device,
        dtype=options.dtype,
        deterministic=options.deterministic,
        max_num_seqs=sessions,
        max_model_len=longest,
        max_step_tokens=max(_STEP_ROWS, sessions),
        num_slots=sessions * (longest + 64),
        enable_prefix_caching=False,
    )
    target = load_target(config, source=model.source)
    runs = Runs(target.loop, seed=options.seed)
    began = time.perf_counter()
    rounds = runs.alone(texts)
    console.print(f"alone: {len(texts)} texts of {options.tokens} tokens in {rounds} rounds, {_seconds(began)}")
    lines = []
    for mix in MIXES:
        began = time.perf_counter()
        found = runs.beside(texts, mix)
        lines += _lines(found, _look(runs, texts, found, options.looked_at), texts, options)
        console.print(f"{mix.name}: {found.compared.total()} positions, {_seconds(began)}")
        if found.interrupted:
            console.print("interrupted: the rest is left out")
            break
    target.runner.close()
    return lines


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"


def _texts(model: BenchModel, options: argparse.Namespace) -> list[Text]:
    """Beginnings of held-out prompts; where there are more texts than prompts, of another length."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in held_out_prompts()]
    texts = []
    for number in range(options.sessions):
        prompt = prompts[number % len(prompts)][: _LONGEST_PROMPT - 7 * (number // len(prompts) % 8)]
        sampling = SamplingSpec(
            temperature=options.temperatures[number % len(options.temperatures)],
            seed=options.seed + number,
            max_new_tokens=options.tokens,
        )
        texts.append(Text(prompt=prompt, sampling=sampling, output=[]))
    return texts


def _look(runs: Runs, texts: Sequence[Text], found: Pass, most: int) -> list[Difference]:
    """Return the differences, the first of them with their gaps."""
    some = found.differences[:most]
    gaps = runs.gaps(texts, some)
    return [replace(own, gap=gap) for own, gap in zip(some, gaps, strict=True)] + found.differences[most:]


def _lines(
    found: Pass, differences: Sequence[Difference], texts: Sequence[Text], options: argparse.Namespace
) -> list[Line]:
    lines = []
    for temperature in options.temperatures:
        here = [one for one in differences if texts[one.text].sampling.temperature == temperature]
        lines.append(
            Line(
                mix=found.name,
                temperature=temperature,
                compared=found.compared[temperature],
                rounds=found.rounds,
                accepted=found.accepted,
                differences=len(here),
                counted=sum(_counts(one, options) for one in here),
                gaps=[one.gap for one in here if not math.isnan(one.gap)],
            )
        )
    return lines


def _counts(difference: Difference, options: argparse.Namespace) -> bool:
    """Whether the difference must not be."""
    in_float32 = options.dtype == "float32" or (options.dtype is None and options.device == "cpu")
    # A gap that was not looked at counts: it would have to be excused.
    return options.deterministic or (in_float32 and not difference.gap <= _NEAR)


def _table(lines: Sequence[Line], model: BenchModel, options: argparse.Namespace) -> Table:
    mode = " --deterministic" if options.deterministic else ""
    table = Table(title=f"Choices that differ from those of a session alone: {model.name}, {options.device}{mode}")
    for name in (
        "pass",
        "temperature",
        "positions",
        "rounds",
        "accepted",
        "differ",
        "share",
        "gap p50",
        "gap p90",
        "gap max",
        "fail",
    ):
        table.add_column(name, justify="left" if name == "pass" else "right")
    for line in lines:
        gaps: list[Any] = [f"{np.percentile(line.gaps, p):.2g}" for p in (50, 90, 100)] if line.gaps else ["", "", ""]
        table.add_row(
            line.mix,
            f"{line.temperature:g}",
            str(line.compared),
            str(line.rounds),
            str(line.accepted),
            str(line.differences),
            f"{line.share:.5%}",
            *gaps,
            str(line.counted),
        )
    return table
