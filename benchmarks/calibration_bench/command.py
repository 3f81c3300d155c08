"""The command line: what is asked of the pair, and tables and JSON of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.calibration_bench import acceptance, prior_fit
from benchmarks.calibration_bench.estimates import compare
from benchmarks.calibration_bench.positions import Asker, Positions
from benchmarks.calibration_bench.texts import REPORT_PROMPTS, load_texts
from benchmarks.calibration_bench.workers import Pair
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from outrider.drafting import acceptance_prior

_TEMPERATURES = (0.0, 0.6, 1.0)
_BEGIN, _END = "# fitted: begin\n", "# fitted: end\n"
Rows = list[dict[str, Any]]


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON on standard output if asked for; the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/calibration.py",
        description="What a draft's acceptance estimates are worth: embedded pair, CPU.",
    )
    parser.add_argument("what", choices=list(_COMMANDS), help="see docs/calibration.md")
    parser.add_argument("--prompts", type=int, default=REPORT_PROMPTS, help=f"of {REPORT_PROMPTS} (default all)")
    parser.add_argument(
        "--tokens", type=int, default=128, help="of each output (default 128); acceptance: 0 is text alone"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--json", action="store_true", help="figures on standard output, the table on the other")
    parser.add_argument(
        "--write", action="store_true", help="prior: put the numbers into src/outrider/drafting/acceptance_prior.py"
    )
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.prompts <= REPORT_PROMPTS or chosen.tokens < (chosen.what != "acceptance"):
        parser.error(
            f"{chosen.prompts} prompts of {chosen.tokens} tokens given, 1 to {REPORT_PROMPTS} of at least 1 needed"
        )
    rows = _COMMANDS[chosen.what](chosen)
    Console(stderr=chosen.json).print(
        table(rows, f"{chosen.what}: {chosen.prompts} prompts, {chosen.tokens} tokens each")
    )
    if chosen.json:
        settings = {name: value for name, value in vars(chosen).items() if name != "json"}
        sys.stdout.write(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    return 0


def table(rows: Rows, title: str) -> Table:
    """One line a row."""
    shown = Table(title=title, title_justify="left", collapse_padding=True, padding=(0, 1), box=SIMPLE)
    for name, value in rows[0].items():
        shown.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row.values()))
    return shown


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _pair(chosen: argparse.Namespace) -> Pair:
    pair = Pair()
    torch.set_num_threads(chosen.threads)
    return pair


def _estimates(chosen: argparse.Namespace) -> Rows:
    asker = Asker(_pair(chosen))
    fit, report = (load_texts(fit=is_fit, limit=chosen.prompts) for is_fit in (True, False))
    rows = []
    for temperature in _TEMPERATURES:
        others = asker.ask(fit, temperature=temperature, tokens=chosen.tokens)
        for rule, asked in asker.ask(report, temperature=temperature, tokens=chosen.tokens).items():
            for context, positions in (("text", asked.only(own=False)), ("own", asked.only(own=True))):
                head = {"rule": rule.value, "temperature": f"{temperature:g}", "context": context}
                rows += [head | _shares(positions) | asdict(worth) for worth in compare(others[rule], positions)]
    return rows


def _shares(positions: Positions) -> dict[str, Any]:
    return {
        "positions": len(positions.hit),
        "best_accepted": float((positions.hit == 0).mean()),
        "any_accepted": float((positions.hit >= 0).mean()),
    }


def _acceptance(chosen: argparse.Namespace) -> Rows:
    found = acceptance.measure(_pair(chosen), load_texts(fit=False, limit=chosen.prompts), tokens=chosen.tokens)
    return [asdict(row) for row in found]


def _prior(chosen: argparse.Namespace) -> Rows:
    asker, fit = Asker(_pair(chosen)), load_texts(fit=True, limit=chosen.prompts)
    asked = [
        positions
        for temperature in _TEMPERATURES
        for positions in asker.ask(fit, temperature=temperature, tokens=chosen.tokens).values()
    ]
    found = prior_fit.fit(asked)
    if chosen.write:
        path = Path(acceptance_prior.__file__).resolve()
        path.write_text(with_numbers(path.read_text(encoding="utf-8"), prior_fit.as_code(found)), encoding="utf-8")
    return [
        {"curve": name, "was": str(getattr(acceptance_prior, name)), "fitted": str(numbers)}
        for name, numbers in found.items()
    ]


def with_numbers(source: str, code: str) -> str:
    """The module's source with other numbers between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    head, begin, rest = source.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError("acceptance_prior.py has lost the marks between which its numbers stand")
    return f"{head}{begin}{code}\n{end}{tail}"


_COMMANDS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "estimates": _estimates,
    "acceptance": _acceptance,
    "prior": _prior,
}
