"""The scheduler where targets and drafts are lost, full, silent or wrong."""

import asyncio
import dataclasses
import itertools

import pytest

from outrider.coordinator import clock
from outrider.coordinator.messages import (
    FaultKind,
    SpeculationMode,
    TokenDelta,
)
from outrider.coordinator.text_stream import TextStream
from outrider.errors import InternalError, InvalidRequest, Overloaded, WorkerUnavailable
from outrider.sampling import SamplingSpec


async def test_a_draft_lost_in_the_middle_changes_nothing(bench, expect_output, until, make_request):
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


async def test_a_silent_draft_is_not_waited_for_beyond_the_cap(make_bench, expect_output, make_request):
    bench = make_bench(verify_wait_cap_ms=5.0)
    bench.add_target()
    bench.add_draft(delay_s=1000.0)
    request = make_request()
    async with asyncio.timeout(30):
        outputs, _ = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]


async def test_a_lost_target_hands_its_sessions_to_another(bench, expect_output, until, make_request, assert_idle):
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
async def test_a_session_that_rests_when_its_target_is_lost_asks_another_at_once(
    bench, expect_output, is_deferred, make_request
):
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
async def test_what_a_lost_target_has_committed_is_delivered(make_bench, expect_output, target_wait_s, make_request):
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


async def test_the_last_target_lost_ends_requests_with_a_reason(bench, until, make_request, assert_idle):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(sampling=SamplingSpec(max_new_tokens=1000))))
    await until(lambda: len(target.batches) > 5)
    target.is_lost = True
    with pytest.raises(WorkerUnavailable, match="target"):
        await task
    assert_idle(bench)
    with pytest.raises(WorkerUnavailable, match="no target worker"):
        bench.scheduler.submit(make_request(), [TextStream(None)])


async def test_a_replaced_target_is_waited_for_when_configured(make_bench, expect_output, until, make_request):
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


async def test_the_wait_for_another_target_is_between_two_tokens(make_bench, until, make_request):
    """Whoever reads waits all that time, and the histogram has to say so."""
    bench = make_bench(target_wait_s=10.0)
    bench.add_target("first", step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(sampling=SamplingSpec(max_new_tokens=60))))
    totals = bench.scheduler.totals
    await until(lambda: totals.emitted_tokens > 5)
    bench.scheduler.remove_target("first", "gone")
    await asyncio.sleep(2.0)
    bench.add_target("second", step_s=0.001)
    await task
    between = totals.serving.between_tokens
    assert sum(between.counts) == totals.verify_steps - 1
    assert 2e9 <= between.total < 2.5e9


async def test_a_session_that_a_target_forgot_is_opened_anew(bench, expect_output, until, make_request):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request()))
    await until(lambda: len(target.batches) > 5)
    target.fail_sessions.update(target.sessions)
    outputs, _ = await task
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))]


async def test_a_session_lost_again_and_again_is_given_up(bench, make_request, assert_idle):
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
async def test_an_answer_that_does_not_name_what_was_asked_for(
    bench, expect_output, make_request, assert_idle, *, monkeypatch, wrong
):
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
async def test_text_that_cannot_be_made_ends_its_own_request_alone(
    bench, expect_output, stop, make_request, assert_idle
):
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


async def test_what_was_received_of_one_choice_and_has_no_text_leaves_none_of_the_others(
    bench, expect_output, make_request, assert_idle
):
    bench.add_target()
    received = expect_output((1, 2, 3), make_request().sampling)[:4]
    broken = BrokenText()
    broken.pushes = 4
    with pytest.raises(InternalError, match="cannot be turned into text"):
        bench.scheduler.submit(make_request(n=2, received={0: received, 1: received}), [TextStream(None), broken])
    assert not bench.scheduler.sessions
    assert_idle(bench)


async def test_stopping_looks_for_no_one_to_take_the_places_over(make_bench, monkeypatch, make_request, assert_idle):
    bench = make_bench(max_running_sessions=100, max_queue=100)
    bench.limits.max_sessions = 100
    bench.add_target(step_s=10)
    bench.add_draft()
    generations = [bench.scheduler.submit(make_request(number), [TextStream(None)]) for number in range(1, 41)]
    searches = []
    monkeypatch.setattr(bench.scheduler._drafts, "assign_all", lambda: searches.append(1))
    await bench.scheduler.stop(WorkerUnavailable("stopping"))
    assert not searches
    for generation in generations:
        with pytest.raises(WorkerUnavailable, match="stopping"):
            await anext(aiter(generation))
    assert_idle(bench)


async def test_losses_far_apart_are_not_added_up(bench, expect_output, make_request):
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


async def test_a_full_target_makes_a_session_wait_not_fail(bench, expect_output, until, make_request):
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


async def test_what_never_fits_is_refused_in_the_end(make_bench, make_request, assert_idle):
    bench = make_bench(room_wait_s=0.1)
    target = bench.add_target()
    target.fault_kind, target.fail_sessions = FaultKind.NO_ROOM, Everything()
    with pytest.raises(Overloaded, match="says no"):
        await bench.generate(make_request())
    assert_idle(bench)


async def test_what_a_target_refuses_is_the_requests_fault(bench, make_request, assert_idle):
    target = bench.add_target()
    target.fault_kind, target.fail_sessions = FaultKind.REFUSED, Everything()
    with pytest.raises(InvalidRequest, match="says no"):
        await bench.generate(make_request())
    assert_idle(bench)


async def test_a_draft_that_gives_a_session_up_hands_it_to_another(bench, until, make_request):
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


async def test_a_session_that_every_draft_gives_up_goes_on_without(bench, expect_output, make_request):
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


async def test_a_session_without_a_draft_gets_the_next_free_place(bench, until, make_request):
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


async def test_a_broken_verify_loop_is_reported(bench, make_request):
    target = bench.add_target()
    target.submit = None  # type: ignore[assignment]
    reasons: list[str] = []
    bench.scheduler.remove_target("target", "replaced")
    bench.scheduler.add_target("broken", target, bench.limits, on_failure=reasons.append)
    with pytest.raises(WorkerUnavailable):
        await bench.generate(make_request())
    assert len(reasons) == 1
    assert not bench.scheduler.has_target


async def test_every_loss_of_the_target_gets_its_whole_wait(make_bench, expect_output, make_request):
    """Two losses together last longer than one wait."""
    bench = make_bench(target_wait_s=0.2)
    target = bench.add_target("0", step_s=0.001)
    request = make_request(sampling=SamplingSpec(max_new_tokens=200))
    task = asyncio.create_task(bench.generate(request))
    for number in range(1, 4):
        await asyncio.sleep(0.01)
        target.is_lost = True
        await asyncio.sleep(0.13)
        target = bench.add_target(str(number), step_s=0.001)
    outputs, _ = await task
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]


@pytest.mark.parametrize("early_s", [0.0, 0.002])
async def test_a_target_that_computed_nothing_is_asked_again_after_a_moment(
    bench, expect_output, monkeypatch, early_s, make_request
):
    """The timers of an event loop may be early: uvloop counts whole milliseconds."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda delay, *what, **more: call_later(delay - early_s, *what, **more))
    target = bench.add_target()
    target.defer_always = True
    submit, times_ns = target.submit, []

    def noting(trees, **options):
        times_ns.append(clock.now_ns())
        return submit(trees, **options)

    target.submit = noting
    request = make_request()
    generation = asyncio.create_task(bench.generate(request))
    async with asyncio.timeout(30):
        while len(times_ns) < 4:
            await asyncio.sleep(0.01)
    target.defer_always = False
    outputs, _ = await generation
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert all(after - before >= 5_000_000 for before, after in itertools.pairwise(times_ns[:4]))


async def test_deferred_sessions_are_submitted_again(bench, expect_output, make_request):
    target = bench.add_target(defer_first=True)
    outputs, result = await bench.generate(make_request())
    assert outputs == [expect_output((1, 2, 3), SamplingSpec(max_new_tokens=40))]
    assert len(target.batches) == result.speculation.verify_steps + 1


async def test_rounds_that_were_held_when_their_target_went_are_counted(bench, until, make_request):
    """What was committed is told to clients and to drafts; counters know of it, too."""
    target = bench.add_target("first", step_s=0.01)
    draft = bench.add_draft(delay_s=0.0)
    request = make_request(mode=SpeculationMode.SYNC, sampling=SamplingSpec(max_new_tokens=100_000))
    generation = bench.scheduler.submit(request, [TextStream(None)])
    (session,) = generation.sessions
    await until(lambda: target.batches)
    # Having spoken once it is waited for.
    draft.delay_s = 1e6
    await until(lambda: session.output_length and session.flight is None)
    assert len(target.batches) == 1
    bench.scheduler.remove_target("first", "gone")
    await until(lambda: bench.scheduler.totals.steps == 1)
    totals = bench.scheduler.totals
    assert (totals.verify_steps, totals.emitted_tokens) == (1, session.output_length)
    generation.cancel()
