"""Requests that crash workers are found and refused at the second crash; their neighbours go on."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.coordinator.fake_workers import FakeTarget, expected_output, make_request, tokens_read
from tests.polling import until

from outrider.coordinator.sessions import scheduler as scheduler_module
from outrider.coordinator.sessions.poison import LossKind, Suspects
from outrider.errors import PoisonRequest, WorkerUnavailable

POISON, OTHER_POISON = 13, 17


@pytest.fixture(autouse=True)
def soon_decided(monkeypatch):
    monkeypatch.setattr(scheduler_module, "DOUBT_S", 0.05)


class CrashingTarget(FakeTarget):
    """A target that crashes in the round that takes the poisonous request beyond some of its tokens.

    Attributes:
        crashes: the prompts' first tokens of whoever was in such a round.
    """

    def __init__(self, crash_after: int, crashes: list[list[int]]) -> None:
        super().__init__(step_s=0.001)
        self.crash_after, self.crashes = crash_after, crashes

    def verify(self, trees, failing):
        taking_part = [session for session, _ in trees.values()]
        for session in taking_part:
            if session.tokens[0] in {POISON, OTHER_POISON} and len(session.tokens) - 3 >= self.crash_after:
                self.crashes.append([session.tokens[0] for session in taking_part])
                raise WorkerUnavailable("Socket closed")
        return super().verify(trees, failing)


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
        self.bench.add_target(f"target-{self.started}", CrashingTarget(self.crash_after, self.crashes))


async def refusals(bench: Any, numbers: list[int]) -> dict[int, Exception]:
    """Those of requests that run together that are refused; the others get what they would have got alone."""
    bench.limits.max_sessions = 8
    requests = [bench.generate(make_request(number, tokens=60)) for number in numbers]
    async with asyncio.timeout(20):
        results = await asyncio.gather(*requests, return_exceptions=True)
    bench.check_idle()
    refused = {number: result for number, result in zip(numbers, results, strict=True) if isinstance(result, Exception)}
    assert all(isinstance(error, PoisonRequest) for error in refused.values()), refused
    return refused


async def test_the_second_crash_says_who_it_is_and_neighbours_go_on(bench):
    cluster = Cluster(bench, targets=3)
    refused = await refusals(bench, [1, 2, POISON, 4, 5, 6])
    assert refused.keys() == {POISON}
    assert "request-13" in str(refused[POISON])
    assert len(cluster.crashes) == 2
    assert cluster.crashes[1] == [POISON]
    # Whoever sends it once more is told at once; what was cleared is forgotten with its request.
    with pytest.raises(PoisonRequest):
        await bench.generate(make_request(POISON, tokens=60))
    assert len(cluster.crashes) == 2


@pytest.mark.parametrize("crash_after", [0, 10])
async def test_two_poisonous_requests_at_once_are_found_and_nobody_else(crash_after, bench):
    cluster = Cluster(bench, targets=6, crash_after=crash_after)
    assert (await refusals(bench, [1, POISON, 2, OTHER_POISON, 4, 5])).keys() == {POISON, OTHER_POISON}
    # At one target or at two, then each by itself.
    assert 3 <= len(cluster.crashes) <= 4
    assert sorted(cluster.crashes[-2:]) == [[POISON], [OTHER_POISON]]


@pytest.mark.parametrize("crash_after", [0, 10])
async def test_a_poisonous_request_that_comes_during_a_trial_is_not_held_against_who_is_tried(crash_after, bench):
    """It takes turns with a suspect, which has done nothing."""
    first = bench.add_target("first", step_s=0.002)
    innocent = asyncio.create_task(bench.generate(make_request(1, tokens=60)))
    await until(lambda: first.rounds)
    cluster = Cluster(bench, targets=4, crash_after=crash_after)
    first.is_lost = True
    poisonous = asyncio.create_task(bench.generate(make_request(POISON, tokens=60)))
    async with asyncio.timeout(20):
        await innocent
        with pytest.raises(PoisonRequest):
            await poisonous
    assert 2 <= len(cluster.crashes) <= 3


async def test_a_worker_that_comes_back_has_not_crashed(bench):
    """Two links break one after the other below one request, but both processes live on."""
    first = bench.add_target("first", step_s=0.005)
    generating = asyncio.create_task(bench.generate(make_request(1, tokens=60)))
    await until(lambda: first.sessions)
    second = bench.add_target("second", step_s=0.005)
    bench.scheduler.remove_target("first", "Socket closed")
    bench.scheduler.note_return("first")
    await until(lambda: second.rounds)
    third = bench.add_target("third", step_s=0.005)
    bench.scheduler.remove_target("second", "Socket closed")
    async with asyncio.timeout(10):
        await generating
    assert third.rounds


async def test_strikes_are_counted_since_the_last_clearing_and_the_last_has_to_be_alone(bench):
    bench.add_target()
    generation = bench.submit(make_request(1, tokens=60))
    (session,) = generation.sessions
    neighbour = bench.submit(make_request(2, tokens=60))
    suspects = Suspects()
    for _ in range(5):
        suspects.note_loss("worker", [session], LossKind.BROKEN)
        while session.probation:
            assert not suspects.condemns(session)
            suspects.note_result(session)
    for _ in range(2):
        suspects.note_loss("worker", [session, *neighbour.sessions], LossKind.BROKEN)
        assert not suspects.condemns(session)
    # Nobody is there by chance so often.
    suspects.note_loss("worker", [session, *neighbour.sessions], LossKind.BROKEN)
    assert suspects.condemns(session)
    suspects.forget(session)
    # A process that hangs may register once more before it ends.
    suspects.note_loss("worker", [session], LossKind.HUNG)
    suspects.note_return("worker")
    suspects.note_loss("another", [session], LossKind.HUNG)
    assert suspects.condemns(session)
    generation.cancel()
    neighbour.cancel()


async def test_strikes_outlive_a_request_that_ends_for_want_of_a_target(make_bench):
    bench = make_bench(target_wait_s=0)
    cluster = Cluster(bench, targets=1, crash_after=0)
    with pytest.raises(WorkerUnavailable, match="last target"):
        await bench.generate(make_request(POISON, tokens=60))
    cluster.start()
    cluster.start()
    with pytest.raises(PoisonRequest):
        async with asyncio.timeout(30):
            await bench.generate(make_request(POISON, tokens=60))
    assert cluster.crashes == [[POISON], [POISON]]


async def test_suspects_are_verified_alone_one_after_the_other_until_they_are_cleared(bench):
    first = bench.add_target("first", step_s=0.002)
    tasks = [asyncio.create_task(bench.generate(make_request(number, tokens=60))) for number in range(1, 5)]
    await until(lambda: any(len(done) == 4 for done in first.rounds))
    second = bench.add_target("second", step_s=0.002)
    late = asyncio.create_task(bench.generate(make_request(5, tokens=60)))
    await asyncio.sleep(0.01)
    suspects = set(first.sessions)
    first.is_lost = True
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, late)
    turns = [next(iter(done)) for done in second.rounds if len(done) == 1 and suspects & done.keys()]
    turns = turns[: 3 * len(suspects)]
    # Three rounds each, one suspect after the other.
    assert turns == [suspect for suspect in dict.fromkeys(turns) for _ in range(3)]
    assert set(turns) == suspects
    cleared = dict.fromkeys(suspects, 0)
    for done in second.rounds:
        for session_id in suspects & done.keys():
            assert len(done) == 1 or cleared[session_id] >= 3, "verified with others before it was cleared"
            cleared[session_id] += 1
    # Who is under no suspicion goes on all the while.
    (other,) = {session_id for done in second.rounds for session_id in done} - suspects
    tried = [number for number, done in enumerate(second.rounds) if suspects & done.keys() and len(done) == 1]
    assert any(other in done for done in second.rounds[tried[0] : tried[0] + 4])
    assert max(len(done) for done in second.rounds) >= 4


async def test_a_suspect_whose_client_does_not_read_keeps_nobody_from_a_turn(make_bench):
    bench = make_bench(max_buffered_events=2)
    first = bench.add_target("first", step_s=0.002)
    stalled = bench.submit(make_request(9, tokens=60))
    reading = asyncio.create_task(bench.generate(make_request(1, tokens=60)))
    await until(lambda: first.rounds)
    second = bench.add_target("second", step_s=0.002)
    # Both are suspects; the first one rests before it is cleared.
    first.is_lost = True
    async with asyncio.timeout(10):
        await reading
    (session,) = stalled.sessions
    assert session.probation > 0
    assert len(second.sessions) == 1
    assert await tokens_read(stalled) == expected_output(make_request(9, tokens=60))


async def test_silence_makes_no_suspects_and_a_return_within_the_wait_frees(bench):
    targets = {f"target-{number}": bench.add_target(f"target-{number}", step_s=0.005) for number in range(4)}
    generating = asyncio.create_task(bench.generate(make_request(1, tokens=60)))
    holders: list[str] = []
    for kind in (LossKind.SILENT, LossKind.BROKEN, LossKind.BROKEN):
        others = {name: own for name, own in targets.items() if name not in holders}
        await until(lambda others=others: any(own.sessions for own in others.values()))
        holders += [name for name, own in others.items() if own.sessions]
        bench.scheduler.remove_target(holders[-1], "gone", kind=kind)
    # Two strikes alone: it waits, and one of the two turns out to live.
    assert bench.scheduler.running_sessions == 0
    bench.scheduler.note_return(holders[1])
    async with asyncio.timeout(10):
        await generating
    assert len(set(holders)) == 3
    (last,) = targets.keys() - set(holders)
    assert any(targets[last].rounds)


async def test_of_a_request_that_is_refused_nothing_is_kept(make_bench):
    """Both choices crash a target, and one of them another: the other one must not run for nobody."""
    bench = make_bench(target_wait_s=0)
    bench.add_target("first", step_s=0.001)
    request = replace(make_request(POISON, tokens=60), n=2, received={0: tuple(range(7))})
    cluster = Cluster(bench, targets=3, crash_after=0)
    bench.scheduler.remove_target("first", "gone", kind=LossKind.SILENT)
    with pytest.raises((WorkerUnavailable, PoisonRequest)):
        await bench.generate(request)
    assert len(cluster.crashes) == 3
    third = bench.add_target("third", step_s=0.001)
    with pytest.raises(PoisonRequest):
        bench.submit(request)
    bench.check_idle()
    assert not bench.scheduler.sessions
    assert not third.sessions
