"""What a round costs the coordinator in CPU time: its own code, between the messages read and the messages written.

    python benchmarks/coordinator_cpu.py [--sessions 1 16 64 128 256] [--draft-steps 14] [--ngram-depth 16] [--json]

One thread runs everything: real scheduler and links, and in the place of gRPC's streams queues of serialised messages.
Fake workers make the messages; their time is taken out. The CPU clock of the thread is read, not the wall. Work on the
machine still slows a shared core down: the yardstick, a fixed piece of Python, tells by how much.

batch        from the reading of a target's result to the writing of the next batch: what a round waits for
growth       one message of a draft, from reading to grafted
nodes        drafted nodes of such a message
ngrams       one message of n-grams of a worker of their own, with `--ngram-depth`: once a round, after the commits
delivery     after the batch: text and events to the clients, which read them in this thread
round        all of it: batch, delivery, the growth of `--draft-steps` steps and an answer of n-grams
p10          what it takes when little comes between: on a machine with other work the mean tells of that work's caches
yardstick    a fixed piece of Python, once a round
gRPC's own work (its threads, its sockets) is in none of them.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
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

from benchmarks.simulation.chain_grower import ChainGrower
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.tree_grower import GrownRows, TreeGrower

from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.generation import Generation
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.messages import GenerationRequest
from outrider.coordinator.rounds import Way
from outrider.coordinator.scheduler import Scheduler
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.trials import Trials
from outrider.coordinator.verify_loop import VerifyLoop
from outrider.errors import WorkerUnavailable
from outrider.growth_source import GrowthSource, sources_to_proto
from outrider.sampling import SamplingSpec
from outrider.v1 import draft_pb2, registry_pb2, target_pb2
from outrider.wire import floats_to_bytes, split_by_counts, tokens_from_bytes

_NO_LIMIT = 1 << 30
_TURNS = 12
"""Of the event loop, until everything that was started by a message is done."""


class Wire:
    """In the place of a gRPC stream: what is written is serialised, what is read was."""

    def __init__(self, answer_type: Any) -> None:
        self._answer_type = answer_type
        self._incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.written: list[tuple[int, bytes]] = []
        """(CPU time, message)"""

    def feed(self, message: Any) -> None:
        """A message from the worker."""
        self._incoming.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            yield self._answer_type.FromString(await self._incoming.get())

    async def write(self, message: Any) -> None:
        """A message to the worker."""
        data = message.SerializeToString()
        self.written.append((time.thread_time_ns(), data))

    def cancel(self) -> None:
        """Ends nothing: there is nothing."""

    def take(self) -> list[tuple[int, bytes]]:
        """What was written since the last time."""
        written, self.written = self.written, []
        return written


class WiredTargetLink(TargetLink):
    """The coordinator's own link on a wire."""

    def _start(self, call: Any) -> None:
        call.cancel()
        self.wire = Wire(target_pb2.VerifyResponse)
        super()._start(self.wire)  # pyright: ignore[reportArgumentType]


class WiredDraftLink(DraftLink):
    """The same to a draft."""

    def _start(self, call: Any) -> None:
        call.cancel()
        self.wire = Wire(draft_pb2.DraftGrowth)
        super()._start(self.wire)  # pyright: ignore[reportArgumentType]


class OneGroupLoop(VerifyLoop):
    """Weighs every round whether to wait, and has all sessions in one batch: nothing is tried that costs less."""

    def __init__(self, lane: TargetLane, *others: Any) -> None:
        super().__init__(lane, *others)
        lane.way = Trials((Way.WAIT,))


@dataclass(frozen=True, kw_only=True)
class Ngrams:
    """A worker of n-grams beside the model's.

    Attributes:
        depth: nodes of a branch.
        rounds_late: rounds that an answer comes too late.
    """

    depth: int
    rounds_late: int = 0


class Bench:
    """A scheduler, a target, a draft, maybe a worker of n-grams, and clients."""

    def __init__(
        self,
        sessions: int,
        *,
        width: int,
        max_nodes: int,
        loop_type: type[VerifyLoop] = OneGroupLoop,
        ngrams: Ngrams | None = None,
    ) -> None:
        self._model = PathModel(seed=0, rank_rates=(0.7, 0.12, 0.05, 0.03), spread=0.2)
        self._grower = TreeGrower(self._model, width=width)
        self._lengths: dict[int, tuple[int, int]] = {}
        """Session to its path's key and its committed length, at the target."""
        self.emitted = 0
        self._batches: deque[bytes] = deque()
        # Nothing is waited for: what is measured is work.
        self.scheduler = Scheduler(
            CoordinatorConfig(max_running_sessions=sessions, max_queue=sessions, verify_wait_cap_ms=0),
            loop_type=loop_type,
        )
        self._target = WiredTargetLink("127.0.0.1:1", incarnation=1, on_lost=_fail)
        self._draft = self._draft_link("draft")
        self._links: list[DraftLink | TargetLink] = [self._target, self._draft]
        limits = registry_pb2.WorkerLimits(max_sessions=sessions, max_tree_nodes=max_nodes, max_step_tokens=4096)
        self.scheduler.add_target("target", self._target, limits, on_failure=_fail)
        self.scheduler.add_draft("draft", self._draft, limits)
        if ngrams is not None:
            own = PathModel(seed=0, rank_rates=(0.6,), spread=0.2, draft=1, kinship=0.5)
            self._chains = ChainGrower(own, depth=ngrams.depth)
            # What is on its way.
            self._answers: deque[draft_pb2.DraftGrowth | None] = deque([None] * ngrams.rounds_late)
            self._trie = self._draft_link("trie")
            self._links.append(self._trie)
            self.scheduler.add_draft("trie", self._trie, limits, sources=[GrowthSource.NGRAM])
        requests = [
            GenerationRequest(
                request_id=str(key), prompt_token_ids=(key, 1), sampling=SamplingSpec(max_new_tokens=_NO_LIMIT)
            )
            for key in range(1, sessions + 1)
        ]
        generations = [self.scheduler.submit(request, [TextStream(None)]) for request in requests]
        self._readers = [asyncio.create_task(_read(generation)) for generation in generations]

    def _draft_link(self, worker_id: str) -> WiredDraftLink:
        return WiredDraftLink(
            "127.0.0.1:1",
            incarnation=1,
            vocab_size=_NO_LIMIT,
            on_growth=lambda growth: self.scheduler.take_growth(worker_id, growth),
            on_error=lambda *error: _fail(str(error)),
            on_lost=_fail,
        )

    async def close(self) -> None:
        """Ends everything."""
        await self.scheduler.stop(WorkerUnavailable("the measurement is over"))
        await asyncio.gather(*self._readers, return_exceptions=True)
        for link in self._links:
            await link.close()

    async def growth(self) -> tuple[int, int]:
        """One draft step: (CPU time of taking it, its nodes)."""
        for _, data in self._draft.wire.take():
            self._obey(draft_pb2.DraftCommands.FromString(data), self._grower)
        message = _growth_message(self._grower.step())
        message.report.step_ns = 750_000
        return await self._cost(self._draft.wire, message.SerializeToString()), len(message.node_ids)

    async def answer(self) -> tuple[int, int]:
        """What n-grams say of the last commits: (CPU time of taking it, its nodes)."""
        for _, data in self._trie.wire.take():
            self._obey(draft_pb2.DraftCommands.FromString(data), self._chains)
        message = _growth_message(self._chains.step())
        message.sources.extend(sources_to_proto([GrowthSource.NGRAM]) * len(message.node_ids))
        self._answers.append(message)
        if (due := self._answers.popleft()) is None:
            return 0, 0
        return await self._cost(self._trie.wire, due.SerializeToString()), len(due.node_ids)

    async def result(self) -> tuple[int, int]:
        """One result of the target: CPU time until the next batch is written, and from then on."""
        await self._find_batches()
        answer = self._verify(target_pb2.VerifyRequest.FromString(self._batches.popleft())).SerializeToString()
        began_ns = time.thread_time_ns()
        whole_ns = await self._cost(self._target.wire, answer)
        # Where two groups of sessions take turns, the next batch may have left before.
        left_ns = max((at_ns for at_ns, _ in self._target.wire.written), default=began_ns)
        return left_ns - began_ns, whole_ns - (left_ns - began_ns)

    async def _find_batches(self) -> None:
        async with asyncio.timeout(10):
            while not self._batches:
                self._batches += [data for _, data in self._target.wire.take()]
                await asyncio.sleep(0)

    @staticmethod
    async def _cost(wire: Wire, message: bytes) -> int:
        began_ns = time.thread_time_ns()
        wire.feed(message)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        return time.thread_time_ns() - began_ns

    @staticmethod
    def _obey(commands: draft_pb2.DraftCommands, grower: TreeGrower | ChainGrower) -> None:
        for opening in commands.opens:
            key, length = tokens_from_bytes(opening.prompt)[0], len(opening.prompt + opening.output) // 4
            if isinstance(grower, ChainGrower):
                grower.open(opening.session_id, key=key, epoch=opening.epoch, length=length)
                continue
            grower.open(
                opening.session_id,
                key=key,
                epoch=opening.epoch,
                length=length,
                is_sync=False,
                max_nodes=opening.limits.max_live_nodes,
                max_depth=opening.limits.max_depth,
            )
        commits = commands.commits
        columns = zip(
            commits.session_ids, commits.epochs, commits.positions, split_by_counts(commits.token_counts), strict=True
        )
        for session_id, epoch, position, span in columns:
            grower.commit(session_id, epoch=epoch, position=position, token_ids=commits.tokens[span])

    def _verify(self, request: target_pb2.VerifyRequest) -> target_pb2.VerifyResponse:
        for opening in request.opens:
            key = tokens_from_bytes(opening.prompt)[0]
            self._lengths[opening.session_id] = key, len(opening.prompt + opening.output) // 4
        trees = request.trees
        sessions = len(trees.session_ids)
        response = target_pb2.VerifyResponse(
            step=request.step,
            session_ids=trees.session_ids,
            epochs=trees.epochs,
            outcomes=[target_pb2.OUTCOME_ACCEPTED] * sessions,
            cached_tokens=[0] * sessions,
        )
        for session_id, span in zip(trees.session_ids, split_by_counts(trees.node_counts), strict=True):
            key, length = self._lengths[session_id]
            accepted, emitted = self._model.walk(key, length, trees.tokens[span], trees.parents[span])
            self._lengths[session_id] = key, length + len(emitted)
            response.accepted_counts.append(len(accepted))
            response.accepted_nodes.extend(accepted)
            response.token_counts.append(len(emitted))
            response.tokens.extend(emitted)
        self.emitted += len(response.tokens)
        rows = sessions + len(trees.tokens)
        response.report.tokens, response.report.sessions = rows, sessions
        response.report.step_ns = response.report.forward_ns = 8_000_000 + 10_000 * rows
        return response


def _fail(reason: str) -> None:
    sys.stderr.write(f"coordinator_cpu: {reason}\n")


async def _read(generation: Generation) -> None:
    async for _ in generation:
        pass


def _growth_message(grown: dict[int, GrownRows]) -> draft_pb2.DraftGrowth:
    rows = [row for part in grown.values() for row in part.rows]
    return draft_pb2.DraftGrowth(
        session_ids=list(grown),
        epochs=[part.epoch for part in grown.values()],
        as_of=[part.as_of for part in grown.values()],
        node_counts=[len(part.rows) for part in grown.values()],
        node_ids=[row[0] for row in rows],
        parents=[row[1] for row in rows],
        tokens=[row[2] for row in rows],
        acceptance=floats_to_bytes([row[3] for row in rows]),
        complete=[False] * len(grown),
    )


def _yardstick_ns() -> int:
    """CPU time of what never changes: small objects, a dictionary, calls."""
    began_ns = time.thread_time_ns()
    held: dict[int, tuple[int, str]] = {}
    for number in range(2000):
        held[number & 255] = (number, str(number))
    return time.thread_time_ns() - began_ns


@contextmanager
def without_collector() -> Iterator[None]:
    """The benchmark's own trees would make Python's collector work, which would be put down to the coordinator."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def measure(
    sessions: int, *, rounds: int, draft_steps: int, width: int, max_nodes: int, ngrams: Ngrams | None = None
) -> dict[str, Any]:
    """The figures of one number of sessions, in microseconds."""
    bench = Bench(sessions, width=width, max_nodes=max_nodes, ngrams=ngrams)
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    batches, deliveries, growths, nodes, yardsticks, answers = [], [], [], [], [], []
    try:
        for number in range(rounds + 5):
            if number == 5:
                bench.emitted = 0
                for figures in (batches, deliveries, growths, nodes, yardsticks, answers):
                    figures.clear()
            if ngrams is not None:
                answers.append(await bench.answer())
            for _ in range(draft_steps):
                taken_ns, count = await bench.growth()
                growths.append(taken_ns / 1e3)
                nodes.append(count)
            batch_ns, delivery_ns = await bench.result()
            batches.append(batch_ns / 1e3)
            deliveries.append(delivery_ns / 1e3)
            yardsticks.append(_yardstick_ns() / 1e3)
    finally:
        await bench.close()
    answer_us = [taken_ns / 1e3 for taken_ns, _ in answers]
    by_ngrams = {} if ngrams is None else _of_answers(answer_us, [count for _, count in answers])
    return {
        "sessions": sessions,
        "batch_us": fmean(batches),
        "batch_p10_us": float(np.percentile(batches, 10)),
        "batch_p99_us": float(np.percentile(batches, 99)),
        "delivery_us": fmean(deliveries),
        "growth_us": fmean(growths),
        "growth_p10_us": float(np.percentile(growths, 10)),
        "growth_p99_us": float(np.percentile(growths, 99)),
        "nodes": fmean(nodes),
        **by_ngrams,
        "round_us": fmean(batches) + fmean(deliveries) + draft_steps * fmean(growths) + sum(answer_us) / rounds,
        "yardstick_us": fmean(yardsticks),
        "acceptance_length": bench.emitted / rounds / sessions,
    }


def _of_answers(taken_us: Sequence[float], nodes: Sequence[int]) -> dict[str, float]:
    p10, p99 = np.percentile(taken_us, [10, 99]).tolist()
    return {"ngrams_us": fmean(taken_us), "ngrams_p10_us": p10, "ngrams_p99_us": p99, "ngrams_nodes": fmean(nodes)}


def add_round_options(parser: argparse.ArgumentParser) -> None:
    """What a round consists of."""
    parser.add_argument("--draft-steps", type=int, default=14, help="messages of growth in a round (default 14)")
    parser.add_argument("--draft-width", type=int, default=64, help="nodes that a draft's step expands (default 64)")
    parser.add_argument("--max-nodes", type=int, default=24, help="of a session in a batch (default 24)")


def run(arguments: Sequence[str]) -> int:
    """A table, and JSON on standard output if asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks/coordinator_cpu.py", description="CPU time of a round.")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=100)
    add_round_options(parser)
    parser.add_argument("--ngram-depth", type=int, default=0, help="nodes of an n-gram branch (default 0: no n-grams)")
    parser.add_argument("--ngram-rounds-late", type=int, default=0, help="rounds that n-grams are late by (default 0)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    ngrams = Ngrams(depth=options.ngram_depth, rounds_late=options.ngram_rounds_late) if options.ngram_depth else None
    results = []
    for sessions in options.sessions:
        with without_collector(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            work = measure(
                sessions,
                rounds=options.rounds,
                draft_steps=options.draft_steps,
                width=options.draft_width,
                max_nodes=options.max_nodes,
                ngrams=ngrams,
            )
            results.append(runner.run(work))
    shown = Table(title="CPU time in microseconds")
    for name in results[0]:
        shown.add_column(name.removesuffix("_us").replace("_", " "), justify="right")
    for result in results:
        shown.add_row(*(f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in result.values()))
    Console(stderr=options.json).print(shown)
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
