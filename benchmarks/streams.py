"""Thousands of streams at a time through one coordinator: is any lost, is any wrong, what do they cost, and how late?

    python benchmarks/streams.py [--streams 2000] [--coordinators 1] [--tokens 64] [--step-ms 500] [--output-json FILE]

A coordinator process stands between fake workers (`benchmarks/simulation`), whose tokens are a function of a stream's
key and of the position: every stream knows what it has to get. Client processes open all streams within `--ramp` s and
read them to their end; a stream is lost if it fails or ends early, and wrong if a token differs. A target takes 1,000
sessions at most, so there are as many targets, and drafts, as are needed.

delivery     from the coordinator's having a result to its tokens being at the client, of traced streams
round        what a round takes beside the target's step and the wait for growth, of traced streams
CPU          of the busiest of `--coordinators` processes, which share the streams; each has workers of its own
memory       of the coordinator, the first of several: before the first stream, most while they ran, and after the
             last; `--waves` do it all over again, and what is bounded does not grow with them
Fake workers and clients share the cores with the coordinator: a step that ends late counts as the worker's, and a
client that reads late is part of the delivery (its event loop's lag is reported).
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
# Read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from benchmarks.overload_bench.setups import simulated
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import MAX_SESSIONS, Settings

from outrider.coordinator.loadtest.grpc_sender import GrpcSender
from outrider.coordinator.loadtest.lag import LagMeter
from outrider.coordinator.loadtest.metrics import peak_concurrency
from outrider.coordinator.loadtest.options import Mode
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.senders import Ask

_STREAMS_A_CONNECTION = 250
_OPENED_A_SECOND = 200
_LEAD_S = 3.0
_MEMORY_POLL_S = 0.25
_SETTLE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """The streams of one client process.

    Attributes:
        endpoint: of the coordinators, separated by commas.
        settings: of the fake workers.
        first, count: keys of the streams.
        tokens: of each.
        mode: how drafts are used.
        begin_s: of `time.monotonic`, when the first one is opened.
        ramp_s: until the last one is.
        traced: so many are traced.
        timeout_s: after which a stream is lost.
    """

    endpoint: str
    settings: Settings
    first: int
    count: int
    tokens: int
    mode: Mode
    begin_s: float
    ramp_s: float
    traced: int
    timeout_s: float


@dataclass(kw_only=True)
class Outcome:
    """What came of a share; lists hold one entry a stream, or a round of a traced one."""

    records: list[RequestRecord] = field(default_factory=list)
    wrong: int = 0
    delivery_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    loop_lag_ms: list[float] = field(default_factory=list)
    cpu_share: float = 0.0


def read_share(share: Share) -> Outcome:
    """Opens and reads the streams of a share."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_read_share(share))


async def _read_share(share: Share) -> Outcome:
    outcome = Outcome()
    settings = share.settings
    model = PathModel(seed=settings.seed, rank_rates=settings.rank_rates, spread=settings.spread)
    sender = GrpcSender(share.endpoint.split(","), connections=math.ceil(share.count / _STREAMS_A_CONNECTION))
    try:
        async with LagMeter() as load, asyncio.TaskGroup() as group:
            for place in range(share.count):
                group.create_task(_stream(share, place, sender, model, outcome))
    finally:
        await sender.close()
    outcome.loop_lag_ms = [1e3 * lag for lag in load.loop_lag_s]
    outcome.cpu_share = load.cpu_share
    return outcome


async def _stream(share: Share, place: int, sender: GrpcSender, model: PathModel, outcome: Outcome) -> None:
    at_s = share.ramp_s * place / share.count
    await asyncio.sleep(share.begin_s + at_s - time.monotonic())
    key = share.first + place
    is_traced = place < share.traced
    ask = Ask(
        prompt=(key, 1),
        max_new_tokens=share.tokens,
        seed=key,
        temperature=0.0,
        ignore_eos=True,
        speculation=share.mode,
        is_traced=is_traced,
        keeps_output=True,
        timeout_s=share.timeout_s,
    )
    record = RequestRecord(index=key, intended_s=at_s)
    output = await sender.send(ask, record, begin_s=share.begin_s)
    expected = tuple(model.token(key, 2 + position) for position in range(share.tokens))
    outcome.wrong += output != expected[: len(output)]
    outcome.records.append(record)
    if is_traced and len(record.chunk_s) == len(record.rounds) + 1:
        for each, chunk_s in zip(record.rounds, record.chunk_s[1:], strict=True):
            outcome.delivery_ms.append(1e3 * (share.begin_s + chunk_s) - each.result_ns / 1e6)
            outcome.round_ms.append((each.wire_ns + each.between_ns) / 1e6)
    # Thousands of them cross to the other process: what has been read is not needed there.
    record.rounds.clear()


@contextlib.asynccontextmanager
async def _memory_of(pid: int) -> AsyncIterator[list[float]]:
    """MiB that a process holds, read while the block runs."""
    readings = [_resident_mib(pid)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(_MEMORY_POLL_S)
            readings.append(_resident_mib(pid))

    task = asyncio.create_task(watch())
    try:
        yield readings
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All waves, one after the other; gives the figures of the last, and the memory of each."""
    count = options.coordinators
    workers = count * math.ceil(options.streams / MAX_SESSIONS / count)
    sessions = math.ceil(options.streams / workers)
    settings = Settings(
        sessions=sessions,
        targets=workers,
        workers=workers,
        target_step_ms=options.step_ms,
        target_row_us=0.0,
        draft_step_ms=options.draft_step_ms,
        draft_width=options.draft_width,
        max_nodes=options.max_nodes,
        max_depth=min(8, options.max_nodes),
        max_live_nodes=4 * options.max_nodes,
        max_step_rows=sessions * (1 + options.max_nodes),
    )
    arguments = [
        *("--max-running-sessions", str(options.streams)),
        *("--max-queue", str(options.streams)),
        *("--max-nodes", str(settings.max_nodes)),
        *("--max-live-nodes", str(settings.max_live_nodes)),
        *("--step-timeout-s", "120"),
        # Fake workers, coordinator and clients share this machine's cores: one that is late is not lost.
        *("--heartbeat-interval-ms", "2000", "--lease-ms", "60000"),
    ]
    async with simulated(settings, arguments, coordinators=options.coordinators) as service:
        loop = asyncio.get_running_loop()
        pids, processes = service.coordinator_pids, options.client_processes
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            await asyncio.gather(*(loop.run_in_executor(pool, time.sleep, 0.5) for _ in range(processes)))
            waves = []
            for _ in range(options.waves):
                begin_s = time.monotonic() + _LEAD_S
                began_cpu_s = [_cpu_s(pid) for pid in pids]
                async with _memory_of(pids[0]) as memory:
                    shares = _shares(options, settings, service.endpoint, begin_s)
                    reading = (loop.run_in_executor(pool, read_share, share) for share in shares)
                    outcomes = await asyncio.gather(*reading)
                cpu_s = [_cpu_s(pid) - began_s for pid, began_s in zip(pids, began_cpu_s, strict=True)]
                await asyncio.sleep(_SETTLE_S)
                waves.append(_figures(options, outcomes, memory, after_mib=_resident_mib(pids[0]), cpu_s=cpu_s))
    return waves[-1] | {
        "lost": sum(wave["lost"] for wave in waves),
        "wrong": sum(wave["wrong"] for wave in waves),
        "errors": sorted({error for wave in waves for error in wave["errors"]})[:3],
        "memory_most_mib_by_wave": [round(wave["memory_most_mib"], 1) for wave in waves],
    }


def _shares(options: argparse.Namespace, settings: Settings, endpoint: str, begin_s: float) -> list[Share]:
    count = options.client_processes
    sizes = [options.streams // count + (number < options.streams % count) for number in range(count)]
    return [
        Share(
            endpoint=endpoint,
            settings=settings,
            first=1 + sum(sizes[:number]),
            count=size,
            tokens=options.tokens,
            mode=options.mode,
            begin_s=begin_s,
            ramp_s=options.ramp,
            traced=math.ceil(options.traced / count),
            timeout_s=options.timeout,
        )
        for number, size in enumerate(sizes)
    ]


def _figures(
    options: argparse.Namespace,
    outcomes: Sequence[Outcome],
    memory: Sequence[float],
    *,
    after_mib: float,
    cpu_s: Sequence[float],
) -> dict[str, Any]:
    records = [record for outcome in outcomes for record in outcome.records]
    whole = [record for record in records if record.is_complete and record.output_tokens == options.tokens]
    errors = sorted({record.error for record in records if record.error})
    duration_s = max(record.ended_s for record in records)
    tokens = sum(record.output_tokens for record in whole)
    return {
        "streams": options.streams,
        "lost": options.streams - len(whole),
        "wrong": sum(outcome.wrong for outcome in outcomes),
        "errors": errors[:3],
        "peak_streams": peak_concurrency(records),
        "duration_s": duration_s,
        "tokens_per_s": tokens / duration_s,
        **_spread("delivery_ms", [each for outcome in outcomes for each in outcome.delivery_ms]),
        **_spread("round_ms", [each for outcome in outcomes for each in outcome.round_ms]),
        **_spread("ttft_ms", [1e3 * record.ttft_s for record in whole]),
        **_spread("itl_ms", [1e3 * gap for record in whole for gap in record.itl_s]),
        "coordinator_cpu_s": max(cpu_s),
        "coordinator_cpu_share": max(cpu_s) / duration_s,
        "coordinator_cpu_us_per_token": 1e6 * sum(cpu_s) / max(1, tokens),
        "memory_before_mib": memory[0],
        "memory_most_mib": max(memory),
        "memory_after_mib": after_mib,
        "memory_kib_per_stream": 1024 * (max(memory) - memory[0]) / options.streams,
        **_spread("client_loop_lag_ms", [each for outcome in outcomes for each in outcome.loop_lag_ms]),
        "client_cpu_share": max(outcome.cpu_share for outcome in outcomes),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    held = np.asarray(values or [math.nan])
    return {f"median_{name}": float(np.median(held)), f"p99_{name}": float(np.percentile(held, 99))}


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON if asked for; 1 where a stream was lost or wrong."""
    parser = argparse.ArgumentParser(prog="benchmarks/streams.py", description="Thousands of streams at a time.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--coordinators", type=int, default=1, help="processes that share the streams (default 1)")
    parser.add_argument("--tokens", type=int, default=64, help="of every stream (default 64)")
    parser.add_argument("--mode", choices=("async", "sync", "off"), default="async")
    parser.add_argument("--step-ms", type=float, default=500.0, help="of a target (default 500)")
    parser.add_argument("--draft-step-ms", type=float, default=50.0, help="of a draft (default 50)")
    parser.add_argument("--draft-width", type=int, default=512, help="nodes that a draft's step expands (default 512)")
    parser.add_argument("--max-nodes", type=int, default=4, help="of a session in a step (default 4)")
    parser.add_argument(
        "--ramp", type=float, help="seconds within which streams are opened (default 1 for 200 of them)"
    )
    parser.add_argument("--waves", type=int, default=2, help="times that all streams are opened and read (default 2)")
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--traced", type=int, default=64, help="streams whose rounds are timed (default 64)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a stream is lost")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args(arguments)
    if options.ramp is None:
        # gRPC's Python server takes one call a turn of its event loop, and turns away what waits beyond 1,000.
        options.ramp = options.streams / _OPENED_A_SECOND
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(measure(options))
    table = Table(title=f"{options.streams} streams of {options.tokens} tokens, {options.mode}", show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if figures["lost"] or figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
