"""A fake model and fake workers: the scheduler's loop without gRPC, torch or time to waste.

Tests with a bench run in virtual time: a step of 2 ms is one of 2 ms however busy the machine is, and what is waited
for comes at once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.simulation.last_step import LastStep, Outcome
from benchmarks.simulation.virtual_time import VirtualTimeLoop

from outrider.coordinator import clock
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.firing import Latency
from outrider.coordinator.messages import (
    Commits,
    FaultKind,
    GenerationRequest,
    GenerationResult,
    Growth,
    GrowthBatch,
    SessionFault,
    SessionOpening,
    SessionVerdict,
    TokenDelta,
    TreeSubmission,
    VerifyResult,
)
from outrider.coordinator.scheduler import Scheduler
from outrider.coordinator.successor import Successor
from outrider.coordinator.text_stream import TextStream
from outrider.errors import WorkerUnavailable
from outrider.sampling import SamplingSpec
from outrider.succession import NOTHING_EMITTED, Addition
from outrider.v1 import registry_pb2

VOCABULARY = 50


def next_token(token_ids: Sequence[int]) -> int:
    """The fake target's choice: any fixed function of the prefix will do."""
    return (token_ids[-1] * 7 + len(token_ids) * 3 + token_ids[0]) % VOCABULARY


def expected_output(prompt: Sequence[int], sampling: SamplingSpec) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < sampling.max_new_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in sampling.stop_token_ids:
            break
    return token_ids[len(prompt) :]


class FakeTarget:
    """Verifies with `next_token`, commits by its own result, and remembers what it was sent.

    Attributes:
        batches: what was verified, also of batches that followed a step.
        successors: batches that followed one, as sent.
        additions: to the last of them, while the step that it follows runs.
        extended: additions that came in time.
        on_result: called when an answer is there, as a link does.
    """

    def __init__(self, *, step_s: float = 0.0, defer_first: bool = False) -> None:
        self.step_s = step_s
        self.defer_first = defer_first
        self.sessions: dict[int, tuple[int, list[int], int, SamplingSpec]] = {}
        self.closed: list[tuple[int, int]] = []
        self.batches: list[Sequence[TreeSubmission]] = []
        self.successors: list[Successor] = []
        self.additions: list[Addition] = []
        self.extended = 0
        self.defer_always = False
        self.fail_sessions: set[int] = set()
        self.fault_kind = FaultKind.LOST
        self.is_lost = False
        self.miscounts = False
        self._ended: set[tuple[int, int]] = set()
        self._last_step = LastStep()
        self._last: asyncio.Future[VerifyResult] | None = None
        self.on_result: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self, trees: Sequence[TreeSubmission], *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        self.batches.append(trees)
        self._open(openings)
        self.additions = []
        self._last = self._answered(self._step(trees))
        return self._last

    def _answered(self, work: "Coroutine[Any, Any, VerifyResult]") -> "asyncio.Future[VerifyResult]":
        """As a link answers: the result is there, and in the same turn of the event loop it says so."""
        future: asyncio.Future[VerifyResult] = asyncio.get_running_loop().create_future()

        async def answer() -> None:
            try:
                result = await work
            except Exception as error:  # noqa: BLE001 - who awaits the answer gets it
                if not future.done():
                    future.set_exception(error)
                return
            if not future.done():
                future.set_result(result)
            if self.on_result is not None:
                self.on_result()

        task = asyncio.ensure_future(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    def follow(
        self, successor: Successor, *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        self.successors.append(successor)
        self.additions = []
        assert self._last is not None
        self._last = self._answered(self._next_step(successor, openings, self._last))
        return self._last

    def extend(self, more: Addition) -> None:
        self.additions.append(more)

    def _open(self, openings: Sequence[SessionOpening]) -> None:
        for opening in openings:
            tokens = [*opening.prompt, *opening.output]
            self.sessions[opening.session_id] = (opening.epoch, tokens, len(opening.prompt), opening.sampling)

    async def _next_step(
        self, successor: Successor, openings: Sequence[SessionOpening], followed: "asyncio.Future[VerifyResult]"
    ) -> VerifyResult:
        came_ns = clock.now_ns()
        ahead_ns = -1_000 if followed.done() else 0
        await asyncio.wait([followed])
        additions = 0 if followed.exception() else followed.result().additions
        ahead_ns = ahead_ns or clock.now_ns() - came_ns
        self._open(openings)
        session_ids, epochs = successor.group.ids, successor.epochs
        trees = [
            TreeSubmission(session_id, epoch, self._checked_length(session_id, epoch, length), tokens, parents)
            for session_id, epoch, length, (tokens, parents) in zip(
                session_ids,
                epochs,
                successor.lengths,
                self._last_step.trees(successor.grown(additions)[0], session_ids, epochs),
                strict=True,
            )
        ]
        self.batches.append(trees)
        result = await self._step(trees)
        verified = {tree.session_id: len(tree.tokens) + self.miscounts for tree in trees}
        return replace(result, verified=verified, ahead_ns=ahead_ns)

    def _checked_length(self, session_id: int, epoch: int, length: int) -> int:
        """Committed tokens by now; those that a batch names are the ones before the step that it follows."""
        if session_id not in self.sessions:
            return length
        now = len(self.sessions[session_id][1])
        assert length == self._last_step.length(session_id, epoch, now)
        return now

    async def _step(self, trees: Sequence[TreeSubmission]) -> VerifyResult:
        await asyncio.sleep(self.step_s)
        if self.is_lost:
            raise WorkerUnavailable("the fake target was lost")
        deferred, self.defer_first = self.defer_first or self.defer_always, False
        verdicts = [self._verdict(tree, deferred=deferred) for tree in trees]
        for tree, verdict in zip(trees, verdicts, strict=True):
            end = verdict.accepted_nodes[-1] if verdict.accepted_nodes else 0
            goes_on = verdict.token_ids and (tree.session_id, tree.epoch) not in self._ended
            last = (end, verdict.token_ids[-1]) if goes_on else (NOTHING_EMITTED, NOTHING_EMITTED)
            self._last_step.note(tree.session_id, tree.epoch, Outcome(tree.length, len(tree.tokens), *last))
        self._last_step.end()
        rows = 0 if self.defer_always else sum(1 + len(tree.tokens) for tree in trees)
        # Those of the batch that follows; of one that comes later none count.
        additions, self.additions = len(self.additions), []
        self.extended += additions
        return VerifyResult(
            step=len(self.batches),
            verdicts=verdicts,
            step_ns=1000,
            forward_ns=900,
            step_tokens=rows,
            additions=additions,
        )

    def _verdict(self, tree: TreeSubmission, *, deferred: bool) -> SessionVerdict:
        key = (tree.session_id, tree.epoch)
        if key in self._ended:
            return SessionVerdict(*key, fault=SessionFault(kind=FaultKind.LOST, message="it had ended"))
        if key in self.closed:
            return SessionVerdict(*key, deferred=True)
        epoch, tokens, prompt_length, sampling = self.sessions[tree.session_id]
        assert (epoch, len(tokens)) == (tree.epoch, tree.length)
        if tree.session_id in self.fail_sessions:
            self.fail_sessions.discard(tree.session_id)
            self._ended.add(key)
            return SessionVerdict(*key, fault=SessionFault(kind=self.fault_kind, message="the fake target says no"))
        if deferred:
            return SessionVerdict(*key, deferred=True)
        emitted: list[int] = []
        accepted: list[int] = []
        node: int | None = 0
        while node is not None:
            token = next_token(tokens)
            tokens.append(token)
            emitted.append(token)
            matches = [
                number
                for number, (child, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1)
                if parent == node and child == token
            ]
            node = matches[0] if matches else None
            if node is not None:
                accepted.append(node)
            if token in sampling.stop_token_ids or len(tokens) - prompt_length == sampling.max_new_tokens:
                self._ended.add(key)
                break
        return SessionVerdict(*key, accepted_nodes=accepted, token_ids=emitted)

    def close_session(self, session_id: int, epoch: int) -> None:
        self.closed.append((session_id, epoch))
        self.sessions.pop(session_id, None)


class FakeDraft:
    """Grows guesses of which a given share is right; growth reaches the scheduler after a random delay."""

    def __init__(self, *, accuracy: float, delay_s: float, seed: int = 0, source: int | None = None) -> None:
        self.source = source
        self.step_latency = Latency()
        self.step_latency.observe(1e6)
        self.accuracy = accuracy
        self.delay_s = delay_s
        self.random = random.Random(seed)
        self.sessions: dict[int, tuple[int, list[int]]] = {}
        self.closed: list[tuple[int, int]] = []
        self.deliver: Callable[[GrowthBatch], None] = lambda growth: None
        self._ids = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def open_session(self, opening: SessionOpening) -> None:
        self.sessions[opening.session_id] = (opening.epoch, [*opening.prompt, *opening.output])
        self._grow_later(opening.session_id)

    def commit(self, commits: Commits) -> None:
        for commit in commits:
            epoch, tokens = self.sessions[commit.session_id]
            assert (epoch, len(tokens)) == (commit.epoch, commit.position)
            tokens.extend(commit.token_ids)
            self._grow_later(commit.session_id)

    def close_session(self, session_id: int, epoch: int) -> None:
        self.closed.append((session_id, epoch))
        self.sessions.pop(session_id, None)

    def _grow_later(self, session_id: int) -> None:
        epoch, tokens = self.sessions[session_id]
        task = asyncio.create_task(self._grow(session_id, epoch, list(tokens)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _grow(self, session_id: int, epoch: int, tokens: list[int]) -> None:
        as_of, parent = len(tokens), 0
        columns: list[tuple[int, int, int, float]] = []
        for _ in range(6):
            right = next_token(tokens)
            guess = right if self.random.random() < self.accuracy else (right + 1) % VOCABULARY
            for token in (guess, (guess + 5) % VOCABULARY):
                self._ids += 1
                columns.append((self._ids, parent, token, 0.7 if token == guess else 0.1))
            parent = columns[-2][0]
            tokens.append(guess)
        await asyncio.sleep(self.random.random() * self.delay_s)
        node_ids, parents, token_ids, acceptance = zip(*columns, strict=True)
        growth = Growth(
            session_id=session_id,
            epoch=epoch,
            as_of=as_of,
            node_ids=node_ids,
            parents=parents,
            tokens=token_ids,
            acceptance=acceptance,
            complete=True,
            sources=() if self.source is None else [self.source] * len(node_ids),
        )
        self.deliver(GrowthBatch.of([growth]))


class Bench:
    """A scheduler with fake workers around it."""

    def __init__(self, **config: object) -> None:
        self.scheduler = Scheduler(CoordinatorConfig(port=0, **config))  # type: ignore[arg-type]
        self.limits = registry_pb2.WorkerLimits(max_sessions=8, max_tree_nodes=64, max_step_tokens=256)

    def add_target(
        self,
        name: str = "target",
        *,
        on_hang: Callable[[str], None] = lambda reason: None,
        ahead: bool = True,
        **options: object,
    ) -> FakeTarget:
        target = FakeTarget(**options)  # type: ignore[arg-type]
        self.scheduler.add_target(name, target, self.limits, on_hang=on_hang, ahead=ahead)  # type: ignore[arg-type]
        return target

    def add_draft(
        self, name: str = "draft", *, accuracy: float = 0.8, delay_s: float = 0.002, sources: Sequence[int] = ()
    ) -> FakeDraft:
        draft = FakeDraft(accuracy=accuracy, delay_s=delay_s, source=sources[0] if sources else None)
        draft.deliver = lambda growth: self.scheduler.take_growth(name, growth)
        self.scheduler.add_draft(name, draft, self.limits, sources=sources)  # type: ignore[arg-type]
        return draft

    async def generate(self, request: GenerationRequest) -> tuple[list[list[int]], GenerationResult]:
        """Output tokens per choice, and the result."""
        streams = [TextStream(None) for _ in range(request.n)]
        generation = self.scheduler.submit(request, streams)
        outputs: list[list[int]] = [list(request.received.get(index, ())) for index in range(request.n)]
        result = None
        try:
            async for event in generation:
                if isinstance(event, TokenDelta):
                    assert event.offset == len(outputs[event.index])
                    outputs[event.index].extend(event.token_ids)
                elif isinstance(event, GenerationResult):
                    assert result is None
                    result = event
        finally:
            generation.cancel()
        assert result is not None
        return outputs, result


class BenchLoop(VirtualTimeLoop):
    """Its time is the coordinator's for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced = ExitStack()
        self._replaced.enter_context(clock.replaced_by(self._read_ns))

    def _read_ns(self) -> int:
        # A microsecond later every time: nothing takes no time at all.
        self._jumping.now_ns += 1_000
        return self._jumping.now_ns

    def close(self) -> None:
        super().close()
        self._replaced.close()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """On which event loop a test runs."""
    in_virtual_time = not {"bench", "make_bench"}.isdisjoint(getattr(item, "fixturenames", ()))
    return {"loop": BenchLoop if in_virtual_time else asyncio.new_event_loop}


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    return wait_until


@pytest.fixture
async def bench() -> Bench:
    # Within the loop, whose clock it reads.
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench


@pytest.fixture
def expect_output() -> Callable[[Sequence[int], SamplingSpec], list[int]]:
    return expected_output


def request_numbered(number: int = 1, **changes: Any) -> GenerationRequest:
    settings = {
        "request_id": f"request-{number}",
        "prompt_token_ids": (number, 2, 3),
        "sampling": SamplingSpec(max_new_tokens=40),
    }
    return GenerationRequest(**settings | changes)


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    return request_numbered


@pytest.fixture
def assert_idle() -> Callable[[Bench], None]:
    def check(bench: Bench) -> None:
        assert bench.scheduler.running_sessions == 0
        assert bench.scheduler.waiting_requests == 0

    return check
