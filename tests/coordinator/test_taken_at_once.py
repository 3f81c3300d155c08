"""A result is taken in the event loop's turn in which it is read: what goes wrong there, and what it leaves."""

import asyncio

import pytest

from outrider.coordinator.sessions.messages import FaultKind
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.errors import InvalidRequest
from outrider.sampling import SamplingSpec


@pytest.mark.parametrize("refused", [0, 1])
async def test_a_choice_that_ends_with_a_siblings_fault_leaves_nothing(
    bench, make_request, expect_output, assert_idle, refused
):
    target = bench.add_target(step_s=0.002)
    draft = bench.add_draft()
    sampling = SamplingSpec(max_new_tokens=100)
    other = asyncio.create_task(bench.generate(make_request(7, sampling=sampling)))
    generation = bench.scheduler.submit(make_request(1, n=2), [TextStream(None), TextStream(None)])
    ids = [session.session_id for session in generation.sessions]
    await asyncio.sleep(0.02)
    target.fault_kind = FaultKind.REFUSED
    target.fail_sessions.add(ids[refused])
    with pytest.raises(InvalidRequest):
        async for _ in generation:
            pass
    await asyncio.sleep(0.01)
    assert target.sessions.keys().isdisjoint(ids)
    assert draft.sessions.keys().isdisjoint(ids)
    request = make_request(7, sampling=sampling)
    assert (await other)[0] == [expect_output(request.prompt_token_ids, sampling)]
    assert_idle(bench)


@pytest.mark.parametrize("tokens", [60, 4])
async def test_what_was_accepted_is_kept_where_telling_the_drafts_fails(
    bench, make_request, expect_output, assert_idle, tokens
):
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
    requests = [
        make_request(1, sampling=SamplingSpec(max_new_tokens=60)),
        make_request(2, sampling=SamplingSpec(max_new_tokens=tokens)),
    ]
    tasks = [asyncio.create_task(bench.generate(request)) for request in requests]
    await asyncio.sleep(0.001)
    bench.add_target("second", step_s=0.002)
    for request, (outputs, _) in zip(requests, await asyncio.gather(*tasks), strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert told > 4
    assert_idle(bench)
