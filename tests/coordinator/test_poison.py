"""Requests that crash workers are found and refused at the second crash; their neighbours go on."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from outrider.coordinator import scheduler as scheduler_module
from outrider.coordinator.messages import GenerationRequest
from outrider.coordinator.poison import LossKind, Suspects
from outrider.coordinator.text_stream import TextStream
from outrider.errors import PoisonRequest, WorkerUnavailable
from outrider.sampling import SamplingSpec

POISON = 13


def make_request(number: int, tokens: int = 60) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"request-{number}", prompt_token_ids=(number, 2, 3), sampling=SamplingSpec(max_new_tokens=tokens)
    )


@pytest.fixture(autouse=True)
def soon_decided(monkeypatch):
    monkeypatch.setattr(scheduler_module, "DOUBT_S", 0.05)


class Cluster:
    """Targets that crash at the poisonous request's tenth token, and are replaced by others."""

    def __init__(self, bench: Any, *, targets: int = 2, crash_after: int = 10) -> None:
        self.bench, self.crash_after = bench, crash_after
        self.crashes: list[list[int]] = []
        self.started = 0
        for _ in range(targets):
            self.start()

    def start(self) -> None:
        self.started += 1
        name = f"target-{self.started}"
        target = self.bench.add_target(name, step_s=0.001)
        step = target._step

        async def crash_or_step(trees):
            if any(
                target.sessions[tree.session_id][1][0] == POISON and tree.length - 3 >= self.crash_after
                for tree in trees
                if tree.session_id in target.sessions
            ):
                self.crashes.append([target.sessions[tree.session_id][1][0] for tree in trees])
                raise WorkerUnavailable("Socket closed")
            return await step(trees)

        target._step = crash_or_step


async def test_the_second_crash_says_who_it_is_and_neighbours_go_on(bench, expect_output):
    cluster = Cluster(bench, targets=3)
    bench.limits.max_sessions = 8
    numbers = [1, 2, POISON, 4, 5, 6]
    tasks = [asyncio.create_task(bench.generate(make_request(number))) for number in numbers]
    async with asyncio.timeout(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in zip(numbers, results, strict=True):
        if number == POISON:
            assert isinstance(result, PoisonRequest)
            assert "request-13" in str(result)
        else:
            assert not isinstance(result, BaseException), result
            assert result[0] == [expect_output(make_request(number).prompt_token_ids, make_request(number).sampling)]
    assert len(cluster.crashes) == 2
    assert cluster.crashes[1] == [POISON]
    assert bench.scheduler.running_sessions == bench.scheduler.waiting_requests == 0
    # Whoever sends it once more is told at once; what was cleared is forgotten with its request.
    with pytest.raises(PoisonRequest):
        await bench.generate(make_request(POISON))
    assert len(cluster.crashes) == 2


async def test_suspects_are_verified_alone_until_they_are_cleared(bench, expect_output):
    first = bench.add_target("first", step_s=0.002)
    tasks = [asyncio.create_task(bench.generate(make_request(number))) for number in range(1, 5)]
    while not any(len(batch) == 4 for batch in first.batches):
        await asyncio.sleep(0.001)
    second = bench.add_target("second", step_s=0.002)
    late = asyncio.create_task(bench.generate(make_request(5)))
    await asyncio.sleep(0.01)
    first.is_lost = True
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, late)
    for number, (outputs, _) in enumerate(results, start=1):
        assert outputs == [expect_output(make_request(number).prompt_token_ids, make_request(number).sampling)]
    suspects = {tree.session_id for tree in first.batches[-1]}
    mixed = [batch for batch in second.batches if len(batch) > 1]
    alone = dict.fromkeys(suspects, 0)
    for batch in second.batches:
        for tree in batch:
            if tree.session_id in suspects and len(batch) == 1 and alone[tree.session_id] < 3:
                alone[tree.session_id] += 1
            elif tree.session_id in suspects:
                assert alone[tree.session_id] == 3, "verified with others before it was cleared"
    assert set(alone.values()) == {3}
    assert max(len(batch) for batch in mixed) >= 4


async def test_a_worker_that_comes_back_has_not_crashed(bench, expect_output):
    """Two links break one after the other below one request, but both processes live on."""
    first = bench.add_target("first", step_s=0.005)
    generating = asyncio.create_task(bench.generate(make_request(1)))
    while not first.sessions:
        await asyncio.sleep(0.001)
    second = bench.add_target("second", step_s=0.005)
    bench.scheduler.remove_target("first", "Socket closed")
    bench.scheduler.note_return("first")
    while not second.batches:
        await asyncio.sleep(0.001)
    third = bench.add_target("third", step_s=0.005)
    bench.scheduler.remove_target("second", "Socket closed")
    async with asyncio.timeout(10):
        outputs, _ = await generating
    assert outputs == [expect_output(make_request(1).prompt_token_ids, make_request(1).sampling)]
    assert third.batches


async def test_silence_makes_no_suspects_and_a_return_within_the_wait_frees(bench, expect_output):
    targets = [bench.add_target(f"target-{number}", step_s=0.005) for number in range(4)]
    generating = asyncio.create_task(bench.generate(make_request(1)))
    holders: list[str] = []
    for kind in (LossKind.SILENT, LossKind.BROKEN, LossKind.BROKEN):
        while not (held := [name for name, lane in bench.scheduler._lanes.items() if lane.flights]):
            await asyncio.sleep(0.001)
        holders += held
        bench.scheduler.remove_target(held[0], "gone", kind=kind)
    # Two strikes alone: it waits, and one of the two turns out to live.
    assert not any(lane.sessions for lane in bench.scheduler._lanes.values())
    bench.scheduler.note_return(holders[1])
    async with asyncio.timeout(10):
        outputs, _ = await generating
    assert outputs == [expect_output(make_request(1).prompt_token_ids, make_request(1).sampling)]
    assert len(set(holders)) == 3
    assert sum(bool(target.batches) for target in targets) == 4


async def test_strikes_are_counted_since_the_last_clearing_and_the_last_has_to_be_alone(bench):
    bench.add_target()
    generation = bench.scheduler.submit(make_request(1), [TextStream(None)])
    (session,) = generation.sessions
    suspects = Suspects()
    for _ in range(5):
        suspects.note_loss("worker", [session], LossKind.BROKEN)
        while session.probation:
            assert not suspects.condemns(session)
            suspects.note_result(session)
    for _ in range(2):
        suspects.note_loss("worker", [session, session], LossKind.BROKEN)
        assert not suspects.condemns(session)
    suspects.forget(session)
    # A process that hangs may register once more before it ends.
    suspects.note_loss("worker", [session], LossKind.HUNG)
    suspects.note_return("worker")
    suspects.note_loss("another", [session], LossKind.HUNG)
    assert suspects.condemns(session)
    generation.cancel()


async def test_strikes_outlive_a_request_that_ends_for_want_of_a_target(make_bench):
    bench = make_bench(target_wait_s=0)
    cluster = Cluster(bench, targets=1, crash_after=0)
    with pytest.raises(WorkerUnavailable, match="last target"):
        await bench.generate(make_request(POISON))
    cluster.start()
    cluster.start()
    with pytest.raises(PoisonRequest):
        async with asyncio.timeout(30):
            await bench.generate(make_request(POISON))
    assert cluster.crashes == [[POISON], [POISON]]


async def test_of_a_request_that_is_refused_nothing_is_kept(make_bench):
    """One of its choices has crashed two targets: the others of them must not run for nobody."""
    bench = make_bench(target_wait_s=0)
    bench.add_target("first", step_s=0.001)
    request = replace(make_request(POISON), n=2)
    generation = bench.scheduler.submit(request, [TextStream(None), TextStream(None)])
    for worker_id in ("first", "second"):
        bench.scheduler._suspects.note_loss(worker_id, generation.sessions[1:], LossKind.BROKEN)
    bench.scheduler.remove_target("first", "gone", kind=LossKind.SILENT)
    with pytest.raises(WorkerUnavailable):
        await anext(generation._read())
    bench.add_target("third", step_s=0.001)
    free_rows = len(bench.scheduler._forest.rows.free)
    with pytest.raises(PoisonRequest):
        bench.scheduler.submit(request, [TextStream(None), TextStream(None)])
    assert bench.scheduler.running_sessions == bench.scheduler.waiting_requests == 0
    assert not bench.scheduler._sessions
    assert len(bench.scheduler._forest.rows.free) == free_rows
