"""Command of benchmarks/chaos.py: the requests without faults, then under faults, then the comparison."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults.gauges import memory_growth, settled_gauges, until_equal
from benchmarks.faults.history import check_all
from benchmarks.faults.load import Load, make_scripts, without_faults
from benchmarks.faults.processes import Cluster, ClusterOptions
from benchmarks.faults.report import Report, in_words
from benchmarks.faults.running import FaultRun
from benchmarks.faults.schedule import make_schedule
from rich.console import Console

from outrider.errors import OutriderError

_BROKEN = 1
# Different requests.
_SCRIPTS = 24
# Faults at a time, never two of one role.
_AT_ONCE = 3
# Requests without faults, before them and after them; before, again until memory has come to its level.
_CALM_REQUESTS = 80
_TABLE_WIDTH = 120
# The longest one lasts a minute.
_QUARANTINE_TIMEOUT_S = 100.0
# Of a calm: until connections that nobody told of their end are given up, which keepalive takes 12 s for.
_QUIET_TIMEOUT_S = 45.0
# Memory is at its level when it has risen by less than this over a calm; a process that has just begun needs a few.
_FLAT = 0.01
_MOST_CALMS = 3


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, help="of scripts, load and faults; default a new one, which is printed")
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--coordinators", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4, help="at a time")
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(10**6)
    return arguments


def main(given: Sequence[str]) -> int:
    """Print a table on standard output and progress on standard error; return the exit code."""
    arguments = parse(given)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    progress, began_s = Console(stderr=True, highlight=False), time.monotonic()

    def say(line: str) -> None:
        progress.print(f"{time.monotonic() - began_s:7.1f} s  {line}", markup=False, soft_wrap=True)

    say(f"seed {arguments.seed}, logs in {folder}")
    report = asyncio.run(run(arguments, folder, say))
    report.print_to(console())
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    return _BROKEN if report.troubles else 0


def console() -> Console:
    """Return a console on standard output; as wide as the table where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)


async def run(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Report:
    """One run."""
    seed = arguments.seed
    options = ClusterOptions(
        folder=folder,
        targets=arguments.targets,
        drafts=arguments.drafts,
        coordinators=arguments.coordinators,
        seed=seed,
    )
    scripts = make_scripts(_SCRIPTS, seed=seed)
    command = f"make chaos FAULTS={arguments.faults} SEED={seed}"
    async with Cluster(options) as cluster:
        say(f"{len(cluster.roles)} roles serve")
        report = Report(seed=seed, command=command)
        wanted = await without_faults(cluster.endpoints[0], scripts)
        say(f"{len(scripts)} requests without faults have {_tokens(wanted)} tokens")

        async def calm(number: int) -> list:
            load = Load(cluster.endpoints, scripts, clients=arguments.clients, seed=seed + number, pause_s=0.0)
            await load.until_asked(_CALM_REQUESTS)
            await load.stop()
            return load.histories

        histories = await calm(1)
        before = await settled_gauges(cluster, timeout_s=_QUIET_TIMEOUT_S)
        say(f"{len(histories)} requests in calm; {sum(len(gauges.counts) for gauges in before.values())} gauges read")
        for number in range(2, _MOST_CALMS + 1):
            histories += await calm(number)
            last, before = before, await settled_gauges(cluster, timeout_s=_QUIET_TIMEOUT_S)
            growth = memory_growth(last, before)
            say(f"{len(histories)} requests in calm; memory, of what it was: {in_words(growth)}")
            if max(growth.values()) < 1 + _FLAT:
                break

        load = Load(cluster.endpoints, scripts, clients=arguments.clients, seed=seed)
        schedule = make_schedule(arguments.faults, list(cluster.roles), seed=seed)
        faults = FaultRun(cluster, schedule, at_once=_AT_ONCE, say=say)
        began_s = time.monotonic()
        await load.until_asked()
        await faults.run()
        await load.stop()
        report.seconds = time.monotonic() - began_s
        histories += load.histories
        say(f"{len(load.histories)} requests under {len(faults.outcomes)} faults in {report.seconds:.0f} s")

        try:
            # A coordinator keeps no link to a worker in quarantine.
            await cluster.until_whole(timeout_s=_QUARANTINE_TIMEOUT_S, served=("serving",))
            report.gauges = await until_equal(cluster, before, timeout_s=_QUIET_TIMEOUT_S)
            # Processes that have just been restarted have not done anything yet.
            histories += await calm(_MOST_CALMS + 1)
            report.memory = memory_growth(before, await settled_gauges(cluster, timeout_s=_QUIET_TIMEOUT_S))
        except (OutriderError, TimeoutError, OSError) as error:
            report.gauges = [*report.gauges, f"not all is back, and the gauges cannot be compared: {error}"]
    report.outcomes, report.crashes, report.histories = faults.outcomes, faults.crashes, histories
    report.violations = check_all(histories, wanted)
    return report


def _tokens(wanted: dict) -> int:
    return sum(len(choice.token_ids) for choices in wanted.values() for choice in choices)
