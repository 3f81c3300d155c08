"""Stands in for a coordinator and its target: mirrors the trees, and commits to all sessions at regular times."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from outrider import rpc
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.wire import floats_from_bytes, split_by_counts, tokens_to_bytes

# Most nodes of a path that one round accepts, as of a request's own limits.
_DEPTH = 16
# Chance that the next sibling is accepted where the better ones were not.
_OF_SIBLINGS = 0.4
# A node's id, or the committed length whose last token is a root.
_Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the worker.

    Attributes:
        sessions: open at once.
        prompt_tokens: of each.
        round_ms: between two commits.
        acceptance: chance that the best child of an accepted node is accepted.
        temperature: of all sessions.
        live_nodes: of each session's tree.
        vocab_size: of prompts.
    """

    sessions: int
    prompt_tokens: int
    round_ms: float
    acceptance: float
    temperature: float
    live_nodes: int
    vocab_size: int


@dataclass
class Seen:
    """What came, and when, by `time.perf_counter_ns`.

    Attributes:
        arrivals: number of the worker's step, and when its growth was read.
        steps: of each step, its own account of its time and of its forward.
        rows: of each step.
        answers: ns from a commit to growth below its last token.
        committed: tokens.
        rounds: of one session.
    """

    arrivals: list[tuple[int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    committed: int = 0
    rounds: int = 0


class Session:
    """One session's tree. What is committed and not grown yet is looked for again whenever something has grown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked_ns = 0
        self._children: dict[_Key, list[tuple[_Key, int, float]]] = defaultdict(list)
        self._root: tuple[int, _Key] = (length, ("root", length))
        # Committed tokens behind the root that is known.
        self._ahead: list[int] = []

    def grow(self, parents: Any, node_ids: Any, tokens: Any, acceptance: Any, as_of: int) -> None:
        """New nodes, by column; `as_of` is what was committed when they grew."""
        for parent, node_id, token, value in zip(parents, node_ids, tokens, acceptance, strict=True):
            above = ("node", parent) if parent else ("root", as_of)
            self._children[above].append((("node", node_id), token, value))
        known = self._root[0]
        if as_of >= known and 0 in parents:
            self._root, self._ahead = (as_of, ("root", as_of)), self._ahead[as_of - known :]
        self._advance()

    def path(self, chance: random.Random, load: Load) -> list[int]:
        """The tokens of a round; none where nothing is known of what follows."""
        key, tokens = self._root[1], []
        if self._ahead:
            return []
        while len(tokens) < _DEPTH and (children := self._children.get(key)):
            acceptance = load.acceptance
            for key, token, _ in sorted(children, key=lambda child: -child[2]):  # noqa: B007 - the accepted one is kept
                if chance.random() < acceptance:
                    tokens.append(token)
                    break
                acceptance = _OF_SIBLINGS
            else:
                return [*tokens, chance.randrange(load.vocab_size)]
        return tokens

    def commit(self, tokens: list[int]) -> None:
        """The target has chosen these."""
        self.length += len(tokens)
        self._ahead += tokens
        self._advance()

    def _advance(self) -> None:
        while self._ahead:
            length, key = self._root
            below = next((child for child, token, _ in self._children.get(key, ()) if token == self._ahead[0]), None)
            if below is None:
                return
            self._root = (length + 1, below)
            del self._ahead[0]


class FakeCoordinator:
    """One stream to the worker.

    Args:
        address: of the worker.
        load: of the run.
    """

    def __init__(self, address: str, load: Load) -> None:
        self._load, self._address = load, address
        self._chance = random.Random(load.sessions)
        self._sessions = {number: Session(load.prompt_tokens) for number in range(1, load.sessions + 1)}
        self.seen = Seen()

    async def run(self, *, warm_s: float, measure_s: float, begin: Any, end: Any) -> Seen:
        """Serves the sessions; what is seen is of the measured time alone.

        Args:
            warm_s: before it.
            measure_s: of it.
            begin: called when it begins.
            end: called when it is over.
        """
        async with rpc.open_channel(self._address) as channel:
            self._call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            tasks = [asyncio.create_task(work) for work in (self._read(), self._commit())]
            try:
                await self._call.write(draft_pb2.DraftCommands(incarnation=1, opens=self._openings()))
                await _while_working(tasks, warm_s)
                begin()
                self.seen = Seen()
                await _while_working(tasks, measure_s)
                seen, self.seen = self.seen, Seen()
                end()
                return seen
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._call.cancel()

    def _openings(self) -> list[common_pb2.SessionOpen]:
        load = self._load
        limits = common_pb2.SpeculationLimits(
            mode=common_pb2.SPECULATION_MODE_ASYNC, max_live_nodes=load.live_nodes, max_depth=_DEPTH
        )
        return [
            common_pb2.SessionOpen(
                session_id=number,
                epoch=1,
                prompt=tokens_to_bytes([self._chance.randrange(load.vocab_size) for _ in range(load.prompt_tokens)]),
                sampling=SamplingSpec(temperature=load.temperature, seed=number, max_new_tokens=1 << 16).to_proto(),
                limits=limits,
            )
            for number in self._sessions
        ]

    async def _read(self) -> None:
        while message := await self._call.read():
            now = time.perf_counter_ns()
            if message.errors:
                raise RuntimeError(f"the worker refused: {message.errors[0].message}")
            seen, report = self.seen, message.report
            seen.arrivals.append((message.load.steps, now))
            seen.steps.append((report.step_ns, report.forward_ns))
            seen.rows.append(report.tokens)
            acceptance = floats_from_bytes(message.acceptance).tolist()
            parents, node_ids, tokens = list(message.parents), list(message.node_ids), list(message.tokens)
            spans = split_by_counts(message.node_counts)
            for number, as_of, span in zip(message.session_ids, message.as_of, spans, strict=True):
                session = self._sessions[number]
                session.grow(parents[span], node_ids[span], tokens[span], acceptance[span], as_of)
                if session.asked_ns and as_of >= session.length:
                    seen.answers.append(now - session.asked_ns)
                    session.asked_ns = 0

    async def _commit(self) -> None:
        loop, load = asyncio.get_running_loop(), self._load
        due = loop.time()
        while True:
            due += 1e-3 * load.round_ms
            await asyncio.sleep(max(due - loop.time(), 0))
            batch = draft_pb2.CommitBatch()
            for number, session in self._sessions.items():
                if tokens := session.path(self._chance, load):
                    batch.session_ids.append(number)
                    batch.epochs.append(1)
                    batch.positions.append(session.length)
                    batch.token_counts.append(len(tokens))
                    batch.tokens.extend(tokens)
                    session.commit(tokens)
                    session.asked_ns = time.perf_counter_ns()
            self.seen.rounds += 1
            self.seen.committed += len(batch.tokens)
            if batch.session_ids:
                await self._call.write(draft_pb2.DraftCommands(incarnation=1, commits=batch))


async def _while_working(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError("the worker ended the stream")
