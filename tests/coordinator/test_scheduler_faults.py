"""The scheduler where targets and drafts are lost, full, silent or wrong."""

import asyncio

import pytest
from tests.coordinator.fake_workers import Everything, expected_output, make_request, results_of, tokens_read
from tests.polling import until

from outrider.coordinator.sessions.messages import FaultKind, Outcome, SessionFault
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.errors import InternalError, InvalidRequest, Overloaded, WorkerUnavailable
from outrider.v1 import common_pb2


async def test_the_last_target_lost_ends_requests_with_a_reason(bench):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(tokens=1000)))
    await until(lambda: len(target.rounds) > 5)
    target.is_lost = True
    with pytest.raises(WorkerUnavailable, match="target"):
        await task
    bench.check_idle()
    with pytest.raises(WorkerUnavailable, match="no target worker"):
        bench.submit(make_request())


async def test_the_wait_for_another_target_is_between_two_tokens(make_bench):
    """Whoever reads waits all that time, and the histogram has to say so."""
    bench = make_bench(target_wait_s=10.0)
    bench.add_target("first", step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(tokens=60)))
    totals = bench.scheduler.totals
    await until(lambda: totals.emitted_tokens > 5)
    bench.scheduler.remove_target("first", "gone")
    await asyncio.sleep(2.0)
    bench.add_target("second", step_s=0.001)
    await task
    between = totals.between_tokens
    assert sum(between.counts) == totals.verify_steps - 1
    assert 2e9 <= between.total < 2.5e9


async def test_a_session_lost_again_and_again_is_given_up(bench):
    target = bench.add_target(step_s=0.001)
    generation = bench.submit(make_request())
    target.fail_sessions = Everything()
    with pytest.raises(WorkerUnavailable, match="says no"):
        await tokens_read(generation)
    assert generation.sessions[0].result is None
    bench.check_idle()


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
async def test_text_that_cannot_be_made_ends_its_own_request_alone(bench, stop):
    bench.add_target()
    bench.add_draft()
    broken = bench.submit(make_request(1, stop=stop), BrokenText())
    other = asyncio.create_task(bench.generate(make_request(2)))
    tokens = []
    with pytest.raises(InternalError, match="request-1 cannot be turned into text: KeyError: 'no such piece'"):
        async for event in broken:
            tokens += event.token_ids
    assert tokens == expected_output(make_request())[: len(tokens)]
    await other
    bench.check_idle()


async def test_what_was_received_of_one_choice_and_has_no_text_leaves_none_of_the_others(bench):
    bench.add_target()
    received = expected_output(make_request())[:4]
    broken = BrokenText()
    broken.pushes = 4
    with pytest.raises(InternalError, match="cannot be turned into text"):
        bench.submit(make_request(n=2, received={0: received, 1: received}), TextStream(None), broken)
    assert not bench.scheduler.sessions
    bench.check_idle()


async def test_losses_far_apart_are_not_added_up(bench):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request(tokens=60)))
    for _ in range(5):
        # Tokens come between two losses.
        enough = bench.scheduler.totals.emitted_tokens + 3
        await until(lambda enough=enough: bench.scheduler.totals.emitted_tokens >= enough)
        target.fail_sessions.update(target.sessions)
    await task


async def test_what_never_fits_is_refused_in_the_end(bench):
    target = bench.add_target()
    target.fault_kind, target.fail_sessions = FaultKind.NO_ROOM, Everything()
    with pytest.raises(Overloaded, match="says no"):
        await bench.generate(make_request())
    bench.check_idle()


async def test_what_a_target_refuses_is_the_requests_fault(bench):
    target = bench.add_target()
    target.fault_kind, target.fail_sessions = FaultKind.REFUSED, Everything()
    with pytest.raises(InvalidRequest, match="says no"):
        await bench.generate(make_request())
    bench.check_idle()


async def test_a_draft_without_room_gets_a_session_once_it_has_places_again(bench):
    bench.add_target(rests=True)
    draft = bench.add_draft(delay_s=1000.0)
    first, second = (bench.submit(make_request(number)) for number in (1, 2))
    ((session,), full) = second.sessions, SessionFault(kind=FaultKind.NO_ROOM, message="full")
    load = common_pb2.WorkerLoad(coordinators=2, sessions=8)
    for _ in range(2):
        bench.scheduler.drafts.take_fault("draft", session.session_id, session.draft_epochs["draft"], full)
        # There is no room for others either, nor for this one while the worker is as full as it was.
        third = bench.submit(make_request(3))
        assert not third.sessions[0].draft_epochs
        third.cancel()
        assert not session.draft_epochs
        bench.scheduler.note_load("draft", load)
        assert set(session.draft_epochs) == {"draft"}
    bench.scheduler.drafts.take_fault("draft", session.session_id, session.draft_epochs["draft"], full)
    # A place of its own coordinator is free again.
    first.cancel()
    assert set(session.draft_epochs) == {"draft"}
    second.cancel()
    assert draft.sessions.keys() <= {first.sessions[0].session_id, session.session_id}


async def test_every_loss_of_the_target_gets_its_whole_wait(make_bench):
    """Two losses together last longer than one wait."""
    bench = make_bench(target_wait_s=0.2)
    target = bench.add_target("0", step_s=0.001)
    request = make_request(tokens=200)
    task = asyncio.create_task(bench.generate(request))
    for number in range(1, 4):
        await asyncio.sleep(0.01)
        target.is_lost = True
        await asyncio.sleep(0.13)
        target = bench.add_target(str(number), step_s=0.001)
    await task


async def test_a_silent_draft_is_not_waited_for(bench):
    target = bench.add_target(step_s=0.001)
    bench.add_draft(delay_s=1000.0)
    request, began_s = make_request(), asyncio.get_running_loop().time()
    await bench.generate(request)
    assert len(target.rounds) == 40
    assert asyncio.get_running_loop().time() - began_s < 0.05


async def test_a_session_that_waits_for_room_when_its_target_is_lost_asks_another_at_once(bench):
    first = bench.add_target("first")
    first.fault_kind, first.fail_sessions = FaultKind.NO_ROOM, Everything()
    request = make_request()
    generation = bench.submit(request)
    second = bench.add_target("second")
    await asyncio.sleep(0.01)
    assert first.rounds
    assert not first.sessions
    bench.scheduler.remove_target("first", "its lease is over")
    assert second.sessions
    assert await tokens_read(generation) == expected_output(request)


@pytest.mark.parametrize("target_wait_s", [0.0, 10.0])
async def test_what_a_lost_target_has_committed_is_delivered(make_bench, target_wait_s):
    """The target is lost in the very turn in which its result has been taken: clients have not heard of it."""
    bench = make_bench(target_wait_s=target_wait_s)
    target = bench.add_target()
    take = target.on_results

    def take_and_go(results):
        take(results)
        bench.scheduler.remove_target("target", "its lease is over")

    target.on_results = take_and_go
    request = make_request()
    reader = aiter(bench.submit(request))
    async with asyncio.timeout(30):
        delta = await anext(reader)
    assert delta.token_ids == expected_output(request)[:1]
    if not target_wait_s:
        with pytest.raises(WorkerUnavailable, match="last target"):
            await anext(reader)
    bench.scheduler.stop(WorkerUnavailable("the test is over"))


async def test_stopping_looks_for_no_one_to_take_the_places_over(make_bench):
    bench = make_bench(max_running_sessions=100, max_queue=100)
    bench.limits.max_sessions = 20
    target, draft = bench.add_target(step_s=10), bench.add_draft()
    generations = [bench.submit(make_request(number)) for number in range(1, 41)]
    opened = []
    target.open_session = draft.open_session = opened.append
    bench.scheduler.stop(WorkerUnavailable("stopping"))
    assert not opened
    for generation in generations:
        with pytest.raises(WorkerUnavailable, match="stopping"):
            await anext(aiter(generation))
    bench.check_idle()


async def test_a_session_that_its_target_ends_before_its_time_is_opened_anew(bench):
    target = bench.add_target(step_s=0.001)
    request = make_request()
    task = asyncio.create_task(bench.generate(request))
    await asyncio.sleep(0.01)
    ((session_id, session),) = target.sessions.items()
    await asyncio.sleep(0)
    del target.sessions[session_id]
    ended = Outcome(session_id=session_id, epoch=session.opening.epoch, token_ids=(), is_over=True)
    target.on_results(results_of([ended]))
    await task
    assert bench.scheduler.totals.reopened == 1


@pytest.mark.parametrize("fault", list(FaultKind))
async def test_a_fault_that_tells_of_an_epoch_that_has_passed_is_nobodys(bench, fault):
    target = bench.add_target(step_s=0.001)
    task = asyncio.create_task(bench.generate(make_request()))
    await asyncio.sleep(0.01)
    (session_id,) = target.sessions
    late = [(session_id, 99, SessionFault(kind=fault, message="late")), (77, 1, SessionFault(fault, "a stranger's"))]
    target.on_results(results_of([], faults=late))
    await task
    assert bench.scheduler.totals.reopened == 0


@pytest.mark.parametrize("refused", [0, 1])
async def test_a_choice_that_ends_with_a_siblings_fault_leaves_nothing(bench, refused):
    target = bench.add_target(step_s=0.002)
    draft = bench.add_draft()
    other = asyncio.create_task(bench.generate(make_request(7, tokens=100)))
    generation = bench.submit(make_request(1, n=2))
    ids = [session.session_id for session in generation.sessions]
    await asyncio.sleep(0.02)
    target.fault_kind = FaultKind.REFUSED
    target.fail_sessions.add(ids[refused])
    with pytest.raises(InvalidRequest):
        await tokens_read(generation)
    await asyncio.sleep(0.01)
    assert target.sessions.keys().isdisjoint(ids)
    assert draft.sessions.keys().isdisjoint(ids)
    await other
    bench.check_idle()


@pytest.mark.parametrize("tokens", [60, 4])
async def test_what_was_accepted_is_kept_where_telling_the_drafts_fails(bench, tokens):
    """A defect: the target's link ends of it, and the sessions go on at another target, none of their tokens lost.

    The shorter request has ended with the very round that goes wrong.
    """
    bench.add_target("first", step_s=0.002)
    draft = bench.add_draft(accuracy=0.0)
    commit, told = draft.commit, 0

    def fail_once(commits):
        nonlocal told
        told += 1
        commit(commits)
        if told == 4:
            raise RuntimeError("a defect")

    draft.commit = fail_once
    both = asyncio.create_task(bench.generate_all([make_request(1, tokens=60), make_request(2, tokens=tokens)]))
    await asyncio.sleep(0.001)
    bench.add_target("second", step_s=0.002)
    await both
    assert told > 4
    bench.check_idle()
