"""The command line of the overload benchmark."""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path

from benchmarks.overload_bench.figures import Phase, Sample, phase_of, table, verdicts
from benchmarks.overload_bench.load import Lags, LoadGenerator, Request
from benchmarks.overload_bench.setups import Service, embedded_pair
from rich.console import Console

from outrider.client import AsyncClient

_SAMPLE_S = 0.5
_SETTLE_S = 1.0


def run(arguments: Sequence[str]) -> int:
    """Prints the table; 1 where something asked for was missed."""
    options = _parser().parse_args(arguments)
    phases, lines = asyncio.run(_run(options))
    if options.json:
        document = {"options": vars(options), "phases": [phase.as_dict() for phase in phases], "verdicts": lines}
        Console().print_json(json.dumps(document, default=str))
    else:
        Console(width=220, highlight=False).print(table(phases), *lines, sep="\n", soft_wrap=True)
    return int(any(line.startswith("MISSED") for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="overload.py", description=__doc__)
    add = parser.add_argument
    add("--places", type=int, default=8, help="sessions that run at a time (default 8)")
    add("--max-new-tokens", type=int, default=48, help="of a request (default 48)")
    add("--max-queue", type=int, default=16, help="of the coordinator: short, so that it is full (default 16)")
    add("--max-queue-wait-s", type=float, default=None, help="of the coordinator; default none")
    add("--normal", type=float, default=1.0, help="normal load, as a share of capacity")
    add("--overload", type=float, default=4.0, help="times capacity")
    add("--capacity-s", type=float, default=15.0, help="of the closed loop that finds the capacity")
    add("--normal-s", type=float, default=30.0, help="before the overload, and half as long after it")
    add("--overload-s", type=float, default=60.0, help="of the overload")
    add("--storm-s", type=float, default=0.0, help="of clients that come back at once, three times the places")
    add("--seed", type=int, default=1)
    add("--json", action="store_true")
    return parser


async def _run(options: argparse.Namespace) -> tuple[list[Phase], list[str]]:
    arguments = ["--max-running-sessions", str(options.places)]
    for name in ("max_queue", "max_queue_wait_s"):
        if getattr(options, name) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    async with embedded_pair(arguments, seed=options.seed) as service:
        return await _Bench(service, options).run()


class _Bench:
    """One service through all phases."""

    def __init__(self, service: Service, options: argparse.Namespace) -> None:
        self._service, self._options, self._places = service, options, options.places
        self._phases: list[Phase] = []

    async def run(self) -> tuple[list[Phase], list[str]]:
        options, service = self._options, self._service
        load = LoadGenerator(
            service.endpoint, service.prompts, max_new_tokens=options.max_new_tokens, seed=options.seed
        )
        async with load, AsyncClient(service.endpoint) as client:
            await load.closed_loop(self._places, options.capacity_s / 3)
            capacity = await self._phase(client, "capacity", 0.0, load.closed_loop(self._places, options.capacity_s))
            rate = capacity.accepted / capacity.seconds
            half = options.normal_s / 2
            loads = (options.normal, options.normal_s), (options.overload, options.overload_s), (options.normal, half)
            normal, overload, _ = [
                await self._phase(client, name, times, load.open_loop(times * rate, seconds))
                for name, (times, seconds) in zip(("normal", "overload", "after"), loads, strict=True)
            ]
            if options.storm_s:
                await self._phase(client, "storm", 0.0, load.closed_loop(3 * self._places, options.storm_s))
        return self._phases, verdicts(normal, overload)

    async def _phase(self, client: AsyncClient, name: str, times: float, work: Awaitable[list[Request]]) -> Phase:
        before, began, stolen_s = await client.server_info(), time.monotonic(), _stolen_s()
        lags, samples = Lags(), list[Sample]()
        async with _beside(lags.watch(), self._watch(client, began, samples)):
            requests = await work
        seconds, after = time.monotonic() - began, await client.server_info()
        phase = phase_of(
            name,
            times,
            requests,
            seconds=seconds,
            before=before,
            after=after,
            late_s=lags.late_s,
            stolen_s=_stolen_s() - stolen_s,
            samples=samples,
        )
        self._phases.append(phase)
        Console(stderr=True).print(f"{name}: {len(requests)} requests in {seconds:.1f} s, {phase.accepted} served")
        await asyncio.sleep(_SETTLE_S)
        return phase

    async def _watch(self, client: AsyncClient, began: float, samples: list[Sample]) -> None:
        while True:
            asked = time.monotonic()
            info = await client.server_info()
            samples.append(
                Sample(
                    at_s=asked - began,
                    rss_mb=_rss_mb(self._service.coordinator_pid),
                    waiting=info.waiting_requests,
                    running=info.running_sessions,
                    answer_ms=(time.monotonic() - asked) * 1e3,
                )
            )
            await asyncio.sleep(_SAMPLE_S)


@contextlib.asynccontextmanager
async def _beside(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                # It has watched nothing since.
                raise ended


def _stolen_s() -> float:
    """Of all cores, since this machine was started: of a virtual machine, what its host gave to others; else 0."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return float("nan")


def _rss_mb(pid: int) -> float:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20
