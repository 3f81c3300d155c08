"""Batches that are sent before the step that they follow has ended, whatever becomes of its sessions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tests.coordinator.test_text_stream import BYTE_LEVEL

from outrider.coordinator import clock
from outrider.coordinator.ahead import Lead
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.messages import FaultKind, RoundRecord, SpeculationMode, TokenDelta, VerifyResult
from outrider.coordinator.rounds import Way, ways_of
from outrider.coordinator.text_stream import TextStream
from outrider.coordinator.trials import Trials
from outrider.coordinator.verify_loop import VerifyLoop
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2

STEP_S = 0.004


@pytest.fixture
async def ahead_bench(bench: Any) -> Any:
    """All rounds go ahead wherever they may, and growth is there soon."""
    target = bench.add_target(step_s=STEP_S)
    bench.scheduler._lanes["target"].way = Trials((Way.AHEAD,))
    bench.target = target
    bench.lane = bench.scheduler._lanes["target"]
    return bench


def start(bench: Any, requests: Sequence[Any]) -> list["asyncio.Task[Any]"]:
    return [asyncio.create_task(bench.generate(request)) for request in requests]


async def assert_outputs(requests: Sequence[Any], tasks: Sequence["asyncio.Task[Any]"], expect_output: Any) -> None:
    async with asyncio.timeout(60):
        for request, task in zip(requests, tasks, strict=True):
            outputs, _ = await task
            assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]


def waits_behind(bench: Any) -> bool:
    """Whether a batch is out that follows a step."""
    return any(flight.successor is not None and not flight.follows_ns for flight in bench.lane.flights)


@pytest.mark.parametrize("mode", [SpeculationMode.ASYNC, SpeculationMode.OFF])
async def test_most_steps_follow_at_once_and_the_tokens_are_the_same(
    ahead_bench, expect_output, make_request, assert_idle, mode
):
    ahead_bench.add_draft(accuracy=0.9)
    requests = [
        make_request(number, mode=mode, sampling=SamplingSpec(max_new_tokens=40 + 7 * number)) for number in range(1, 7)
    ]
    await assert_outputs(requests, start(ahead_bench, requests), expect_output)
    target, totals = ahead_bench.target, ahead_bench.scheduler.totals
    assert len(target.successors) > 0.8 * len(target.batches)
    # Sessions that ended with the step before are no loss.
    assert not totals.serving.reopened
    if mode is SpeculationMode.ASYNC:
        assert totals.accepted_tokens > 0.3 * totals.emitted_tokens
        assert totals.accepted_tokens < totals.drafted_tokens
    assert_idle(ahead_bench)


@pytest.mark.parametrize("accuracies", [(0.5,), (0.8,), (0.8, 0.8, 0.6), (1.0, 0.3)], ids=str)
async def test_growth_that_comes_behind_a_batch_is_in_it_and_the_tokens_are_the_same(
    ahead_bench, expect_output, make_request, assert_idle, accuracies
):
    """Every batch leaves as soon as the step that it follows runs: what it has, it has by additions."""
    ahead_bench.lane.lead.ns = lambda **_: 1e9
    for number, accuracy in enumerate(accuracies):
        ahead_bench.add_draft(f"draft-{number}", accuracy=accuracy, delay_s=STEP_S / 2).random.seed(number)
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=50 + 9 * number)) for number in range(1, 6)]
    await assert_outputs(requests, start(ahead_bench, requests), expect_output)
    target, totals = ahead_bench.target, ahead_bench.scheduler.totals
    assert target.extended > 10
    sent = [len(successor.additions) for successor in target.successors]
    assert sum(sent) >= target.extended
    # The last one may have been for sessions that had ended by then.
    assert sum(sent[:-1]) <= totals.serving.ahead_additions <= sum(sent)
    assert totals.serving.ahead_additions_late <= sum(sent) - target.extended
    assert totals.accepted_tokens > 0.2 * totals.emitted_tokens
    assert_idle(ahead_bench)


async def test_what_comes_too_late_is_in_no_tree_at_either_end(ahead_bench, expect_output, make_request, monkeypatch):
    """The target says that it has had none."""
    target, step = ahead_bench.target, ahead_bench.target._step

    async def too_late(trees: Any) -> VerifyResult:
        target.extended -= (result := await step(trees)).additions
        return replace(result, additions=0)

    monkeypatch.setattr(target, "_step", too_late)
    ahead_bench.lane.lead.ns = lambda **_: 1e9
    ahead_bench.add_draft(accuracy=0.9, delay_s=STEP_S / 2)
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in range(1, 4)]
    await assert_outputs(requests, start(ahead_bench, requests), expect_output)
    counts = ahead_bench.scheduler.totals.serving
    assert counts.ahead_additions == counts.ahead_additions_late > 10


async def test_a_session_that_ends_while_growth_is_added_leaves_the_others_alone(
    ahead_bench, expect_output, until, make_request, assert_idle
):
    """Its slots are others' at once; the target has its nodes until it hears of it."""
    lane = ahead_bench.lane
    lane.lead.ns = lambda **_: 1e9
    ahead_bench.add_draft(accuracy=0.9, delay_s=STEP_S / 2)
    gone = [ahead_bench.scheduler.submit(make_request(number), [TextStream(None)]) for number in range(1, 5)]
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=90)) for number in range(5, 8)]
    tasks = start(ahead_bench, requests)

    def is_extended() -> bool:
        return waits_behind(ahead_bench) and bool(lane.flights[-1].successor.additions)

    for generation in gone:
        await until(lambda: is_extended() or all(task.done() for task in tasks))
        generation.cancel()
        await asyncio.sleep(STEP_S)
    await assert_outputs(requests, tasks, expect_output)
    assert ahead_bench.scheduler.has_target
    assert_idle(ahead_bench)


async def test_a_step_begins_with_the_end_of_the_one_before(ahead_bench, make_request):
    """The rate of a lone session without a draft is that of the target's steps."""
    flights = []
    learn = ahead_bench.lane.learn

    def noted(flight: Any, result: VerifyResult, *, result_ns: int, **others: Any) -> None:
        flights.append((flight, result_ns))
        learn(flight, result, result_ns=result_ns, **others)

    ahead_bench.lane.learn = noted
    await ahead_bench.generate(make_request(sampling=SamplingSpec(max_new_tokens=60)))
    late = [
        result_ns - flight.begun_ns - STEP_S * 1e9
        for flight, result_ns in flights[10:]
        if flight.successor is not None and flight.rows
    ]
    assert len(late) > 40
    assert sorted(late)[len(late) // 2] < 0.1 * STEP_S * 1e9


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "never in time"])
async def test_what_a_batch_waits_behind_a_step_is_no_part_of_its_round(ahead_bench, make_request, is_sent):
    """Neither from its submission to its result, nor as time that the target was held."""
    ahead_bench.add_draft()
    if not is_sent:
        ahead_bench.lane.lead.ns = lambda **_: -1e9
    generation = ahead_bench.scheduler.submit(make_request(trace=True), [TextStream(None)])
    rounds = [event async for event in generation if isinstance(event, RoundRecord)]
    assert len(rounds) > 5
    assert bool(ahead_bench.target.successors) == is_sent
    for before, after in pairwise(rounds):
        assert after.submitted_ns >= before.result_ns
    assert sum(each.waited_ns for each in rounds) < 0.1 * STEP_S * 1e9 * len(rounds)


async def test_a_batch_is_held_until_the_step_before_is_about_to_end(ahead_bench, make_request, monkeypatch):
    """A trace tells so, and growth that comes meanwhile wakes nobody."""
    target, step, asked = ahead_bench.target, ahead_bench.target._step, []

    async def told_honestly(trees: Any) -> VerifyResult:
        return replace(await step(trees), step_ns=round(STEP_S * 1e9))

    monkeypatch.setattr(target, "_step", told_honestly)
    hold_s = VerifyLoop._hold_s
    monkeypatch.setattr(VerifyLoop, "_hold_s", lambda loop, *of: asked.append(of) or hold_s(loop, *of))
    for name in ("one", "two", "three"):
        ahead_bench.add_draft(name, delay_s=0.0002)
    requests = [make_request(number, trace=number == 1) for number in range(1, 9)]
    generations = [ahead_bench.scheduler.submit(request, [TextStream(None)]) for request in requests]
    others = [asyncio.create_task(_until_ended(generation)) for generation in generations[1:]]
    rounds = [event async for event in generations[0] if isinstance(event, RoundRecord)]
    await asyncio.gather(*others)
    assert len(rounds) > 10
    # Later and later, as what it needs becomes known.
    held = [each.held_ns / 1e9 for each in rounds[2:]]
    assert max(held) < STEP_S
    assert max(held[-3:]) > 0.5 * STEP_S
    assert len(asked) < 4 * len(target.batches)


async def test_a_stop_token_ends_a_session_that_is_in_the_next_batch_already(
    ahead_bench, expect_output, make_request, assert_idle
):
    prompt = (3, 2, 3)
    endless = expect_output(prompt, SamplingSpec(max_new_tokens=40))
    stopped = make_request(
        3, prompt_token_ids=prompt, sampling=SamplingSpec(max_new_tokens=40, stop_token_ids=(endless[12],))
    )
    requests = [stopped, make_request(4, sampling=SamplingSpec(max_new_tokens=60))]
    await assert_outputs(requests, start(ahead_bench, requests), expect_output)
    assert not ahead_bench.scheduler.totals.serving.reopened
    assert_idle(ahead_bench)


async def test_who_ends_here_alone_has_its_part_of_the_next_step_all_the_same(make_bench, expect_output, make_request):
    """Of a stop string the target knows nothing: what it has nodes for is shared with that session once more."""
    bench = make_bench()
    bench.limits.max_step_tokens = 9
    target = bench.add_target(step_s=STEP_S)
    bench.scheduler._lanes["target"].way = Trials((Way.AHEAD,))
    bench.add_draft(accuracy=0.95)
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2, 3, 4)]
    tasks = []
    for cut in (8, 13, 18):
        prompt = (cut, 2, 3)
        output = expect_output(prompt, SamplingSpec(max_new_tokens=60))
        stop = BYTE_LEVEL.decode(output[cut : cut + 3])
        stopped = make_request(cut, prompt_token_ids=prompt, stop=(stop,), sampling=SamplingSpec(max_new_tokens=60))
        generation = bench.scheduler.submit(stopped, [TextStream(BYTE_LEVEL, stop=(stop,))])
        tasks.append(asyncio.create_task(_until_ended(generation)))
    await assert_outputs(requests, start(bench, requests), expect_output)
    await asyncio.gather(*tasks)
    assert bench.scheduler.has_target
    assert len(target.successors) > 0.5 * len(target.batches)


async def _until_ended(generation: Any) -> None:
    async for _ in generation:
        pass


@pytest.mark.parametrize("kind", [FaultKind.LOST, FaultKind.NO_ROOM])
async def test_a_session_that_a_step_closes_is_opened_anew(ahead_bench, expect_output, until, make_request, kind):
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2, 3)]
    tasks = start(ahead_bench, requests)
    target = ahead_bench.target
    target.fault_kind = kind
    await until(lambda: len(target.batches) > 5 and waits_behind(ahead_bench))
    target.fail_sessions.add(min(target.sessions))
    await assert_outputs(requests, tasks, expect_output)
    assert not target.fail_sessions
    # The batch behind had it, too: that is not the session's second fault.
    assert ahead_bench.scheduler.totals.serving.reopened == (kind is FaultKind.LOST)


async def test_a_step_that_defers_leaves_a_plain_one_behind_it(ahead_bench, expect_output, until, make_request):
    ahead_bench.add_draft(accuracy=1.0)
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2)]
    tasks = start(ahead_bench, requests)
    target = ahead_bench.target
    await until(lambda: len(target.batches) > 5 and waits_behind(ahead_bench))
    batches, target.defer_first = len(target.batches), True
    await until(lambda: len(target.batches) > batches)
    assert [len(tree.tokens) for tree in target.batches[batches]] == [0, 0]
    await assert_outputs(requests, tasks, expect_output)


async def test_a_request_that_is_cancelled_leaves_the_others_alone(
    ahead_bench, expect_output, until, make_request, assert_idle
):
    ahead_bench.add_draft()
    gone = ahead_bench.scheduler.submit(make_request(1), [TextStream(None)])
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (2, 3)]
    tasks = start(ahead_bench, requests)
    await until(lambda: waits_behind(ahead_bench) and gone.sessions[0].output_length)
    gone.cancel()
    await assert_outputs(requests, tasks, expect_output)
    assert_idle(ahead_bench)


async def test_the_only_request_is_cancelled_and_another_comes(
    ahead_bench, expect_output, until, make_request, assert_idle
):
    gone = ahead_bench.scheduler.submit(make_request(1), [TextStream(None)])
    await until(lambda: waits_behind(ahead_bench))
    gone.cancel()
    request = make_request(2)
    await assert_outputs([request], start(ahead_bench, [request]), expect_output)
    assert_idle(ahead_bench)


async def test_a_new_session_comes_with_a_batch_that_follows(ahead_bench, expect_output, until, make_request):
    first, second = (make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2))
    tasks = start(ahead_bench, [first])
    target = ahead_bench.target
    await until(lambda: len(target.batches) > 5)
    tasks += start(ahead_bench, [second])
    await assert_outputs([first, second], tasks, expect_output)
    joined = [sent.succession.is_in_step.tolist() for sent in target.successors if not sent.succession.is_in_step.all()]
    assert joined == [[True, False]]


async def test_a_lost_target_loses_both_batches(ahead_bench, expect_output, until, make_request, assert_idle):
    ahead_bench.add_draft()
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2, 3)]
    tasks = start(ahead_bench, requests)
    await until(lambda: len(ahead_bench.target.batches) > 5 and waits_behind(ahead_bench))
    second = ahead_bench.add_target("second", step_s=STEP_S)
    ahead_bench.target.is_lost = True
    await assert_outputs(requests, tasks, expect_output)
    assert second.batches
    assert_idle(ahead_bench)


async def test_a_target_that_verifies_another_tree_is_lost(ahead_bench, expect_output, until, make_request):
    ahead_bench.add_draft(accuracy=1.0)
    request = make_request(sampling=SamplingSpec(max_new_tokens=60))
    tasks = start(ahead_bench, [request])
    target = ahead_bench.target
    await until(lambda: len(target.batches) > 5)
    target.miscounts = True
    await until(lambda: not ahead_bench.scheduler.has_target or tasks[0].done())
    assert not tasks[0].done() or tasks[0].exception() is not None
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stalled_reader_is_in_no_further_batch_until_it_reads_on(
    make_bench, expect_output, until, make_request, assert_idle
):
    bench = make_bench(max_buffered_events=4)
    target = bench.add_target(step_s=STEP_S)
    bench.scheduler._lanes["target"].way = Trials((Way.AHEAD,))
    slow, fast = (make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2))
    stalled = bench.scheduler.submit(slow, [TextStream(None)])
    (task,) = start(bench, [fast])
    await assert_outputs([fast], [task], expect_output)
    await until(lambda: stalled.is_stalled and stalled.sessions[0].flight is None)
    assert any(len(batch) == 1 for batch in target.batches)
    async with asyncio.timeout(30):
        events = [event async for event in stalled]
    tokens = [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids]
    assert tokens == expect_output(slow.prompt_token_ids, slow.sampling)
    assert_idle(bench)


async def test_beside_a_fixed_tree_batches_are_sent_when_the_result_is_there(ahead_bench, make_request):
    ahead_bench.add_draft()
    requests = [make_request(1), make_request(2, mode=SpeculationMode.SYNC)]
    async with asyncio.timeout(60):
        await asyncio.gather(*start(ahead_bench, requests))
    for sent in ahead_bench.target.successors:
        assert len(sent.group) == 1


async def test_who_is_to_be_verified_alone_is(ahead_bench, expect_output, until, make_request):
    requests = [make_request(number, sampling=SamplingSpec(max_new_tokens=60)) for number in (1, 2, 3)]
    tasks = start(ahead_bench, requests)
    target, lane = ahead_bench.target, ahead_bench.lane
    await until(lambda: len(target.batches) > 5 and waits_behind(ahead_bench))
    suspect = next(iter(lane.sessions.values()))
    # Two of them are on their way.
    suspect.probation = 5
    lane.suspects.add(suspect.session_id)
    sent = len(target.successors)
    await until(lambda: not suspect.probation)
    # When it is over, the next batch may be on its way at once.
    assert len(target.successors) <= sent + 1
    await assert_outputs(requests, tasks, expect_output)
    alone = [batch for batch in target.batches if [tree.session_id for tree in batch] == [suspect.session_id]]
    assert len(alone) == 3


def test_few_are_late_and_none_lies_there_for_long():
    """Needed are 1 to 1.5 ms; a pause of the whole machine now and then is no reason to leave earlier for ever."""
    lead, aheads = Lead(), []
    for number in range(400):
        lead_ns = lead.ns(step_ns=8e6, overhead_ns=5e5)
        needed_ns = 1e6 + 5e5 * (number * 7 % 11) / 10 if number % 60 else 3e7
        lead.observe(lead_ns, lead_ns - needed_ns)
        if number >= 100 and number % 60:
            aheads.append(lead_ns - needed_ns)
    assert sum(ahead < 0 for ahead in aheads) < 0.05 * len(aheads)
    assert sum(aheads) / len(aheads) < 2e6


def test_a_lead_that_was_none_becomes_one():
    """What is needed may turn out to be nothing, and then to be something."""
    lead = Lead()
    for _ in range(50):
        lead.observe(1e6, 1e6)
    for _ in range(50):
        lead_ns = lead.ns(step_ns=8e6, overhead_ns=0.0)
        lead.observe(lead_ns, lead_ns - 2e6)
    assert lead.ns(step_ns=8e6, overhead_ns=0.0) > 1.9e6


async def test_results_that_come_sooner_than_expected_have_batches_leave_sooner(
    ahead_bench, expect_output, make_request
):
    """A lead that became too short, and a cost model that overrates steps, would else keep each other as they are."""
    lane = ahead_bench.lane
    lane.lead.observe(1e5, 9e6)
    requests = [make_request(sampling=SamplingSpec(max_new_tokens=60))]
    lane.cost.observe(1, 12e6)
    tasks = start(ahead_bench, requests)
    await assert_outputs(requests, tasks, expect_output)
    followed = len(ahead_bench.target.successors)
    assert followed > len(ahead_bench.target.batches) / 2


def test_rounds_keep_to_the_way_that_is_named():
    learned = ways_of("learned", ahead=True)
    assert learned[0] is Way.AHEAD
    assert set(learned) == set(Way)
    assert set(ways_of("learned", ahead=False)) == set(Way) - {Way.AHEAD}
    assert ways_of("two-groups", ahead=True) == (Way.TWO_GROUPS,)
    assert ways_of("ahead", ahead=True) == (Way.AHEAD,)
    # A target that takes none ahead has the others tried.
    assert ways_of("ahead", ahead=False) == ways_of("learned", ahead=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rounds": "early"}, "one of learned, wait,"), ({"rounds": "ahead", "ahead": False}, "ahead is off")],
)
def test_a_timing_that_cannot_be_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CoordinatorConfig(**options)


def test_of_a_successor_the_end_is_known_by_the_result_before():
    """It lay at the target then: when it was sent, and what plain batches need for their way, say nothing of it."""
    nothing: Any = None
    lane = TargetLane("target", nothing, registry_pb2.WorkerLimits(max_sessions=1), ahead=True)
    lane.cost.observe(1, 4_000_000)
    lane.applied_result_ns = 10_000_000
    flight: Any = SimpleNamespace(submitted_ns=9_500_000, rows=1, successor=object())
    lane.flights.append(flight)
    lane.pace.overhead_ns = 3e6
    assert lane._expected_result_ns(flight, 4e6) == 14e6
    flight.successor = None
    assert lane._expected_result_ns(flight, 4e6) == 16.5e6


async def test_a_batch_that_is_held_sleeps_through_growth_and_wakes_for_the_result():
    nothing: Any = None
    lane = TargetLane("target", nothing, registry_pb2.WorkerLimits(max_sessions=1), ahead=True)
    loop = VerifyLoop(lane, CoordinatorConfig(), {}, nothing)
    result = asyncio.get_running_loop().create_future()
    in_flight: Any = SimpleNamespace(result=result)
    lane.flights.append(in_flight)
    held = asyncio.create_task(loop._until_due(clock.now_ns() + 3600e9))
    for _ in range(5):
        lane.notify()
        await asyncio.sleep(0)
    assert not held.done()
    result.set_result(None)
    lane.notify()
    async with asyncio.timeout(10):
        await held
    # The batch that was due is not held at all.
    in_flight.result = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(10):
        await loop._until_due(clock.now_ns())
