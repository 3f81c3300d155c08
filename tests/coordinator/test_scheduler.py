import asyncio
import dataclasses
import random
import time

import pytest
from benchmarks.simulation import virtual_time

from outrider.coordinator import clock
from outrider.coordinator.messages import (
    FaultKind,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Growth,
    GrowthBatch,
    SpeculationMode,
    TokenDelta,
)
from outrider.coordinator.text_stream import TextStream
from outrider.errors import InternalError, InvalidRequest, Overloaded, Superseded, WorkerUnavailable
from outrider.sampling import SamplingSpec


def make_request(number: int = 1, **changes) -> GenerationRequest:
    settings = {
        "request_id": f"request-{number}",
        "prompt_token_ids": (number, 2, 3),
        "sampling": SamplingSpec(max_new_tokens=40),
    }
    return GenerationRequest(**settings | changes)


def assert_idle(bench) -> None:
    assert bench.scheduler.running_sessions == 0
    assert bench.scheduler.waiting_requests == 0


@pytest.mark.parametrize("mode", list(SpeculationMode))
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
async def test_output_is_the_targets_whatever_the_draft_does(bench, expect_output, mode, accuracy):
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


async def test_sessions_share_batches_and_keep_apart(bench, expect_output):
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


async def test_stop_token_ends_the_choice(bench, expect_output):
    bench.add_target()
    bench.add_draft(accuracy=1.0)
    plain = expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))
    sampling = SamplingSpec(max_new_tokens=40, stop_token_ids=(plain[7],))
    outputs, result = await bench.generate(make_request(sampling=sampling))
    end = plain.index(plain[7]) + 1
    assert outputs == [plain[:end]]
    assert result.choices[0].finish_reason is FinishReason.STOP
    assert result.choices[0].stop_token_id == plain[7]


async def test_without_a_draft_it_decodes_plainly(bench, expect_output):
    bench.add_target()
    request = make_request()
    outputs, result = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert result.speculation.drafted_tokens == 0


async def test_a_draft_lost_in_the_middle_changes_nothing(bench, expect_output, until):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.9)
    request = make_request(sampling=SamplingSpec(max_new_tokens=120))
    task = asyncio.create_task(bench.generate(request))
    totals = bench.scheduler.totals
    await until(lambda: totals.accepted_tokens)
    bench.scheduler.remove_draft("draft")
    steps = totals.emitted_tokens
    await until(lambda: totals.emitted_tokens > steps + 2)
    late = bench.add_draft("late", accuracy=0.9)
    outputs, _ = await task
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert late.closed


async def test_a_silent_draft_is_not_waited_for_beyond_the_cap(make_bench, expect_output):
    bench = make_bench(verify_wait_cap_ms=5.0)
    bench.add_target()
    bench.add_draft(delay_s=1000.0)
    request = make_request()
    async with asyncio.timeout(30):
        outputs, _ = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]


async def test_growth_that_is_late_twice_or_out_of_order_changes_no_token_and_is_counted(bench, expect_output):
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


async def test_growth_for_a_dead_branch_is_counted(bench):
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


async def test_a_lost_target_hands_its_sessions_to_another(bench, expect_output, until):
    first = bench.add_target("first", step_s=0.001)
    request = make_request(sampling=SamplingSpec(max_new_tokens=60))
    task = asyncio.create_task(bench.generate(request))
    await until(lambda: len(first.batches) > 10)
    second = bench.add_target("second")
    first.is_lost = True
    outputs, _ = await task
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert second.closed
    assert_idle(bench)


@pytest.mark.parametrize("is_deferred", [True, False])
async def test_a_session_that_rests_when_its_target_is_lost_asks_another_at_once(bench, expect_output, is_deferred):
    """Nobody else would wake the other target's loop."""
    first = bench.add_target("first")
    first.defer_always, first.fault_kind = is_deferred, FaultKind.NO_ROOM
    first.fail_sessions = set() if is_deferred else Everything()
    request = make_request()
    generation = bench.scheduler.submit(request, [TextStream(None)])
    bench.add_target("second")
    while generation.sessions[0].rests_until_ns < clock.now_ns():
        await asyncio.sleep(0)
    bench.scheduler.remove_target("first", "its lease is over")
    async with asyncio.timeout(30):
        events = [event async for event in generation]
    tokens = [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids]
    assert tokens == expect_output(request.prompt_token_ids, request.sampling)


@pytest.mark.parametrize("target_wait_s", [0.0, 10.0])
async def test_what_a_lost_target_has_committed_is_delivered(make_bench, expect_output, target_wait_s):
    """The target is lost when the next batch has been sent, and clients have not heard of the last one."""
    bench = make_bench(target_wait_s=target_wait_s)
    target = bench.add_target()
    submit = target.submit

    def submit_and_go(trees, **options):
        if len(target.batches) == 1:
            asyncio.get_running_loop().call_soon(bench.scheduler.remove_target, "target", "its lease is over")
        return submit(trees, **options)

    target.submit = submit_and_go
    request = make_request()
    reader = aiter(bench.scheduler.submit(request, [TextStream(None)]))
    async with asyncio.timeout(30):
        delta = await anext(reader)
    assert delta.token_ids == expect_output(request.prompt_token_ids, request.sampling)[:1]
    if not target_wait_s:
        with pytest.raises(WorkerUnavailable, match="last target"):
            await anext(reader)
    await bench.scheduler.stop(WorkerUnavailable("the test is over"))


async def test_the_last_target_lost_ends_requests_with_a_reason(bench, until):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(sampling=SamplingSpec(max_new_tokens=1000))))
    await until(lambda: len(target.batches) > 5)
    target.is_lost = True
    with pytest.raises(WorkerUnavailable, match="target"):
        await task
    assert_idle(bench)
    with pytest.raises(WorkerUnavailable, match="no target worker"):
        bench.scheduler.submit(make_request(), [TextStream(None)])


async def test_a_replaced_target_is_waited_for_when_configured(make_bench, expect_output, until):
    bench = make_bench(target_wait_s=60.0)
    target = bench.add_target(step_s=0.001)
    request = make_request(sampling=SamplingSpec(max_new_tokens=60))
    task = asyncio.create_task(bench.generate(request))
    await until(lambda: len(target.batches) > 5)
    target.is_lost = True
    await until(lambda: not bench.scheduler.has_target)
    assert not task.done()
    bench.add_target("again")
    outputs, _ = await task
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]


async def test_a_session_that_a_target_forgot_is_opened_anew(bench, expect_output, until):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request()))
    await until(lambda: len(target.batches) > 5)
    target.fail_sessions.update(target.sessions)
    outputs, _ = await task
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))]


async def test_a_session_lost_again_and_again_is_given_up(bench):
    target = bench.add_target(step_s=0.001)
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    with pytest.raises(WorkerUnavailable, match="says no"):
        async for _ in failing_always(target, generation):
            pass
    assert_idle(bench)


async def failing_always(target, generation):
    (session,) = generation.sessions
    target.fail_sessions = Everything()
    async for event in generation:
        yield event
    assert session.result is None


class Everything(set):
    def __contains__(self, item) -> bool:
        return True


@pytest.mark.parametrize("wrong", ["left out", "another epoch", "twice"])
async def test_an_answer_that_does_not_name_what_was_asked_for(bench, expect_output, monkeypatch, wrong):
    """The session that it leaves out is opened anew; the others, and those named twice, go on."""
    target = bench.add_target()
    step = target._step

    async def spoilt_once(trees):
        result = await step(trees)
        if len(target.batches) == 5:
            verdicts = {
                "left out": result.verdicts[1:],
                "another epoch": [result.verdicts[0]._replace(epoch=99), *result.verdicts[1:]],
                "twice": [result.verdicts[0], *result.verdicts],
            }
            result = dataclasses.replace(result, verdicts=verdicts[wrong])
        return result

    monkeypatch.setattr(target, "_step", spoilt_once)
    requests = [make_request(number, mode=SpeculationMode.OFF) for number in (1, 2)]
    async with asyncio.timeout(30):
        results = await asyncio.gather(*(bench.generate(request) for request in requests))
    for request, (outputs, _) in zip(requests, results, strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert_idle(bench)


class BrokenText(TextStream):
    """A tokenizer with a defect that shows at the fifth push."""

    def __init__(self) -> None:
        super().__init__(None)
        self.pushes = 0

    def push(self, token_ids):
        self.pushes += 1
        if self.pushes >= 5:
            raise KeyError("no such piece")
        return super().push(token_ids)


@pytest.mark.parametrize("stop", [(), ("x",)])
async def test_text_that_cannot_be_made_ends_its_own_request_alone(bench, expect_output, stop):
    bench.add_target()
    bench.add_draft()
    broken = bench.scheduler.submit(make_request(1, stop=stop), [BrokenText()])
    other = asyncio.create_task(bench.generate(make_request(2)))
    tokens = []
    with pytest.raises(InternalError, match="request-1 cannot be turned into text: KeyError: 'no such piece'"):
        async for event in broken:
            tokens += event.token_ids
    assert tokens == expect_output((1, 2, 3), make_request().sampling)[: len(tokens)]
    outputs, _ = await other
    assert outputs == [expect_output((2, 2, 3), make_request().sampling)]
    assert_idle(bench)


async def test_stopping_looks_for_no_one_to_take_the_places_over(make_bench, monkeypatch):
    bench = make_bench(max_running_sessions=100, max_queue=100)
    bench.limits.max_sessions = 100
    bench.add_target(step_s=10)
    bench.add_draft()
    generations = [bench.scheduler.submit(make_request(number), [TextStream(None)]) for number in range(1, 41)]
    searches = []
    monkeypatch.setattr(bench.scheduler, "_assign_drafts", lambda: searches.append(1))
    await bench.scheduler.stop(WorkerUnavailable("stopping"))
    assert not searches
    for generation in generations:
        with pytest.raises(WorkerUnavailable, match="stopping"):
            await anext(aiter(generation))
    assert_idle(bench)


async def test_losses_far_apart_are_not_added_up(bench, expect_output):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(sampling=SamplingSpec(max_new_tokens=60))))
    for _ in range(5):
        emitted = bench.scheduler.totals.emitted_tokens
        # However busy this machine is, tokens come between two losses.
        while bench.scheduler.totals.emitted_tokens < emitted + 3:
            await asyncio.sleep(0.001)
        target.fail_sessions.update(target.sessions)
    outputs, _ = await task
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=60))]


async def test_a_full_target_makes_a_session_wait_not_fail(bench, expect_output, until):
    target = bench.add_target(step_s=0.001)
    target.fault_kind = FaultKind.NO_ROOM
    task = asyncio.create_task(bench.generate(make_request()))
    for number in range(4):
        await until(lambda least=3 * number: bench.scheduler.totals.emitted_tokens > least)
        target.fail_sessions.update(target.sessions)
        await until(lambda: not target.fail_sessions)
    assert not task.done()
    outputs, _ = await task
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))]


async def test_what_never_fits_is_refused_in_the_end(make_bench):
    bench = make_bench(room_wait_s=0.1)
    target = bench.add_target()
    target.fault_kind, target.fail_sessions = FaultKind.NO_ROOM, Everything()
    with pytest.raises(Overloaded, match="says no"):
        await bench.generate(make_request())
    assert_idle(bench)


async def test_what_a_target_refuses_is_the_requests_fault(bench):
    target = bench.add_target()
    target.fault_kind, target.fail_sessions = FaultKind.REFUSED, Everything()
    with pytest.raises(InvalidRequest, match="says no"):
        await bench.generate(make_request())
    assert_idle(bench)


async def test_a_sync_session_is_not_starved_by_others(make_bench, expect_output):
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


async def test_choices_on_two_targets_all_wake_when_the_reader_reads_on(make_bench, until):
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


async def test_a_draft_that_gives_a_session_up_hands_it_to_another(bench, until):
    bench.add_target(step_s=0.002)
    first = bench.add_draft("first", delay_s=1000.0)
    second = bench.add_draft("second")
    generations = [bench.scheduler.submit(make_request(number), [TextStream(None)]) for number in range(2)]
    await until(lambda: first.sessions)
    ((session_id, (epoch, _)),) = first.sessions.items()
    bench.scheduler.take_draft_error("first", session_id, epoch, "no room")
    await until(lambda: session_id in second.sessions)
    for generation in generations:
        generation.cancel()


async def test_a_session_that_every_draft_gives_up_goes_on_without(bench, expect_output):
    bench.add_target(step_s=0.001)
    opened: list[str] = []
    for name in ("first", "second"):
        draft = bench.add_draft(name, delay_s=1000.0)

        def refuse(opening, *, name=name) -> None:
            opened.append(name)
            loop = asyncio.get_running_loop()
            error = (name, opening.session_id, opening.epoch, "unknown token")
            loop.call_soon(bench.scheduler.take_draft_error, *error)

        draft.open_session = refuse
    outputs, _ = await bench.generate(make_request())
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))]
    assert sorted(opened) == ["first", "second"]


async def test_a_session_without_a_draft_gets_the_next_free_place(bench, until):
    bench.limits.max_sessions = 1
    bench.add_target("a")
    bench.add_target("b")
    draft = bench.add_draft()
    long = SamplingSpec(max_new_tokens=100_000)
    first, second = (
        bench.scheduler.submit(make_request(number, sampling=long), [TextStream(None)]) for number in (1, 2)
    )
    await until(lambda: draft.sessions)
    assert set(draft.sessions) == {first.sessions[0].session_id}
    first.cancel()
    assert set(draft.sessions) == {second.sessions[0].session_id}
    second.cancel()


async def test_a_broken_verify_loop_is_reported(bench):
    target = bench.add_target()
    target.submit = None  # type: ignore[assignment]
    reasons: list[str] = []
    bench.scheduler.remove_target("target", "replaced")
    bench.scheduler.add_target("broken", target, bench.limits, on_failure=reasons.append)
    with pytest.raises(WorkerUnavailable):
        await bench.generate(make_request())
    assert len(reasons) == 1
    assert not bench.scheduler.has_target


def test_every_loss_of_the_target_gets_its_whole_wait(make_bench, expect_output):
    async def lose_three() -> list[list[int]]:
        bench = make_bench(target_wait_s=0.2)
        target = bench.add_target("0", step_s=0.001)
        task = asyncio.create_task(bench.generate(make_request(sampling=SamplingSpec(max_new_tokens=200))))
        for number in range(1, 4):
            await asyncio.sleep(0.01)
            target.is_lost = True
            await asyncio.sleep(0.13)
            target = bench.add_target(str(number), step_s=0.001)
        return (await task)[0]

    # Two losses together last longer than one wait; in virtual time exactly so.
    assert virtual_time.run(lose_three()) == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=200))]


async def test_a_draining_scheduler_takes_nothing_new(bench):
    bench.add_target()
    bench.scheduler.drain()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        bench.scheduler.submit(make_request(), [TextStream(None)])


@pytest.mark.parametrize("early_s", [0.0, 0.002])
async def test_a_target_that_computed_nothing_is_asked_again_after_a_moment(bench, expect_output, monkeypatch, early_s):
    """The timers of an event loop may be early: uvloop counts whole milliseconds."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda delay, *what, **more: call_later(delay - early_s, *what, **more))
    target = bench.add_target()
    target.defer_always = True
    request, began_s = make_request(), time.monotonic()
    generation = asyncio.create_task(bench.generate(request))
    async with asyncio.timeout(30):
        while len(target.batches) < 4:
            await asyncio.sleep(0.001)
        # Three pauses of 5 ms, less what clocks differ by.
        assert time.monotonic() - began_s > 0.014
        target.defer_always = False
        outputs, _ = await generation
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]


async def test_deferred_sessions_are_submitted_again(bench, expect_output):
    target = bench.add_target(defer_first=True)
    outputs, result = await bench.generate(make_request())
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))]
    assert len(target.batches) == result.speculation.verify_steps + 1


async def test_cancelling_frees_both_workers(bench, until):
    target = bench.add_target(step_s=0.005)
    draft = bench.add_draft()
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    await until(lambda: target.sessions)
    generation.cancel()
    await until(lambda: not target.sessions and not draft.sessions)
    assert_idle(bench)
    assert not any(isinstance(event, GenerationResult) for event in [event async for event in generation])


async def test_abort_reaches_the_reader(bench):
    bench.add_target(step_s=0.005)
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    generation.abort(Superseded("taken over"))
    with pytest.raises(Superseded):
        async for _ in generation:
            pass
    assert_idle(bench)


async def test_a_full_queue_refuses_at_once(make_bench):
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
async def test_the_queue_is_bounded_by_the_places_and_by_the_wait(make_bench, max_queue_wait_s, most):
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


async def test_a_stalled_reader_rests_and_goes_on(make_bench, expect_output, until):
    bench = make_bench(max_buffered_events=4)
    target = bench.add_target()
    sampling = SamplingSpec(max_new_tokens=40)
    generation = bench.scheduler.submit(make_request(sampling=sampling), [TextStream(None)])
    await until(lambda: len(target.batches) >= 4)
    await asyncio.sleep(0.05)
    assert len(target.batches) <= 6
    output = [token for event in [e async for e in generation][:-1] for token in event.token_ids]
    assert output == expect_output((1, 2, 3), sampling)


async def test_several_choices_of_one_request(bench):
    bench.add_target()
    outputs, result = await bench.generate(make_request(n=3))
    assert len(outputs) == len(result.choices) == 3
    assert [choice.index for choice in result.choices] == [0, 1, 2]


async def test_a_resumed_request_goes_on_after_what_was_received(bench, expect_output):
    bench.add_target()
    sampling = SamplingSpec(max_new_tokens=40)
    whole = expect_output((1, 2, 3), sampling)
    outputs, _ = await bench.generate(make_request(sampling=sampling, received={0: tuple(whole[:11])}))
    assert outputs == [whole]
    outputs, result = await bench.generate(make_request(sampling=sampling, received={0: tuple(whole)}))
    assert outputs == [whole]
    assert result.choices[0].finish_reason is FinishReason.LENGTH


async def test_trace_counts_growth_behind_a_result_to_the_next_round(bench):
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


async def test_trace_shows_growth_arriving_while_the_target_verifies(bench):
    bench.add_target(step_s=0.005)
    bench.add_draft(accuracy=0.5, delay_s=0.004)
    request = make_request(trace=True)
    generation = bench.scheduler.submit(request, [TextStream(None)])
    rounds = [event async for event in generation if hasattr(event, "submitted_ns")]
    assert sum(len(record.emitted_token_ids) for record in rounds) == 40
    assert any(arrival.during_verify for record in rounds for arrival in record.growth)
    for record in rounds:
        assert record.submitted_ns <= record.result_ns
        assert all(parent < number for number, parent in enumerate(record.node_parents, start=1))
