"""Measures the load that one coordinator carries: a real one between workers that only pretend to compute.

    python benchmarks/relay.py --sessions 64 --round-ms 8 --step-ms 1

Targets commit a token of each of their sessions every round, drafts grow nodes of each of theirs every step, and
clients read their streams. Reports messages per second, latencies of growth, of commits, of clients' messages and of
unary calls (median and 99th percentile, of a message's oldest token), how often a session was held, and the share of a
core that the coordinator takes; before that, how long it takes until all streams, which come at once, have begun, and
the longest unary call meanwhile. The share of a core includes some 50 unary calls a second. Everything is on this
machine: two cores at least, where clients give way to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop

from outrider.models import embedded_target_path
from outrider.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2, draft_pb2, generation_pb2, generation_pb2_grpc, registry_pb2, target_pb2
from outrider.wire import WIRE_VERSION, floats_to_bytes, uints_from_bytes, uints_to_bytes

_VOCAB_SIZE, _MODEL_LEN, _PROMPT = 8192, 2048, 64
_NEW, _CLIENTS = 1900, 2
# A token says at which millisecond its round has ended, as far as the vocabulary goes.
_TOKEN_MS = 8000
# Steps that a draft makes at most while a message is written.
_MOST_STEPS = 10
# Of a client process: some digits for each message of the time that is measured.
_ANSWER_BYTES = 16 << 20
_BETWEEN_CALLS_S = 0.02
# Until all streams have begun.
_PATIENCE_S = 30.0


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--round-ms", type=float, default=8.0, help="between two rounds of the target")
    parser.add_argument("--step-ms", type=float, default=1.0, help="between two steps of the draft; 0: no draft grows")
    parser.add_argument("--tokens", type=int, default=1, help="that a round commits of each session")
    parser.add_argument("--nodes", type=int, default=2, help="of each session and step")
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--coordinator", nargs="*", default=[], help="command that runs it, default this interpreter")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    uvloop.run(_read_streams(options) if options.client else _measure(options))


async def _measure(options: argparse.Namespace) -> None:
    command = options.coordinator or [sys.executable, "-m", "outrider.cli"]
    process = await asyncio.create_subprocess_exec(
        *command, "coordinator", "--port", "0", "--max-running-sessions", str(options.sessions), "--log-level", "error",
        "--stop-with-stdin", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    line = (await process.stdout.readline()).decode()
    address = json.loads(line)["address"] if line.startswith("{") else line.split()[-1]
    # Before gRPC runs here: its handlers of forks have made some of the processes crash that were started later.
    clients = [
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, *sys.argv[1:], "--client", address, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            limit=_ANSWER_BYTES,
        )
        for _ in range(_CLIENTS)
    ]  # fmt: skip
    try:
        async with Workers(address, options) as workers:
            async with asyncio.timeout(_PATIENCE_S):
                await workers.connected()
            # The coordinator has begun their streams, and takes them for workers a moment later.
            await asyncio.sleep(1)
            for client in clients:
                assert client.stdin is not None
                client.stdin.write(b"begin\n")
            wanted, began = options.sessions // _CLIENTS * _CLIENTS, time.perf_counter()
            async with asyncio.timeout(_PATIENCE_S):
                first_answers_ms = await _ask(address, lambda: workers.sessions >= wanted)
            begin_s = time.perf_counter() - began
            await asyncio.sleep(1.5)
            workers.clear()
            began, cpu = time.perf_counter(), _cpu_s(process.pid)
            await _heard(clients)
            answers_ms = await _ask(address, lambda: time.perf_counter() >= began + options.seconds)
            seconds, cpu = time.perf_counter() - began, _cpu_s(process.pid) - cpu
            tokens, lags = await _heard(clients)
            found = {
                "busy": round(cpu / seconds, 3),
                "sessions": workers.sessions,
                **workers.figures(seconds),
                "client_messages_per_s": round(len(lags) / seconds),
                "client_tokens_per_s": round(tokens / seconds),
                "client_ms": _median_and_worst(lags),
                "answer_ms": _median_and_worst(answers_ms),
                "begin_s": round(begin_s, 3),
                "begin_answer_ms": round(max(first_answers_ms), 2),
            }
            sys.stdout.write(json.dumps(found) + "\n")
    finally:
        for client in clients:
            client.kill()
        process.stdin.close()
        await process.wait()


async def _ask(coordinator: str, is_over: Callable[[], bool]) -> list[float]:
    """Ask for the coordinator's state until it is over, a moment after each answer; return how long they took."""
    took_ms = list[float]()
    async with grpc.aio.insecure_channel(coordinator, options=CHANNEL_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while not is_over():
            asked_s = time.perf_counter()
            await stub.GetServerInfo(generation_pb2.GetServerInfoRequest())
            took_ms.append(1e3 * (time.perf_counter() - asked_s))
            await asyncio.sleep(_BETWEEN_CALLS_S)
    return took_ms


def _median_and_worst(times_ms: Sequence[float]) -> list[float] | None:
    """Return the median and the 99th percentile."""
    ordered = sorted(times_ms)
    if not ordered:
        return None
    return [round(statistics.median(ordered), 2), round(ordered[int(0.99 * (len(ordered) - 1))], 2)]


async def _heard(clients: Sequence[asyncio.subprocess.Process]) -> tuple[int, list[int]]:
    """Return how many tokens all clients have got since the last time, and the age of each message's first."""
    tokens, lags = 0, list[int]()
    for client in clients:
        assert client.stdin is not None and client.stdout is not None
        client.stdin.write(b"\n")
        own = json.loads(await client.stdout.readline())
        tokens += own["tokens"]
        lags += own["lags"]
    return tokens, lags


def _now_token() -> int:
    return int(1e3 * time.perf_counter()) % _TOKEN_MS


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _read_streams(options: argparse.Namespace) -> None:
    """Read a client process's share of the streams, one after the other for ever; answer all lines but the first."""
    os.nice(10)
    # Before there are workers, nothing can be asked for.
    sys.stdin.readline()
    tokens, lags = 0, list[int]()

    def tell() -> None:
        nonlocal tokens
        sys.stdin.readline()
        sys.stdout.write(json.dumps({"tokens": tokens, "lags": lags}) + "\n")
        sys.stdout.flush()
        tokens = 0
        lags.clear()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), tell)
    async with grpc.aio.insecure_channel(options.client, options=CHANNEL_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[1] * _PROMPT),
            sampling_params=generation_pb2.SamplingParams(max_new_tokens=_NEW, ignore_eos=True),
        )

        async def read() -> None:
            nonlocal tokens
            while True:
                async for response in stub.Generate(request):
                    if token_ids := response.delta.token_ids:
                        tokens += len(token_ids)
                        lags.append((_now_token() - token_ids[0]) % _TOKEN_MS)

        await asyncio.gather(*(read() for _ in range(options.sessions // _CLIENTS)))


class Workers:
    """Targets and drafts that send what they are told to, when it is due."""

    def __init__(self, coordinator: str, options: argparse.Namespace) -> None:
        self._coordinator = coordinator
        self._steps = Steps()
        self._targets = [Target(f"target-{number}", options, self._steps) for number in range(options.targets)]
        drafts = options.drafts if options.step_ms else 0
        self._drafts = [Draft(f"draft-{number}", options, self._steps, self._targets) for number in range(drafts)]

    def clear(self) -> None:
        """Count from now on."""
        for worker in (*self._targets, *self._drafts):
            worker.clear()

    async def connected(self) -> None:
        """Wait until the coordinator has begun a stream to each."""
        await asyncio.gather(*(worker.connected.wait() for worker in (*self._targets, *self._drafts)))

    @property
    def sessions(self) -> int:
        """Sessions open at the targets."""
        return sum(target.sessions for target in self._targets)

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return counts and latencies since `clear`."""
        targets, drafts = self._targets, self._drafts
        return {
            "rounds_per_s": round(sum(target.rounds for target in targets) / seconds),
            "steps_per_s": round(sum(draft.steps for draft in drafts) / seconds),
            "growth_messages_per_s": round(sum(draft.messages for draft in drafts) / seconds),
            "relayed_per_s": round(sum(target.relayed for target in targets) / seconds),
            "growth_ms": _median_and_worst([1e3 * lag for target in targets for lag in target.growth_s]),
            "commit_ms": _median_and_worst([1e3 * lag for draft in drafts for lag in draft.commit_s]),
            "holds": sum(target.holds for target in targets),
        }

    async def __aenter__(self) -> Workers:
        for worker in (*self._targets, *self._drafts):
            await worker.start(self._coordinator)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in (*self._targets, *self._drafts):
            await worker.stop()


class Steps:
    """When each step of any draft was sent; a step's number is the id of all its nodes."""

    def __init__(self) -> None:
        self.sent_s = [0.0]

    def next(self) -> int:
        """Return the number of a step that is sent now."""
        self.sent_s.append(time.perf_counter())
        return len(self.sent_s) - 1


class _Worker:
    """A registered worker with a server of its own.

    Messages are made once for a set of sessions. Each round and each step changes what tells it apart from others, so
    that the workers need little of the core that they share with the clients.
    """

    service: str
    method: str
    role: registry_pb2.WorkerRole

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options = name, options
        self._tasks: list[asyncio.Task[Any]] = []
        self.connected = asyncio.Event()
        """The coordinator has begun a stream."""

    @property
    def sessions(self) -> int:
        """Open sessions."""
        raise NotImplementedError

    async def start(self, coordinator: str) -> None:
        """Serve and register."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"outrider.v1.{self.service}", {self.method: handler}),)
        )
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._register(coordinator, address)))

    async def stop(self) -> None:
        """End both."""
        for task in self._tasks:
            task.cancel()
        for end in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(end, Exception):
                sys.stderr.write(f"{end}\n")
        await self._server.stop(0)

    async def _register(self, coordinator: str, address: str) -> None:
        model = common_pb2.ModelInfo(
            name=self._name, vocab_size=_VOCAB_SIZE, tokenizer_hash=tokenizer_hash(embedded_target_path()),
            max_model_len=_MODEL_LEN,
        )  # fmt: skip
        limits = registry_pb2.WorkerLimits(max_sessions=2 * self._options.sessions)
        introduction = registry_pb2.WorkerIntroduction(
            worker_id=self._name,
            name=self._name,
            role=self.role,
            address=address,
            model=model,
            limits=limits,
            wire_version=WIRE_VERSION,
        )
        async with grpc.aio.insecure_channel(coordinator, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream("/outrider.v1.RegistryService/Register")()
            await call.write(registry_pb2.WorkerReport(introduction=introduction).SerializeToString())
            await call.read()
            while not call.done():
                load = common_pb2.WorkerLoad(sessions=self.sessions, slots_total=1 << 20)
                await call.write(registry_pb2.WorkerReport(load=load).SerializeToString())
                await asyncio.sleep(0.3)
            raise RuntimeError(f"{self._name}: {await call.details()}")

    async def _serve(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        self.connected.set()
        hearing = asyncio.create_task(self._hear(requests))
        try:
            async for message in self._messages():
                if hearing.done():
                    break
                yield message
        finally:
            hearing.cancel()

    def _messages(self) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def _hear(self, requests: AsyncIterator[bytes]) -> None:
        raise NotImplementedError


class Target(_Worker):
    """Commits some tokens of every session each round."""

    service, method, role = "TargetService", "Verify", registry_pb2.WORKER_ROLE_TARGET

    def __init__(self, name: str, options: argparse.Namespace, steps: Steps) -> None:
        super().__init__(name, options)
        self._steps = steps
        # By session id: epoch and the round before its first.
        self._verified: dict[int, tuple[int, int]] = {}
        self._results = target_pb2.RoundResults()
        self._round_number = 0
        self.reported_s: dict[tuple[int, int], float] = {}
        """When a round's results were sent, by its first session and the length of this before."""
        self.clear()

    def clear(self) -> None:
        """Count from now on."""
        self.rounds = self.relayed = self.holds = 0
        self.growth_s: list[float] = []

    @property
    def sessions(self) -> int:
        """See `_Worker`."""
        return len(self._verified)

    async def _messages(self) -> AsyncIterator[bytes]:
        due = time.perf_counter()
        while True:
            due = max(due + self._options.round_ms / 1e3, time.perf_counter() - 0.05)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            if self._verified:
                self.rounds += 1
                yield self._round()

    def _round(self) -> bytes:
        self._round_number += 1
        count, tokens = len(self._verified), self._options.tokens
        results = self._results
        if results.session_ids[:] != list(self._verified):
            results.Clear()
            results.MergeFrom(
                target_pb2.RoundResults(
                    session_ids=list(self._verified),
                    epochs=[epoch for epoch, _ in self._verified.values()],
                    token_counts=[tokens] * count,
                    accepted_counts=[tokens - 1] * count,
                    accepted_sources=[2] * (count * (tokens - 1)),
                    selected_counts=[tokens - 1] * count,
                    finishes=[target_pb2.FINISH_UNSPECIFIED] * count,
                    cached_tokens=[0] * count,
                    lost=[0] * count,
                    tree_ends=[target_pb2.TREE_END_COVERED] * count,
                    report=common_pb2.StepReport(step_ns=100_000, forward_ns=50_000),
                )
            )
        results.tokens[:] = [_now_token()] * (count * tokens)
        for row, (session_id, (_, before)) in enumerate(list(self._verified.items())):
            emitted = tokens * (self._round_number - before)
            self.reported_s[session_id, _PROMPT + emitted - tokens] = time.perf_counter()
            if emitted >= _NEW:
                results.finishes[row] = target_pb2.FINISH_LENGTH
                del self._verified[session_id]
        return results.SerializeToString()

    async def _hear(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            commands = target_pb2.RoundCommands.FromString(data)
            for opening in commands.opens:
                self._verified[opening.session_id] = opening.epoch, self._round_number
            for session_id in commands.close_session_ids:
                self._verified.pop(session_id, None)
            self.holds += commands.bounds.allow[:].count(0)
            if commands.growth.session_ids:
                self.relayed += 1
                now_s = time.perf_counter()
                for step in set(uints_from_bytes(commands.growth.node_ids).tolist()):
                    self.growth_s.append(now_s - self._steps.sent_s[step])


class Draft(_Worker):
    """Grows some nodes of every session each step; steps that are due while a message is written leave as one."""

    service, method, role = "DraftService", "Speculate", registry_pb2.WORKER_ROLE_DRAFT

    def __init__(self, name: str, options: argparse.Namespace, steps: Steps, targets: Sequence[Target]) -> None:
        super().__init__(name, options)
        self._steps, self._targets = steps, targets
        # Epoch by session id.
        self._grown: dict[int, int] = {}
        # By the number of steps in them.
        self._growths: dict[int, draft_pb2.DraftGrowth] = {}
        self.clear()

    def clear(self) -> None:
        """Count from now on."""
        self.steps = self.messages = 0
        self.commit_s: list[float] = []

    @property
    def sessions(self) -> int:
        """See `_Worker`."""
        return len(self._grown)

    async def _messages(self) -> AsyncIterator[bytes]:
        step_s, due = self._options.step_ms / 1e3, time.perf_counter()
        while True:
            due = max(due + step_s, time.perf_counter() - _MOST_STEPS * step_s)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            if self._grown:
                numbers = [self._steps.next()]
                while due + step_s < time.perf_counter():
                    due += step_s
                    numbers.append(self._steps.next())
                self.messages += 1
                self.steps += len(numbers)
                yield self._growth(numbers)

    def _growth(self, numbers: Sequence[int]) -> bytes:
        steps, count, nodes = len(numbers), len(self._grown), self._options.nodes
        growth = self._growths.get(steps)
        if growth is None:
            rows = steps * count
            growth = self._growths[steps] = draft_pb2.DraftGrowth(
                session_ids=list(self._grown) * steps,
                epochs=list(self._grown.values()) * steps,
                as_of=[_PROMPT] * rows,
                node_counts=[nodes] * rows,
                parents=uints_to_bytes([0] * (rows * nodes)),
                tokens=uints_to_bytes([5] * (rows * nodes)),
                acceptance=floats_to_bytes([0.5] * (rows * nodes)),
                complete=[False] * rows,
                report=common_pb2.StepReport(step_ns=100_000, forward_ns=50_000, steps=steps),
                source=common_pb2.GROWTH_SOURCE_MODEL,
            )
        growth.node_ids = b"".join(uints_to_bytes([number]) * (count * nodes) for number in numbers)
        return growth.SerializeToString()

    async def _hear(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            commands = draft_pb2.DraftCommands.FromString(data)
            for opening in commands.opens:
                self._grown[opening.session_id] = opening.epoch
            for session_id in commands.close_session_ids:
                self._grown.pop(session_id, None)
            if commands.opens or commands.close_session_ids:
                self._growths.clear()
            commits, now_s = commands.commits, time.perf_counter()
            for name in zip(commits.session_ids[:], commits.positions[:], strict=True):
                for target in self._targets:
                    if (reported_s := target.reported_s.pop(name, None)) is not None:
                        self.commit_s.append(now_s - reported_s)


if __name__ == "__main__":
    main()
