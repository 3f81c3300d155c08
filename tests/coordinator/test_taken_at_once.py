"""A result is taken in the event loop's turn in which it is read: what goes wrong there, and what it leaves."""

import asyncio

import pytest

from outrider.coordinator.messages import FaultKind
from outrider.coordinator.text_stream import TextStream
from outrider.errors import InvalidRequest
from outrider.sampling import SamplingSpec


@pytest.mark.parametrize("refused", [0, 1])
async def test_a_choice_that_ends_with_a_siblings_fault_leaves_no_tree(
    bench, make_request, expect_output, assert_idle, refused
):
    target = bench.add_target(step_s=0.002)
    bench.add_draft()
    sampling = SamplingSpec(max_new_tokens=100)
    other = asyncio.create_task(bench.generate(make_request(7, sampling=sampling)))
    generation = bench.scheduler.submit(make_request(1, n=2), [TextStream(None), TextStream(None)])
    rows, sessions = [session.row for session in generation.sessions], list(generation.sessions)
    await asyncio.sleep(0.02)
    target.fault_kind = FaultKind.REFUSED
    target.fail_sessions.add(sessions[refused].session_id)
    with pytest.raises(InvalidRequest):
        async for _ in generation:
            pass
    await asyncio.sleep(0.01)
    # Rows that nobody has been given since: nothing of them is in the forest.
    assert sessions[0].rows.root[rows].tolist() == [-1, -1]
    request = make_request(7, sampling=sampling)
    assert (await other)[0] == [expect_output(request.prompt_token_ids, sampling)]
    assert_idle(bench)


async def test_what_was_accepted_is_kept_where_telling_the_drafts_fails(bench, make_request, expect_output):
    """A defect: the target's loop ends of it, and the session goes on at another target, none of its tokens lost."""
    bench.add_target(step_s=0.002)
    draft = bench.add_draft()
    commit, told = draft.commit, 0

    def fail_once(commits):
        nonlocal told
        told += 1
        commit(commits)
        if told == 4:
            raise RuntimeError("a defect")

    draft.commit = fail_once
    request = make_request(sampling=SamplingSpec(max_new_tokens=60))
    generated = asyncio.create_task(bench.generate(request))
    await asyncio.sleep(0.001)
    bench.add_target("second", step_s=0.002)
    outputs, _ = await generated
    assert told > 4
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
