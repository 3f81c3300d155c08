"""The command line of benchmarks/structured.py."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.structured_bench.run import ModeResult, differing, questions, run_mode

from outrider.local import LocalService
from outrider.models import held_out_prompts

_MODES = ("off", "async", "sync")


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/structured.py", description="See the head of the file.")
    parser.add_argument("--generations", type=int, default=200, help="in every mode (default 200)")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=_MODES, help="default all")
    parser.add_argument("--concurrency", type=int, default=8, help="at a time (default 8)")
    parser.add_argument("--drafts", type=int, default=1, help="draft workers (default 1)")
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args(arguments)
    asked = questions(options.generations, held_out_prompts())
    with LocalService(drafts=options.drafts, target_args=["--deterministic"]) as service:
        results = [
            asyncio.run(run_mode(service.endpoint, mode, asked, concurrency=options.concurrency))
            for mode in options.modes
        ]
    lines = [_figures(result, results[0]) for result in results]
    _print(lines)
    for result in results:
        for number, fault in result.faults.items():
            print(f"{result.mode}, {asked[number]}: {fault}", file=sys.stderr)  # noqa: T201 - a command
    if options.output is not None:
        options.output.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return int(any(result.faults or differing(results[0], result) for result in results))


def _figures(result: ModeResult, first: ModeResult) -> dict[str, str | int | float]:
    return {
        "mode": result.mode,
        "generations": len(result.outputs),
        "valid": len(result.outputs) - len(result.faults),
        "differing": len(differing(first, result)),
        "tokens": result.tokens,
        "acceptance_length": round(result.acceptance_length, 3),
        "total_s": round(result.total_s, 2),
        "tokens_per_s": round(result.tokens / result.total_s, 1),
    }


def _print(lines: Sequence[dict[str, str | int | float]]) -> None:
    names = list(lines[0])
    print("".join(f"{name:>19}" for name in names))  # noqa: T201 - a command
    for line in lines:
        print("".join(f"{line[name]:>19}" for name in names))  # noqa: T201 - a command
