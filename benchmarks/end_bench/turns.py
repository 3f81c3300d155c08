"""What speculation is worth on one machine, the modes taking turns; see benchmarks/modes.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.end_bench.report import machine
from rich.console import Console
from rich.table import Table

from outrider.client import AsyncClient
from outrider.local import LocalService
from outrider.models import held_out_prompts

MODES = ("off", "sync", "async")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One mode at one number of sessions, medians over the repeats."""

    mode: str
    sessions: int
    tokens_per_second: float
    ratio_to_off: float
    acceptance_length: float
    tpot_ms: float
    ttft_ms: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass over the prompts."""

    tokens_per_second: float
    acceptance_length: float
    tpot_ms: float
    ttft_ms: float


async def run_once(
    endpoint: str, prompts: Sequence[str], *, mode: str, sessions: int, max_new_tokens: int, temperature: float
) -> Run:
    """Generates from all prompts, `sessions` at a time."""
    gate = asyncio.Semaphore(sessions)
    async with AsyncClient(endpoint) as client:

        async def one(number: int, prompt: str):
            async with gate:
                return await client.generate(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=number,
                    ignore_eos=True,
                    speculation=mode,  # type: ignore[arg-type]
                )

        began = time.perf_counter()
        outputs = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        seconds = time.perf_counter() - began
    steps = sum(output.speculation.verify_steps for output in outputs)
    accepted = sum(output.speculation.accepted_tokens for output in outputs)
    return Run(
        tokens_per_second=sum(output.usage.completion_tokens for output in outputs) / seconds,
        acceptance_length=1 + accepted / steps,
        tpot_ms=statistics.median(output.timings.tpot_ms for output in outputs),
        ttft_ms=statistics.median(output.timings.ttft_ms for output in outputs),
    )


def measure(arguments: argparse.Namespace, endpoints: dict[str, str]) -> list[Measurement]:
    """All modes at all numbers of sessions, taking turns."""
    prompts = held_out_prompts()[: arguments.prompts]
    measurements = []
    for sessions in arguments.sessions:
        runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
        for repeat in range(arguments.repeats + 1):
            for mode in MODES:
                run = asyncio.run(
                    run_once(
                        endpoints[mode],
                        prompts,
                        mode=mode,
                        sessions=sessions,
                        max_new_tokens=arguments.max_new_tokens,
                        temperature=arguments.temperature,
                    )
                )
                # The first pass warms caches, cost models and calibration.
                if repeat:
                    runs[mode].append(run)
        measurements.extend(summarise(mode, sessions, runs) for mode in MODES)
    return measurements


def summarise(mode: str, sessions: int, runs: dict[str, list[Run]]) -> Measurement:
    """Medians over the repeats."""
    pairs = zip(runs[mode], runs["off"], strict=True)
    return Measurement(
        mode=mode,
        sessions=sessions,
        tokens_per_second=statistics.median(run.tokens_per_second for run in runs[mode]),
        ratio_to_off=statistics.median(run.tokens_per_second / off.tokens_per_second for run, off in pairs),
        acceptance_length=statistics.median(run.acceptance_length for run in runs[mode]),
        tpot_ms=statistics.median(run.tpot_ms for run in runs[mode]),
        ttft_ms=statistics.median(run.ttft_ms for run in runs[mode]),
    )


def print_table(measurements: Sequence[Measurement], title: str) -> None:
    """The table on the terminal."""
    table = Table(title=title)
    for heading in ("sessions", "mode", "tokens/s", "ratio to off", "acceptance length", "TPOT ms", "TTFT ms"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in measurements:
        table.add_row(
            str(row.sessions),
            row.mode,
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio_to_off:.2f}",
            f"{row.acceptance_length:.2f}",
            f"{row.tpot_ms:.2f}",
            f"{row.ttft_ms:.1f}",
        )
    Console(file=sys.stderr).print(table)


def main() -> int:
    """Table on standard error, JSON on standard output (and in a file, if asked)."""
    parser = argparse.ArgumentParser(prog="benchmarks/modes.py", description="Off, sync and async, side by side.")
    cores = os.cpu_count() or 1
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-threads", type=int, default=1)
    parser.add_argument("--target-threads", type=int, default=max(1, cores - 1), help="of sync and async")
    parser.add_argument("--off-threads", type=int, default=cores, help="of off")
    parser.add_argument("--device", default="cpu", help="of both models: cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default=None, help="float32 or bfloat16; default the device's own")
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    model_args = ["--device", arguments.device, *(["--dtype", arguments.dtype] if arguments.dtype else [])]
    plain = LocalService(drafts=0, target_threads=arguments.off_threads, target_args=model_args)
    speculative = LocalService(
        drafts=1,
        target_threads=arguments.target_threads,
        draft_threads=arguments.draft_threads,
        target_args=model_args,
        draft_args=model_args,
    )
    with plain, speculative:
        endpoints = {"off": plain.endpoint, "sync": speculative.endpoint, "async": speculative.endpoint}
        measurements = measure(arguments, endpoints)
    where = f"{cores} cores" if arguments.device == "cpu" else arguments.device
    print_table(measurements, f"embedded pair, {where}, temperature {arguments.temperature:g}")
    settings = {name: value for name, value in vars(arguments).items() if name != "output_json"}
    report = json.dumps(
        {
            "machine": machine(arguments.device),
            "settings": settings,
            "measurements": [asdict(measurement) for measurement in measurements],
        },
        indent=2,
    )
    sys.stdout.write(report + "\n")
    if arguments.output_json is not None:
        arguments.output_json.write_text(report + "\n", encoding="utf-8")
    return 0
