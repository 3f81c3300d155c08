"""When clients hear: after the next batch has been written to its stream, and while growth is waited for."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.generation import Generation
from outrider.coordinator.links import TargetLink
from outrider.coordinator.messages import GenerationEvent, GenerationRequest, GrowthBatch, SpeculationMode, TokenDelta
from outrider.coordinator.rounds import Way
from outrider.coordinator.scheduler import Scheduler
from outrider.coordinator.session import Session
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.trees import Tree
from outrider.coordinator.verify_loop import VerifyLoop
from outrider.errors import WorkerUnavailable
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2, target_pb2

# As many as the coordinator needs to tell all clients of the last step.
_TURNS_OF_A_STEP = 10


class Stream:
    """A target at the other end of the link: a token for everybody, one step after the other."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self.happened_by_turn: list[str] = []
        """Batches written, and who reads answers comes for the next: what is between is one turn of the event loop."""
        self._answers: asyncio.Queue[target_pb2.VerifyResponse] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[target_pb2.VerifyResponse]:
        while True:
            answer = await self._answers.get()
            for _ in range(_TURNS_OF_A_STEP):
                await asyncio.sleep(0)
            yield answer
            self.happened_by_turn.append(f"answer {answer.step} is taken")

    async def write(self, request: target_pb2.VerifyRequest) -> None:
        if not request.step:
            return
        self._happened.append(f"batch {request.step}")
        self.happened_by_turn.append(f"batch {request.step}")
        sessions = len(request.trees.session_ids)
        self._answers.put_nowait(
            target_pb2.VerifyResponse(
                step=request.step,
                session_ids=request.trees.session_ids,
                epochs=request.trees.epochs,
                outcomes=[target_pb2.OUTCOME_ACCEPTED] * sessions,
                accepted_counts=[0] * sessions,
                token_counts=[1] * sessions,
                tokens=[request.step] * sessions,
                report={"step_ns": 1000, "tokens": sessions},
            )
        )

    def cancel(self) -> None:
        pass


class LinkToStream(TargetLink):
    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        super().__init__("127.0.0.1:1", incarnation=1, on_lost=lambda reason: None)

    def _start(self, call: Any) -> None:
        call.cancel()
        self.stream = Stream(self._happened)
        super()._start(self.stream)  # pyright: ignore[reportArgumentType]


LIMITS = registry_pb2.WorkerLimits(max_sessions=4, max_tree_nodes=8, max_step_tokens=64)


def short_request(tokens: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingSpec(max_new_tokens=tokens), **options
    )


async def rounds(monkeypatch: pytest.MonkeyPatch, *, tokens: int, **options: Any) -> list[str]:
    """What happened in a request's rounds, in order."""
    happened: list[str] = []
    emit = Generation.emit

    def noting(self: Generation, event: GenerationEvent) -> None:
        if isinstance(event, TokenDelta):
            happened.append(f"delta {event.token_ids[0]}")
        emit(self, event)

    monkeypatch.setattr(Generation, "emit", noting)
    link = LinkToStream(happened)
    scheduler = Scheduler(CoordinatorConfig(port=0))
    scheduler.add_target("target", link, LIMITS)
    request = short_request(tokens, **options)
    generation = scheduler.submit(request, [TextStream(None) for _ in range(request.n)])
    async with asyncio.timeout(30):
        [event async for event in generation]
    await scheduler.stop(WorkerUnavailable("the test is over"))
    await link.close()
    return happened


@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.ASYNC])
async def test_clients_hear_after_the_next_batch_is_written(monkeypatch, mode):
    happened = await rounds(monkeypatch, tokens=4, mode=mode)
    assert happened == [
        "batch 1", "batch 2", "delta 1", "batch 3", "delta 2", "batch 4", "delta 3", "delta 4",
    ]  # fmt: skip


async def test_the_next_batch_is_written_in_the_turn_in_which_a_result_is_read():
    """What else the event loop has to do, growth above all, comes after it."""
    link, scheduler = LinkToStream([]), Scheduler(CoordinatorConfig(port=0))
    scheduler.add_target("target", link, LIMITS)
    generation = scheduler.submit(short_request(3, mode=SpeculationMode.OFF), [TextStream(None)])
    async with asyncio.timeout(30):
        [event async for event in generation]
    await scheduler.stop(WorkerUnavailable("the test is over"))
    await link.close()
    assert link.stream.happened_by_turn == [
        "batch 1", "batch 2", "answer 1 is taken", "batch 3", "answer 2 is taken", "answer 3 is taken",
    ]  # fmt: skip


async def test_a_defect_in_that_turn_ends_the_targets_loop_and_not_its_link():
    class Broken(VerifyLoop):
        def choose(self, sessions: Sequence[Session]) -> Sequence[Tree]:
            if self.lane.trees.steps:
                raise RuntimeError("a defect")
            return super().choose(sessions)

    reasons: list[str] = []
    link, scheduler = LinkToStream([]), Scheduler(CoordinatorConfig(port=0), loop_type=Broken)
    scheduler.add_target("target", link, LIMITS, on_failure=reasons.append)
    generation = scheduler.submit(short_request(3, mode=SpeculationMode.OFF), [TextStream(None)])
    tokens: list[int] = []
    with pytest.raises(WorkerUnavailable):
        async for event in generation:
            assert isinstance(event, TokenDelta)
            tokens += event.token_ids
    assert reasons == ["its verify loop failed: a defect"]
    # What had been committed by then is delivered.
    assert tokens == [1, 2]
    assert not link.is_lost
    await link.close()


async def test_the_end_of_a_choice_waits_for_no_batch(monkeypatch):
    """Two choices end in one step: both are delivered whole before the result that ends the request."""
    happened = await rounds(monkeypatch, tokens=2, mode=SpeculationMode.OFF, n=2)
    assert happened == ["batch 1", "batch 2", "delta 1", "delta 1", "delta 2", "delta 2"]


async def test_who_has_not_heard_yet_is_remembered_once(bench):
    """Steps so short that a result is always in before all clients have heard of the last one."""
    waiting: list[int] = []

    class Noting(VerifyLoop):
        def choose(self, sessions: Sequence[Session]) -> Sequence[Tree]:
            waiting.append(len(self._undelivered))
            return super().choose(sessions)

    scheduler = Scheduler(CoordinatorConfig(port=0), loop_type=Noting)
    bench.scheduler, bench.limits = scheduler, registry_pb2.WorkerLimits(max_sessions=50, max_step_tokens=64)
    bench.add_target()
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=(1, 2),
        sampling=SamplingSpec(max_new_tokens=20),
        mode=SpeculationMode.OFF,
        n=50,
    )
    outputs, _ = await bench.generate(request)
    assert [len(output) for output in outputs] == [20] * 50
    assert 16 < max(waiting) <= 50


async def test_of_two_batches_lost_together_nobody_complains(bench):
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    target = bench.add_target(step_s=0.01)
    lane = bench.scheduler._lanes["target"]
    lane.way.current = Way.TWO_GROUPS
    request = GenerationRequest(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingSpec(max_new_tokens=20), mode=SpeculationMode.OFF, n=2
    )
    generation = asyncio.create_task(bench.generate(request))
    while len(lane.flights) < 2:
        await asyncio.sleep(0.001)
    target.is_lost = True
    with pytest.raises(WorkerUnavailable):
        await generation
    await asyncio.sleep(0.02)
    lane.flights.clear()
    del lane
    gc.collect()
    assert not complaints


async def test_clients_hear_while_growth_is_waited_for(make_bench):
    bench = make_bench(sync_wait_cap_ms=50.0)
    target = bench.add_target()
    bench.add_draft(delay_s=1000.0)
    request = GenerationRequest(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingSpec(max_new_tokens=9), mode=SpeculationMode.SYNC
    )
    generation = bench.scheduler.submit(request, [TextStream(None)])
    # It says something, if not of this session: a silent draft is waited for once.
    bench.scheduler.take_growth("draft", GrowthBatch.of([]))
    async with asyncio.timeout(30):
        await anext(aiter(generation))
    assert len(target.batches) == 1
    generation.cancel()
