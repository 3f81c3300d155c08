"""A result is taken in the event loop's turn in which it is read: what goes wrong there, and what it leaves."""

import asyncio

import pytest
from tests.coordinator.fake_workers import make_request, tokens_read

from outrider.coordinator.sessions.messages import FaultKind
from outrider.errors import InvalidRequest


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
