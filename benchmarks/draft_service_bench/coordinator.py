"""Stands in for a coordinator and its target: mirrors the trees, and commits to all sessions at regular times."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider import rpc
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.wire import floats_from_bytes, split_by_counts, uints_from_bytes, uints_to_bytes

LIVE_NODES = 256
"""Most nodes of each session's tree."""
# Most nodes of a path that one round accepts, as of a request's own limits.
_DEPTH = 16
# Chance that the next sibling is accepted where the better ones were not.
_OF_SIBLINGS = 0.4
# A node's id, or the committed length whose last token is a root.
_Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load on the worker.

    Attributes:
        sessions: open at once.
        prompt_tokens: of each.
        round_ms: between two commits.
        acceptance: chance that the best child of an accepted node is accepted.
        temperature: of all sessions.
        vocab_size: of prompts.
        max_len: most tokens of a session.
    """

    sessions: int
    prompt_tokens: int
    round_ms: float
    acceptance: float
    temperature: float
    vocab_size: int
    max_len: int


@dataclass(kw_only=True)
class Seen:
    """Observations of one measurement.

    Attributes:
        commits: of all sessions.
        tokens: committed.
        answers: from a commit to the first growth that continues it: nanoseconds, and reports of steps. A commit whose
            session gets another one before has none.
    """

    commits: int = 0
    tokens: int = 0
    answers: list[tuple[int, int]] = field(default_factory=list)


class Session:
    """One session's tree. What is committed and not grown yet is looked for again whenever something has grown."""

    def __init__(self, length: int) -> None:
        self.length = length
        # When the last commit was sent that is not continued yet, and after which step; None where all are.
        self.asked: tuple[int, int] | None = None
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
        """Commit the tokens that the target has chosen."""
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
        incarnation: of this coordinator; another one each time.
        load: of the run.
    """

    def __init__(self, address: str, incarnation: int, load: Load) -> None:
        self._address, self._incarnation, self._load = address, incarnation, load
        self._chance = random.Random(load.sessions)
        self._sessions = {number: Session(load.prompt_tokens) for number in range(1, load.sessions + 1)}
        self._steps = 0
        self._is_over = False
        self._seen = Seen()

    async def run(self, *, warm_s: float, measure_s: float, begin: Callable[[], None], end: Callable[[], None]) -> Seen:
        """Serve the sessions; return what the measured time has shown.

        Args:
            warm_s: before it.
            measure_s: of it.
            begin: called when it begins.
            end: called when it is over.
        """
        async with rpc.open_channel(self._address) as channel:
            self._call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            reading, committing = (asyncio.create_task(work) for work in (self._read(), self._commit()))
            try:
                await self._send(opens=self._openings())
                await _while_working(reading, committing, warm_s)
                begin()
                self._seen = Seen()
                for session in self._sessions.values():
                    session.asked = None
                await _while_working(reading, committing, measure_s)
                seen, self._seen = self._seen, Seen()
                end()
                # Not cancelled: that would end the stream where it is being written to.
                self._is_over = True
                await committing
                # The next coordinator's sessions need the room of these.
                await self._send(close_session_ids=list(self._sessions), close_epochs=[1] * len(self._sessions))
                await self._call.done_writing()
                await reading
                return seen
            finally:
                for task in (reading, committing):
                    task.cancel()
                await asyncio.gather(reading, committing, return_exceptions=True)
                self._call.cancel()

    async def _send(self, **fields: Any) -> None:
        await self._call.write(draft_pb2.DraftCommands(incarnation=self._incarnation, **fields))

    def _openings(self) -> list[common_pb2.SessionOpen]:
        load = self._load
        limits = common_pb2.SpeculationLimits(
            mode=common_pb2.SPECULATION_MODE_ASYNC, max_live_nodes=LIVE_NODES, max_depth=_DEPTH
        )
        return [
            common_pb2.SessionOpen(
                session_id=number,
                epoch=1,
                prompt=uints_to_bytes([self._chance.randrange(load.vocab_size) for _ in range(load.prompt_tokens)]),
                sampling=SamplingSpec(temperature=load.temperature, seed=number, max_new_tokens=1 << 16).to_proto(),
                limits=limits,
            )
            for number in self._sessions
        ]

    async def _read(self) -> None:
        # grpc's end of a stream is no message.
        while isinstance(message := await self._call.read(), draft_pb2.DraftGrowth):
            now = time.perf_counter_ns()
            if message.errors:
                raise RuntimeError(f"the worker refused: {message.errors[0].message}")
            self._steps += message.report.steps
            acceptance = floats_from_bytes(message.acceptance).tolist()
            columns = map(uints_from_bytes, (message.parents, message.node_ids, message.tokens))
            parents, node_ids, tokens = (column.tolist() for column in columns)
            spans = split_by_counts(message.node_counts)
            for number, as_of, span in zip(message.session_ids, message.as_of, spans, strict=True):
                session = self._sessions[number]
                session.grow(parents[span], node_ids[span], tokens[span], acceptance[span], as_of)
                if session.asked is not None and as_of == session.length:
                    asked_ns, step = session.asked
                    self._seen.answers.append((now - asked_ns, self._steps - step))
                    session.asked = None

    async def _commit(self) -> None:
        loop, load = asyncio.get_running_loop(), self._load
        due = loop.time()
        while not self._is_over:
            due += 1e-3 * load.round_ms
            await asyncio.sleep(max(due - loop.time(), 0))
            batch, committed = draft_pb2.CommitBatch(), list[Session]()
            for number, session in self._sessions.items():
                if tokens := session.path(self._chance, load):
                    if session.length + len(tokens) > load.max_len:
                        raise RuntimeError(f"session {number} has {load.max_len} tokens: fewer --seconds needed")
                    batch.session_ids.append(number)
                    batch.epochs.append(1)
                    batch.positions.append(session.length)
                    batch.token_counts.append(len(tokens))
                    batch.tokens.extend(tokens)
                    session.commit(tokens)
                    committed.append(session)
            for session in committed:
                session.asked = time.perf_counter_ns(), self._steps
            self._seen.commits += len(committed)
            self._seen.tokens += len(batch.tokens)
            if committed:
                await self._send(commits=batch)


async def _while_working(reading: asyncio.Task[None], committing: asyncio.Task[None], seconds: float) -> None:
    done, _ = await asyncio.wait((reading, committing), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError("the worker ended the stream")
