"""Sessions from their request to their end, with workers that are fake and never fail."""

import asyncio
import random
from dataclasses import replace

import pytest
from tests.byte_tokenizer import ALPHABET, byte_tokenizer
from tests.coordinator.fake_workers import expected_output, growth_of, make_request, results_of
from tests.polling import until

from outrider.coordinator.sessions.messages import FinishReason, GenerationResult, GrowthBatch, TokenDelta
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import Overloaded, WorkerUnavailable
from outrider.sampling import SamplingSpec, SpeculationMode
from outrider.v1 import common_pb2
from outrider.v1.generation_pb2 import Round


@pytest.mark.parametrize("mode", list(SpeculationMode))
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
async def test_output_is_the_targets_whatever_the_draft_does(bench, *, mode, accuracy):
    target = bench.add_target(step_s=0.001)
    draft = bench.add_draft(accuracy=accuracy)
    request = make_request(mode=mode)
    result = await bench.generate(request)
    assert result.choices[0].finish_reason is FinishReason.LENGTH
    assert result.choices[0].completion_tokens == 40
    if mode is SpeculationMode.OFF:
        assert result.speculation.verify_steps == 40
        assert not draft.closed
    elif accuracy == 1.0:
        assert result.speculation.acceptance_length > 1.5
    bench.check_idle()
    assert not target.sessions
    assert not draft.sessions


async def test_sessions_share_rounds_and_keep_apart(bench):
    target = bench.add_target(step_s=0.002)
    bench.add_draft()
    bench.add_draft("second")
    await bench.generate_all(make_request(number) for number in range(1, 13))
    # Twelve sessions, eight places: rounds of several, never more than the target takes.
    assert max(len(done) for done in target.rounds) == 8
    bench.check_idle()


async def test_stop_token_ends_the_choice(bench):
    bench.add_target()
    bench.add_draft(accuracy=1.0)
    plain = expected_output(make_request())
    sampling = SamplingSpec(max_new_tokens=40, stop_token_ids=(plain[7],))
    result = await bench.generate(make_request(sampling=sampling))
    assert result.choices[0].completion_tokens == plain.index(plain[7]) + 1
    assert result.choices[0].finish_reason is FinishReason.STOP
    assert result.choices[0].stop_token_id == plain[7]


async def test_growth_that_is_late_twice_or_out_of_order_changes_no_token_and_is_counted(bench):
    bench.add_target(step_s=0.002)
    draft = bench.add_draft(accuracy=0.8, delay_s=0.0)
    chance, loop, sent = random.Random(0), asyncio.get_running_loop(), 0

    def deliver(growth: GrowthBatch) -> None:
        nonlocal sent
        for _ in range(chance.choice((1, 2))):
            sent += len(growth.node_ids)
            loop.call_later(chance.choice((0.0, 0.001, 0.02)), bench.scheduler.relay.take_growth, "draft", growth)

    draft.deliver = deliver
    await bench.generate_all(make_request(number, tokens=60) for number in range(1, 5))
    totals = bench.scheduler.totals
    assert totals.accepted_tokens > 0
    assert 0 < totals.dropped_nodes < sent


async def test_an_opening_says_how_its_session_is_verified(make_bench):
    bench = make_bench(sync_wait_cap_ms=30.0)
    target = bench.add_target(rests=True)
    bench.scheduler.weights.version = "v1"
    bench.submit(make_request(mode=SpeculationMode.SYNC))
    (session,) = target.sessions.values()
    limits = session.opening.limits
    assert (limits.mode, limits.sync_wait_ms) == (common_pb2.SPECULATION_MODE_SYNC, 30)
    assert session.opening.weights == "v1"


async def test_a_sync_session_is_not_starved_by_others(make_bench):
    bench = make_bench(sync_wait_cap_ms=30.0)
    bench.add_target(step_s=0.001)
    bench.add_draft(delay_s=1000.0)
    bench.begin(2, mode=SpeculationMode.OFF)
    async with asyncio.timeout(30):
        await bench.generate(make_request(mode=SpeculationMode.SYNC, tokens=6))


async def test_choices_on_two_targets_all_wake_when_the_reader_reads_on(make_bench):
    bench = make_bench(max_buffered_events=4)
    bench.limits.max_sessions = 1
    targets = [bench.add_target(name) for name in ("first", "second")]
    request = make_request(n=2)
    generation = bench.submit(request)
    await until(lambda: all(len(target.rounds) >= 2 for target in targets))
    # Until both have stopped; where they have not yet, the test asks less.
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30):
        events = [event async for event in generation]
    assert isinstance(events[-1], GenerationResult)
    assert [choice.completion_tokens for choice in events[-1].choices] == [40, 40]


async def test_a_draining_scheduler_takes_nothing_new(bench):
    bench.add_target()
    bench.scheduler.drain()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        bench.submit(make_request())


async def test_cancelling_frees_both_workers(bench):
    target = bench.add_target(step_s=0.005)
    draft = bench.add_draft()
    generation = bench.submit(make_request())
    await until(lambda: target.sessions)
    generation.cancel()
    await until(lambda: not target.sessions and not draft.sessions)
    bench.check_idle()
    assert not any(isinstance(event, GenerationResult) for event in [event async for event in generation])


async def test_a_full_queue_refuses_at_once(make_bench):
    bench = make_bench(max_queue=2, max_running_sessions=1)
    bench.add_target(step_s=0.01)
    running = [bench.submit(make_request(number)) for number in range(3)]
    with pytest.raises(Overloaded, match="queue of 2") as caught:
        bench.submit(make_request(9))
    assert caught.value.retry_after_s > 0
    for generation in running:
        generation.cancel()
    bench.check_idle()


async def test_the_queue_is_bounded_by_the_wait(make_bench):
    """Behind the target's 8 places, where runs take 8 steps, 0.4 s, four wait 0.2 s."""
    bench = make_bench(max_queue_wait_s=0.2)
    bench.add_target(step_s=0.05)
    await bench.generate(make_request(tokens=8))
    generations = []
    with pytest.raises(Overloaded):
        for number in range(100):
            generations.append(bench.submit(make_request(number, tokens=8)))
    assert 10 <= len(generations) <= 12
    for generation in generations:
        generation.cancel()
    bench.check_idle()


async def test_prompts_of_one_request_share_one_entry_of_a_full_queue(make_bench):
    bench = make_bench(max_queue=1, max_running_sessions=1)
    bench.add_target(step_s=0.01)
    own = [replace(make_request(number), queued_as="batch", client="a") for number in range(20)]
    running = [bench.submit(request) for request in own]
    with pytest.raises(Overloaded, match="queue of 1"):
        bench.scheduler.check_room()
    bench.scheduler.check_room(entry="batch")
    for generation in running:
        generation.cancel()
    bench.check_idle()


async def test_a_resumed_request_goes_on_after_what_was_received(bench):
    bench.add_target()
    whole = tuple(expected_output(make_request()))
    await bench.generate(make_request(received={0: whole[:11]}))
    result = await bench.generate(make_request(received={0: whole}))
    assert result.choices[0].finish_reason is FinishReason.LENGTH


async def test_trace_counts_growth_behind_a_result_to_the_next_round(bench):
    """It comes when a result has been taken, and before the client hears of it."""
    target = bench.add_target()
    bench.add_draft(delay_s=1000.0)
    request = make_request(trace=True, tokens=3)
    generation = bench.submit(request)
    growth, take = growth_of(generation.sessions[0], [5]), target.on_results

    def take_and_grow(results):
        take(results)
        if len(target.rounds) == 1:
            bench.grow("draft", growth)

    target.on_results = take_and_grow
    rounds = [event async for event in generation if isinstance(event, Round)]
    assert [len(record.growth) for record in rounds] == [0, 1, 0]


async def test_trace_tells_of_every_round_as_it_was(bench):
    target = bench.add_target(step_s=0.005)
    bench.add_draft(accuracy=0.5, delay_s=0.004)
    generation = bench.submit(make_request(trace=True))
    events = [event async for event in generation]
    rounds, result = [event for event in events if isinstance(event, Round)], events[-1]
    assert [list(record.emitted_token_ids) for record in rounds] == [done[1] for done in target.rounds]
    assert sum(record.accepted for record in rounds) == result.speculation.accepted_tokens > 0
    assert sum(record.selected for record in rounds) == result.speculation.drafted_tokens
    length = 3
    for record in rounds:
        assert record.length == length
        assert record.accepted <= len(record.emitted_token_ids)
        length += len(record.emitted_token_ids)
    assert length == 43
    assert [record.result_ns for record in rounds] == sorted({record.result_ns for record in rounds})
    arrived = [arrival for record in rounds for arrival in record.growth]
    assert {(arrival.worker_id, arrival.nodes) for arrival in arrived} == {("draft", 12)}
    assert all(3 <= arrival.as_of <= 43 for arrival in arrived)


async def test_a_choice_that_a_stop_string_ends_is_closed_at_its_workers_and_counts_no_further(bench):
    target = bench.add_target(step_s=0.002)
    draft = bench.add_draft(accuracy=1.0, delay_s=0.001)
    whole = expected_output(make_request())
    stop = next(char for char, token in ALPHABET.items() if token == whole[9])
    end = whole.index(whole[9]) + 1
    request = make_request(stop=(stop,), trace=True)
    generation = bench.submit(request, TextStream(TextTokenizer(byte_tokenizer()), stop=(stop,)))
    (session,) = generation.sessions
    events = [event async for event in generation]
    assert [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids] == whole[:end]
    result, rounds = events[-1], [event for event in events if isinstance(event, Round)]
    assert (result.choices[0].stop_string, result.choices[0].completion_tokens) == (stop, end)
    # The target had gone further in its last round: what lies behind the stop string is nobody's.
    assert sum(len(done[session.session_id]) for done in target.rounds) > end
    totals = bench.scheduler.totals
    assert totals.emitted_tokens == sum(len(record.emitted_token_ids) for record in rounds) == end
    assert totals.accepted_tokens == result.speculation.accepted_tokens == sum(record.accepted for record in rounds)
    assert [own for own, _ in target.closed] == [own for own, _ in draft.closed] == [session.session_id]
    assert not target.sessions


async def test_results_of_sessions_that_have_ended_are_nobodys(bench):
    """Results under way when a session was closed, and reports about epochs that have passed."""
    target = bench.add_target(step_s=0.002)
    told = []
    take, target.on_results = target.on_results, told.append
    generation = bench.submit(make_request())
    (session,) = generation.sessions
    await asyncio.sleep(0.003)
    (results,) = told
    (outcome,) = results.outcomes
    for stranger in ({"epoch": outcome.epoch + 1}, {"session_id": outcome.session_id + 1}):
        take(results_of([outcome._replace(**stranger)]))
    assert session.output_length == bench.scheduler.totals.emitted_tokens == 0
    generation.cancel()
    take(results)
    bench.scheduler.relay.take_results("nobody", results)
    assert session.output_length == bench.scheduler.totals.emitted_tokens == 0
    bench.check_idle()
