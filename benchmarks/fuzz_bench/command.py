"""The command line of the fuzzer."""

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fuzz_bench.evil_coordinators import LEASE_KIND, fuzz_leases
from benchmarks.fuzz_bench.evil_workers import EVIL_KINDS
from benchmarks.fuzz_bench.run import Outcome, fuzz, fuzz_answers
from benchmarks.fuzz_bench.services import SERVICES
from benchmarks.fuzz_bench.tiny_service import fill_caches, tiny_service
from rich.console import Console

_SHOWN, _SHOWN_PAYLOADS = 5, 4
_SHOWN_BYTES = 400


def run(arguments: Sequence[str]) -> int:
    """Print a line for each service; return 1 if anything was wrong."""
    everything = [*SERVICES, *(kind.name for kind in EVIL_KINDS), LEASE_KIND]
    parser = argparse.ArgumentParser(prog="fuzz.py")
    parser.add_argument("--messages", type=int, default=1000, help="at each service, and of each kind of wrong answers")
    parser.add_argument("--only", nargs="+", choices=everything, default=everything, help="default all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    # What every wrong message is answered with is no news.
    logging.disable(logging.ERROR)
    with TemporaryDirectory() as folder:
        outcomes = asyncio.run(_run(Path(folder), options))
    return int(any(outcome.findings or outcome.left for outcome in outcomes))


async def _run(folder: Path, options: argparse.Namespace) -> list[Outcome]:
    outcomes = []
    fill_caches()
    for service in SERVICES:
        if service in options.only:
            async with tiny_service(folder) as served:
                outcomes.append(await fuzz(served, service, messages=options.messages, seed=options.seed))
            _show(outcomes[-1])
    for kind in EVIL_KINDS:
        if kind.name in options.only:
            outcomes.append(await fuzz_answers(folder, kind, messages=options.messages, seed=options.seed))
            _show(outcomes[-1])
    if LEASE_KIND in options.only:
        outcomes.append(await fuzz_leases(options.messages, seed=options.seed))
        _show(outcomes[-1])
    return outcomes


def _show(outcome: Outcome) -> None:
    say = Console(width=200, highlight=False).print
    codes = ", ".join(f"{code} {count}" for code, count in outcome.codes.most_common())
    before, after = outcome.rss_mb
    say(
        f"{outcome.service}: {outcome.messages} messages in {outcome.seconds:.0f} s: {codes}; "
        f"{len(outcome.findings)} wrong answers; left behind: {', '.join(outcome.left) or 'nothing'}; "
        f"{outcome.probes} correct requests between got the same tokens; memory {before:.0f} to {after:.0f} MiB; "
        f"slowest call {outcome.slowest_s:.2f} s"
    )
    for finding in outcome.findings[:_SHOWN]:
        say(f"  {finding.method}: {finding.fault[:_SHOWN_BYTES]}")
        for payload in finding.payloads[-_SHOWN_PAYLOADS:]:
            say(f"    {payload[:_SHOWN_BYTES].hex()}")
