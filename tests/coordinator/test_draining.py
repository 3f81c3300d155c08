"""Workers that are to go: their sessions move, or end where they are, and nothing new comes."""

import asyncio

import pytest
from tests.coordinator.fake_workers import make_request
from tests.polling import until

from outrider.errors import WorkerUnavailable


async def generate_many(bench, count: int) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(bench.generate(make_request(number, tokens=60))) for number in range(1, count + 1)]
    await until(lambda: bench.scheduler.totals.emitted_tokens > 10 * count)
    return tasks


async def test_a_targets_sessions_move_to_another_one(bench):
    first = bench.add_target("first", step_s=0.004)
    bench.add_draft()
    tasks = await generate_many(bench, 6)
    second = bench.add_target("second", step_s=0.001)
    empty = asyncio.Event()
    bench.scheduler.drain_worker("first", on_empty=empty.set)
    async with asyncio.timeout(30):
        await empty.wait()
    assert not first.sessions
    assert len(second.sessions) == 6
    rounds = len(first.rounds)
    assert not any(task.done() for task in tasks)
    await asyncio.gather(*tasks)
    assert not any(first.rounds[rounds:])
    bench.check_idle()


async def test_as_many_move_as_there_is_room_for_and_the_others_end_where_they_are(bench):
    first = bench.add_target("first", step_s=0.002)
    tasks = await generate_many(bench, 6)
    bench.limits.max_sessions = 2
    second = bench.add_target("second", step_s=0.002)
    empty = asyncio.Event()
    bench.scheduler.drain_worker("first", on_empty=empty.set)
    await until(lambda: len(second.sessions) == 2)
    assert len(first.sessions) == 4
    await asyncio.gather(*tasks)
    await empty.wait()
    # Everything is done by one that drained with sessions of its own and one that had room for two.
    assert max(len(done) for done in second.rounds) == 2


async def test_sessions_move_as_room_appears_elsewhere(bench):
    first = bench.add_target("first", step_s=0.002)
    tasks = await generate_many(bench, 6)
    bench.limits.max_sessions = 2
    bench.add_target("second", step_s=0.002)
    empty = asyncio.Event()
    bench.scheduler.drain_worker("first", on_empty=empty.set)
    assert len(first.sessions) == 4
    third = bench.add_target("third", step_s=0.002)
    assert (len(first.sessions), len(third.sessions)) == (2, 2)
    bench.add_target("fourth", step_s=0.002)
    assert not first.sessions
    assert empty.is_set()
    await asyncio.gather(*tasks)
    bench.check_idle()


async def test_the_last_target_ends_its_sessions_and_gets_no_new_ones(bench):
    target = bench.add_target(step_s=0.002)
    tasks = await generate_many(bench, 2)
    empty = asyncio.Event()
    bench.scheduler.drain_worker("target", on_empty=empty.set)
    assert not bench.scheduler.has_target
    with pytest.raises(WorkerUnavailable, match="no target worker"):
        bench.submit(make_request(9))
    assert not empty.is_set()
    await asyncio.gather(*tasks)
    await until(empty.is_set)
    assert not target.sessions


async def test_a_target_that_is_lost_while_it_drains_is_no_longer_waited_for(bench):
    bench.add_target(step_s=10)
    bench.begin()
    await asyncio.sleep(0.01)
    empty = asyncio.Event()
    bench.scheduler.drain_worker("target", on_empty=empty.set)
    await asyncio.sleep(0.02)
    assert not empty.is_set()
    bench.scheduler.remove_target("target", "killed")
    await until(empty.is_set)


async def test_a_drafts_sessions_move_at_once(bench):
    bench.add_target(step_s=0.002)
    first = bench.add_draft("first")
    tasks = await generate_many(bench, 3)
    second = bench.add_draft("second")
    empty = asyncio.Event()
    bench.scheduler.drain_worker("first", on_empty=empty.set)
    assert empty.is_set()
    assert not first.sessions
    assert len(second.sessions) == 3
    await bench.generate(make_request(4))
    await asyncio.gather(*tasks)
    assert not first.sessions
    bench.scheduler.drafts.remove("first")
