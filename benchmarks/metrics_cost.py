"""What metrics cost the coordinator: its CPU time a token with everything counted and read, against nothing counted.

    python benchmarks/metrics_cost.py

Two coordinators stand side by side, with the fake workers of coordinator_cpu.py; a block of rounds of the one is
followed by a block of the other (ABBA), so that whatever else the machine does meets both. The CPU clock of the thread
is read. The counting one is read as Prometheus reads it, once in every second of its CPU time: that is once a second
where a core does nothing else, and a coordinator that has time left does not feel it at all.

off       rounds without any counting for metrics: what they were before there were metrics
on        rounds as they are
counting  by how much these take longer: the median over pairs of blocks, and 95 % of what it may be by chance
reading   one scrape: values into families, families into text; and its share of a second
cost      both
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.coordinator_cpu import Bench, OneGroupLoop, add_round_options, without_collector
from prometheus_client import generate_latest

from outrider.coordinator.access import Access
from outrider.coordinator.metrics import CoordinatorMetrics
from outrider.coordinator.metrics_counts import ServingCounts
from outrider.coordinator.registered_worker import RegisteredWorker
from outrider.metrics.families import registry_of
from outrider.v1 import registry_pb2

_SCRAPE_EVERY_NS = 1_000_000_000
_WARM_UP_ROUNDS = 10
_TURNS = 12


class UncountedLoop(OneGroupLoop):
    """The verify loop less its lines about `totals.serving`; a test has both emit the same tokens."""

    def _learn(self) -> None:
        rounds, self._uncounted = self._uncounted, []
        totals = self._owner.totals
        for committed in rounds:
            emitted = int(committed.emitted.sum())
            totals.verify_steps += len(committed.sessions)
            totals.drafted_tokens += int(committed.nodes.sum())
            totals.accepted_tokens += int(committed.accepted.sum())
            totals.emitted_tokens += emitted
            totals.steps += 1
            flight, result, result_ns = committed.step
            self.lane.learn(flight, result, emitted=emitted, result_ns=result_ns, demand=totals.demand)


class Arm:
    """One of the two coordinators, and what it has used."""

    def __init__(self, sessions: int, *, is_counted: bool, width: int, max_nodes: int) -> None:
        loop_type = OneGroupLoop if is_counted else UncountedLoop
        self.bench = Bench(sessions, width=width, max_nodes=max_nodes, loop_type=loop_type)
        self._registry = None
        if is_counted:
            metrics = CoordinatorMetrics(
                self.bench.scheduler, workers=_workers(), access=Access(), model_name="fake", max_depth=8
            )
            self._registry = registry_of(metrics.describe)
        self.readings_ns: list[int] = []
        self._since_reading_ns = 0

    async def block(self, rounds: int, *, draft_steps: int) -> tuple[int, int]:
        """So many rounds: (CPU time of the coordinator, tokens)."""
        used_ns, before = 0, self.bench.emitted
        for _ in range(rounds):
            for _ in range(draft_steps):
                used_ns += (await self.bench.growth())[0]
            used_ns += sum(await self.bench.result())
        if self._registry is not None:
            self._since_reading_ns += used_ns
            while self._since_reading_ns >= _SCRAPE_EVERY_NS:
                self._since_reading_ns -= _SCRAPE_EVERY_NS
                self.read()
        return used_ns, self.bench.emitted - before

    def read(self) -> int:
        """One scrape; its CPU time."""
        assert self._registry is not None
        began_ns = time.thread_time_ns()
        generate_latest(self._registry)
        self.readings_ns.append(time.thread_time_ns() - began_ns)
        return self.readings_ns[-1]


def _workers() -> dict[str, RegisteredWorker]:
    """A target and three drafts: what a scrape tells of them is made of their heartbeats."""
    roles = [registry_pb2.WORKER_ROLE_TARGET] + 3 * [registry_pb2.WORKER_ROLE_DRAFT]
    introductions = [
        registry_pb2.WorkerIntroduction(worker_id=f"worker-{number}", role=role) for number, role in enumerate(roles)
    ]
    return {each.worker_id: RegisteredWorker(introduction=each) for each in introductions}


async def measure(
    sessions: int, *, pairs: int, rounds: int, draft_steps: int, width: int, max_nodes: int
) -> dict[str, Any]:
    """The figures of one number of sessions."""
    arms = [Arm(sessions, is_counted=counted, width=width, max_nodes=max_nodes) for counted in (False, True)]
    off, on = arms
    blocks: dict[Arm, list[tuple[int, int]]] = {arm: [] for arm in arms}
    try:
        for arm in arms:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            await arm.block(_WARM_UP_ROUNDS, draft_steps=draft_steps)
        for number in range(pairs):
            for arm in arms if number % 2 else reversed(arms):
                blocks[arm].append(await arm.block(rounds, draft_steps=draft_steps))
        for _ in range(5):
            on.read()
        held = on.bench.scheduler.totals.serving
        assert held.step.counts != ServingCounts().step.counts, "the counting arm has counted nothing"
    finally:
        for arm in arms:
            await arm.bench.close()
    pairwise = zip(blocks[off], blocks[on], strict=True)
    ratios = [_per_token(on_block) / _per_token(off_block) for off_block, on_block in pairwise]
    # Of what it is read with in a second of work: few blocks hold a reading, and the median of all would not see it.
    reading_ns = fmean(on.readings_ns)
    reading = reading_ns / _SCRAPE_EVERY_NS
    low, high = _interval(ratios)
    return {
        "sessions": sessions,
        "pairs": pairs,
        "off_us_per_token": _per_token(_sum(blocks[off])) / 1e3,
        "on_us_per_token": _per_token(_sum(blocks[on])) / 1e3,
        "counting_percent": 100 * (median(ratios) - 1),
        "counting_percent_low": 100 * (low - 1),
        "counting_percent_high": 100 * (high - 1),
        "reading_percent": 100 * reading,
        "cost_percent": 100 * (median(ratios) - 1 + reading),
        "reading_ms": reading_ns / 1e6,
        "tokens": [arm.bench.emitted for arm in arms],
    }


def _per_token(block: tuple[int, int]) -> float:
    return block[0] / block[1]


def _sum(blocks: Iterable[tuple[int, int]]) -> tuple[int, int]:
    used, tokens = zip(*blocks, strict=True)
    return sum(used), sum(tokens)


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of samples that are drawn again from these."""
    drawn = np.random.default_rng(0).choice(ratios, size=(2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON on standard output if asked for; 1 where metrics cost more than they may."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/metrics_cost.py", description="What metrics cost the coordinator."
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--pairs", type=int, default=100, help="blocks of each arm (default 100)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a block (default 3)")
    add_round_options(parser)
    parser.add_argument("--limit-percent", type=float, default=1.0, help="most that it may cost (default 1)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = []
    for sessions in options.sessions:
        with without_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            work = measure(
                sessions,
                pairs=options.pairs,
                rounds=options.rounds,
                draft_steps=options.draft_steps,
                width=options.draft_width,
                max_nodes=options.max_nodes,
            )
            results.append(runner.run(work))
    heads = ("sessions", "off us/token", "on us/token", "counting %", "95 %", "reading ms", "reading %", "cost %")
    shown = Table(*heads, title="Metrics on and off")
    for result in results:
        shown.add_row(
            str(result["sessions"]),
            f"{result['off_us_per_token']:.2f}",
            f"{result['on_us_per_token']:.2f}",
            f"{result['counting_percent']:+.2f}",
            f"{result['counting_percent_low']:+.2f} to {result['counting_percent_high']:+.2f}",
            f"{result['reading_ms']:.2f}",
            f"{result['reading_percent']:.2f}",
            f"{result['cost_percent']:+.2f}",
        )
    Console(stderr=options.json).print(shown)
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return int(any(result["cost_percent"] > options.limit_percent for result in results))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
