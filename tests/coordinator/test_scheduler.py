"""Sessions from their request to their end, with workers that are fake and never fail."""

import asyncio
import random

import pytest

from outrider.coordinator.messages import (
    FinishReason,
    GenerationResult,
    Growth,
    GrowthBatch,
    SpeculationMode,
)
from outrider.coordinator.text_stream import TextStream
from outrider.errors import Overloaded, Superseded, WorkerUnavailable
from outrider.sampling import SamplingSpec


@pytest.mark.parametrize("mode", list(SpeculationMode))
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
async def test_output_is_the_targets_whatever_the_draft_does(
    bench, expect_output, make_request, assert_idle, *, mode, accuracy
):
    target = bench.add_target(step_s=0.001)
    draft = bench.add_draft(accuracy=accuracy)
    request = make_request(mode=mode)
    outputs, result = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert result.choices[0].finish_reason is FinishReason.LENGTH
    assert result.choices[0].completion_tokens == 40
    if mode is SpeculationMode.OFF:
        assert result.speculation.verify_steps == 40
        assert not draft.closed
    elif accuracy == 1.0:
        assert result.speculation.acceptance_length > 1.5
    assert_idle(bench)
    assert not target.sessions
    assert not draft.sessions


async def test_sessions_share_batches_and_keep_apart(bench, expect_output, make_request, assert_idle):
    target = bench.add_target(step_s=0.002)
    bench.add_draft()
    bench.add_draft("second")
    requests = [make_request(number) for number in range(1, 13)]
    results = await asyncio.gather(*(bench.generate(request) for request in requests))
    for request, (outputs, _) in zip(requests, results, strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    # Twelve sessions, eight places: batches of several, never more than the target takes.
    assert max(len(batch) for batch in target.batches) == 8
    assert_idle(bench)


async def test_stop_token_ends_the_choice(bench, expect_output, make_request):
    bench.add_target()
    bench.add_draft(accuracy=1.0)
    plain = expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))
    sampling = SamplingSpec(max_new_tokens=40, stop_token_ids=(plain[7],))
    outputs, result = await bench.generate(make_request(sampling=sampling))
    end = plain.index(plain[7]) + 1
    assert outputs == [plain[:end]]
    assert result.choices[0].finish_reason is FinishReason.STOP
    assert result.choices[0].stop_token_id == plain[7]


async def test_without_a_draft_it_decodes_plainly(bench, expect_output, make_request):
    bench.add_target()
    request = make_request()
    outputs, result = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert result.speculation.drafted_tokens == 0


async def test_growth_that_is_late_twice_or_out_of_order_changes_no_token_and_is_counted(
    bench, expect_output, make_request
):
    bench.add_target(step_s=0.002)
    draft = bench.add_draft(accuracy=0.8, delay_s=0.0)
    chance, loop, sent = random.Random(0), asyncio.get_running_loop(), 0

    def deliver(growth: GrowthBatch) -> None:
        nonlocal sent
        for _ in range(chance.choice((1, 2))):
            sent += len(growth.node_ids)
            loop.call_later(chance.choice((0.0, 0.001, 0.02)), bench.scheduler.take_growth, "draft", growth)

    draft.deliver = deliver
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in range(1, 5)]
    results = await asyncio.gather(*(bench.generate(request) for request in requests))
    for request, (outputs, _) in zip(requests, results, strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    totals = bench.scheduler.totals
    assert totals.accepted_tokens > 0
    before = totals.dropped_nodes
    assert 0 < before < sent
    # What comes now is for sessions that have ended: all of it is dropped.
    last = sent
    await asyncio.sleep(0.03)
    assert sent == last
    assert totals.dropped_nodes >= before
    growth = GrowthBatch.of([make_growth(session_id=1)])
    before = totals.dropped_nodes
    bench.scheduler.take_growth("draft", growth)
    bench.scheduler.take_growth("nobody", growth)
    assert totals.dropped_nodes == before + 2 * len(growth.node_ids)


def make_growth(*, session_id: int) -> Growth:
    return Growth(
        session_id=session_id, epoch=1, as_of=3, node_ids=[1, 2], parents=[0, 1], tokens=[5, 6], acceptance=[0.5, 0.5]
    )


async def test_growth_for_a_dead_branch_is_counted(bench, make_request):
    target = bench.add_target(step_s=0.001)
    draft = bench.add_draft(accuracy=0.0, delay_s=0.0)
    await bench.generate(make_request())
    # Nothing that it guesses is right: the first level of every tree dies with the next commit, and what hangs below
    # nodes that are gone by then has no place.
    held: list[GrowthBatch] = []
    draft.deliver = held.append
    task = asyncio.create_task(bench.generate(make_request(2, sampling=SamplingSpec(max_new_tokens=30))))
    while len(target.batches) < 60:
        await asyncio.sleep(0.001)
    before = bench.scheduler.totals.dropped_nodes
    bench.scheduler.take_growth("draft", held[0])
    assert bench.scheduler.totals.dropped_nodes - before == len(held[0].node_ids)
    await task


async def test_a_sync_session_is_not_starved_by_others(make_bench, expect_output, make_request):
    bench = make_bench(sync_wait_cap_ms=30.0)
    bench.add_target(step_s=0.001)
    bench.add_draft(delay_s=1000.0)
    sampling = SamplingSpec(max_new_tokens=6)
    endless = bench.scheduler.submit(
        make_request(2, mode=SpeculationMode.OFF, sampling=SamplingSpec(max_new_tokens=100_000)), [TextStream(None)]
    )
    async with asyncio.timeout(30):
        outputs, _ = await bench.generate(make_request(mode=SpeculationMode.SYNC, sampling=sampling))
    assert outputs == [expect_output((1, 2, 3), sampling)]
    endless.cancel()


async def test_sync_rounds_wait_once_for_a_draft_that_says_nothing_and_again_once_it_speaks(
    make_bench, expect_output, until, make_request
):
    bench = make_bench(sync_wait_cap_ms=1000.0)
    target = bench.add_target(step_s=0.001)
    draft = bench.add_draft(accuracy=1.0, delay_s=0.001)
    clock, deliver, held = asyncio.get_running_loop(), draft.deliver, []
    draft.deliver = held.append
    sampling = SamplingSpec(max_new_tokens=400)
    requests = [make_request(number, mode=SpeculationMode.SYNC, sampling=sampling) for number in range(1, 5)]
    tasks = [asyncio.create_task(bench.generate(request)) for request in requests]
    began_s = clock.time()
    # Everybody waits together at first, and nobody thereafter: 60 plain steps take their own time.
    await until(lambda: len(target.batches) > 60)
    assert 1.0 <= clock.time() - began_s < 1.5
    assert not any(tree.tokens for batch in target.batches for tree in batch)
    draft.deliver = deliver
    for growth in held:
        deliver(growth)
    began, began_s = len(target.batches), clock.time()
    results = await asyncio.gather(*tasks)
    for (outputs, _), request in zip(results, requests, strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, sampling)]
    # From the next retry on, trees are waited for again, and six tokens of a tree are right.
    assert clock.time() - began_s < 1.0
    assert len(target.batches) - began < 4 * 340 / 4


async def test_choices_on_two_targets_all_wake_when_the_reader_reads_on(make_bench, until, make_request):
    bench = make_bench(max_buffered_events=4)
    bench.limits.max_sessions = 1
    targets = [bench.add_target(name) for name in ("first", "second")]
    request = make_request(n=2)
    generation = bench.scheduler.submit(request, [TextStream(None), TextStream(None)])
    await until(lambda: all(len(target.batches) >= 2 for target in targets))
    # Until both have stopped; where they have not yet, the test asks less.
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30):
        events = [event async for event in generation]
    assert isinstance(events[-1], GenerationResult)
    assert [choice.completion_tokens for choice in events[-1].choices] == [40, 40]


async def test_a_draining_scheduler_takes_nothing_new(bench, make_request):
    bench.add_target()
    bench.scheduler.drain()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        bench.scheduler.submit(make_request(), [TextStream(None)])


async def test_cancelling_frees_both_workers(bench, until, make_request, assert_idle):
    target = bench.add_target(step_s=0.005)
    draft = bench.add_draft()
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    await until(lambda: target.sessions)
    generation.cancel()
    await until(lambda: not target.sessions and not draft.sessions)
    assert_idle(bench)
    assert not any(isinstance(event, GenerationResult) for event in [event async for event in generation])


async def test_abort_reaches_the_reader(bench, make_request, assert_idle):
    bench.add_target(step_s=0.005)
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    generation.abort(Superseded("taken over"))
    with pytest.raises(Superseded):
        async for _ in generation:
            pass
    assert_idle(bench)


async def test_a_full_queue_refuses_at_once(make_bench, make_request, assert_idle):
    bench = make_bench(max_queue=2, max_running_sessions=1)
    bench.add_target(step_s=0.01)
    running = [bench.scheduler.submit(make_request(number), [TextStream(None)]) for number in range(3)]
    with pytest.raises(Overloaded, match="queue of 2") as caught:
        bench.scheduler.submit(make_request(9), [TextStream(None)])
    assert caught.value.retry_after_s > 0
    for generation in running:
        generation.cancel()
    assert_idle(bench)


@pytest.mark.parametrize(("max_queue_wait_s", "most"), [(None, (24, 24)), (0.2, (10, 12))])
async def test_the_queue_is_bounded_by_the_places_and_by_the_wait(
    make_bench, max_queue_wait_s, most, make_request, assert_idle
):
    """Behind the target's 8 places 16 may wait; where runs take 8 steps, 0.4 s, four of them wait 0.2 s."""
    bench = make_bench(max_queue_wait_s=max_queue_wait_s)
    bench.add_target(step_s=0.05)
    sampling = SamplingSpec(max_new_tokens=8)
    await bench.generate(make_request(sampling=sampling))
    generations = []
    with pytest.raises(Overloaded):
        for number in range(100):
            generations.append(bench.scheduler.submit(make_request(number, sampling=sampling), [TextStream(None)]))
    assert most[0] <= len(generations) <= most[1]
    for generation in generations:
        generation.cancel()
    assert_idle(bench)


async def test_a_stalled_reader_rests_and_goes_on(make_bench, expect_output, until, make_request):
    bench = make_bench(max_buffered_events=4)
    target = bench.add_target()
    sampling = SamplingSpec(max_new_tokens=40)
    generation = bench.scheduler.submit(make_request(sampling=sampling), [TextStream(None)])
    await until(lambda: len(target.batches) >= 4)
    await asyncio.sleep(0.05)
    assert len(target.batches) <= 6
    output = [token for event in [e async for e in generation][:-1] for token in event.token_ids]
    assert output == expect_output((1, 2, 3), sampling)


async def test_several_choices_of_one_request(bench, make_request):
    bench.add_target()
    outputs, result = await bench.generate(make_request(n=3))
    assert len(outputs) == len(result.choices) == 3
    assert [choice.index for choice in result.choices] == [0, 1, 2]


async def test_a_resumed_request_goes_on_after_what_was_received(bench, expect_output, make_request):
    bench.add_target()
    sampling = SamplingSpec(max_new_tokens=40)
    whole = expect_output((1, 2, 3), sampling)
    outputs, _ = await bench.generate(make_request(sampling=sampling, received={0: tuple(whole[:11])}))
    assert outputs == [whole]
    outputs, result = await bench.generate(make_request(sampling=sampling, received={0: tuple(whole)}))
    assert outputs == [whole]
    assert result.choices[0].finish_reason is FinishReason.LENGTH


async def test_trace_counts_growth_behind_a_result_to_the_next_round(bench, make_request):
    """It comes when the next batch has left, and before the client hears of the last one."""
    target = bench.add_target()
    bench.add_draft(delay_s=1000.0)
    request = make_request(trace=True, sampling=SamplingSpec(max_new_tokens=3))
    generation = bench.scheduler.submit(request, [TextStream(None)])
    (epoch,), submit = generation.sessions[0].draft_epochs.values(), target.submit
    length = len(request.prompt_token_ids)
    growth = Growth(
        session_id=1, epoch=epoch, as_of=length, node_ids=[1], parents=[0], tokens=[5], acceptance=[0.5], complete=True
    )

    def submit_and_grow(trees, **options):
        if len(target.batches) == 1:
            asyncio.get_running_loop().call_soon(bench.scheduler.take_growth, "draft", GrowthBatch.of([growth]))
        return submit(trees, **options)

    target.submit = submit_and_grow
    rounds = [event async for event in generation if hasattr(event, "submitted_ns")]
    assert [len(record.growth) for record in rounds] == [0, 1, 0]


async def test_trace_shows_growth_arriving_while_the_target_verifies(bench, make_request):
    bench.add_target(step_s=0.005)
    bench.add_draft(accuracy=0.5, delay_s=0.004)
    request = make_request(trace=True)
    generation = bench.scheduler.submit(request, [TextStream(None)])
    rounds = [event async for event in generation if hasattr(event, "submitted_ns")]
    assert sum(len(record.emitted_token_ids) for record in rounds) == 40
    # Others are held for growth, and have it when they leave.
    during = [any(arrival.during_verify for arrival in record.growth) for record in rounds[1:]]
    assert sum(during) >= 0.4 * len(during)
    for record in rounds:
        assert record.submitted_ns <= record.result_ns
        assert all(parent < number for number, parent in enumerate(record.node_parents, start=1))
