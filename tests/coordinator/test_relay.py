"""Messages between drafts and targets: growth one way, its outcome the other."""

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.coordinator.fake_workers import (
    expected_output,
    growth_of,
    make_request,
    next_token,
    nodes_of,
    results_of,
    tokens_read,
)
from tests.polling import until

from outrider.coordinator.sessions.messages import FaultKind, Outcome
from outrider.coordinator.sessions.poison import LossKind
from outrider.coordinator.sessions.session import Session
from outrider.drafting.draft_distribution import WEIGHT_SUM, DraftDistribution, unpack_distributions
from outrider.drafting.growth_source import GrowthSource
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule
from outrider.wire import floats_from_bytes


def right(session: Session, count: int) -> list[int]:
    """Return the tokens that the target will choose next."""
    tokens = list(session.token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(session.token_ids) :]


async def test_one_message_of_growth_is_one_for_each_target(bench):
    bench.limits.max_sessions = 2
    targets = [bench.add_target(name) for name in ("first", "second")]
    for target in targets:
        target.runs.clear()
    bench.limits.max_sessions = 8
    bench.add_draft(delay_s=1000.0)
    sessions = [bench.begin(number) for number in range(4)]
    trees = [[5, 6], [7], [8, 9, 10], [11]]
    batch = [growth_of(session, tree) for session, tree in zip(sessions, trees, strict=True)]
    bench.grow("draft", *batch)
    for name, target in zip(("first", "second"), targets, strict=True):
        (growth,) = target.grown
        own = [number for number, session in enumerate(sessions) if session.target_id == name]
        assert len(own) == 2
        assert list(growth.session_ids) == [sessions[number].session_id for number in own]
        assert list(growth.epochs) == [sessions[number].target_epoch for number in own]
        assert list(growth.places) == [0, 0]
        assert list(growth.as_of) == [3, 3]
        assert list(growth.node_counts) == [len(trees[number]) for number in own]
        ids, parents, tokens = nodes_of(growth)
        assert tokens == [token for number in own for token in trees[number]]
        assert ids == [node for number in own for node in batch[number].node_ids]
        assert parents == [node for number in own for node in batch[number].parents]
        assert floats_from_bytes(growth.acceptance).tolist() == [0.5] * len(tokens)
        assert (list(growth.sources), list(growth.complete)) == ([], [])
        assert not growth.HasField("distributions")
    assert bench.scheduler.totals.dropped_nodes == 0


async def test_what_comes_with_nodes_is_relayed_with_them(bench):
    """Distributions and whether a tree is whole; of sessions that go on elsewhere, or no more, nothing."""
    target = bench.add_target(rests=True)
    bench.add_draft(delay_s=1000.0, sources=[1, 2])
    rejection = SamplingSpec(max_new_tokens=1000, temperature=1.0, verification=VerificationRule.REJECTION)
    ended, chain, sync = bench.begin(), bench.begin(sampling=rejection), bench.begin(mode=SpeculationMode.SYNC)
    drawn = [
        DraftDistribution(np.array([token], dtype=np.uint32), np.array([WEIGHT_SUM], dtype=np.uint32))
        for token in (8, 9)
    ]
    batch = (
        growth_of(ended, [5, 6]),
        growth_of(chain, [8, 9], distributions=drawn),
        growth_of(sync, [10, 11], complete=True),
    )
    ended.generation.cancel()
    bench.grow("draft", *batch)
    (growth,) = target.grown
    assert list(growth.session_ids) == [chain.session_id, sync.session_id]
    assert nodes_of(growth)[2] == [8, 9, 10, 11]
    assert list(growth.complete) == [False, True]
    told = unpack_distributions(growth.distributions, 4)
    assert [None if q is None else q.token_ids.tolist() for q in told] == [[8], [9], None, None]
    assert bench.scheduler.totals.dropped_nodes == 2


async def test_each_draft_hears_what_its_own_sessions_have_got(bench):
    bench.add_target(rests=True)
    drafts = {name: bench.add_draft(name, delay_s=1000.0) for name in ("one", "two")}
    sessions = [bench.begin(number) for number in range(5)]
    tokens = [[5, 6], [7], [], [8, 9, 10], [11]]
    outcomes = [
        Outcome(session.session_id, session.target_epoch, own, accepted=max(len(own) - 1, 0), selected=len(own),
                sources=[2] * (len(own) - 1))
        for session, own in zip(sessions, tokens, strict=True)
    ]  # fmt: skip
    # The last one says it of an opening that has passed.
    outcomes[-1] = outcomes[-1]._replace(epoch=outcomes[-1].epoch + 1)
    bench.scheduler.relay.take_results("target", results_of(outcomes))
    told = [own if session is not sessions[-1] else [] for session, own in zip(sessions, tokens, strict=True)]
    for name, draft in drafts.items():
        own = [number for number, session in enumerate(sessions) if name in session.draft_epochs]
        assert 2 <= len(own) <= 3
        for number in own:
            session = sessions[number]
            assert draft.sessions[session.session_id].tokens[session.prompt_length :] == told[number]
    assert [session.token_ids[session.prompt_length :] for session in sessions] == told


async def test_that_a_draft_has_nothing_to_say_is_told_where_it_ends_a_round(bench):
    target = bench.add_target(rests=True)
    bench.add_draft(delay_s=1000.0)
    session = bench.begin(mode=SpeculationMode.SYNC)
    bench.grow("draft", growth_of(session, []))
    assert not target.grown
    bench.grow("draft", growth_of(session, [], complete=True))
    (growth,) = target.grown
    assert (list(growth.node_counts), list(growth.complete)) == ([0], [True])


async def test_growth_that_is_nobodys_is_dropped_and_counted(bench):
    target = bench.add_target(rests=True)
    bench.add_draft(delay_s=1000.0)
    session = bench.begin()
    epoch, totals = session.draft_epochs["draft"], bench.scheduler.totals
    late: list[dict[str, Any]] = [{"epoch": epoch - 1}, {"epoch": epoch + 1}, {"session_id": 77}]
    for number, stranger in enumerate(late, start=1):
        bench.grow("draft", growth_of(session, [5, 6], **stranger))
        assert totals.dropped_nodes == 2 * number
    bench.grow("nobody", growth_of(session, [5, 6]))
    assert totals.dropped_nodes == 8
    # Of an epoch that has passed, since the draft had given the session up and was asked again.
    before = growth_of(session, [5, 6])
    bench.scheduler.drafts.remove("draft")
    bench.add_draft(delay_s=1000.0)
    assert session.draft_epochs["draft"] > epoch
    bench.grow("draft", before)
    assert totals.dropped_nodes == 10
    assert not target.grown
    bench.grow("draft", growth_of(session, [5, 6]))
    assert (totals.dropped_nodes, len(target.grown)) == (10, 1)
    # What a draft has grown for a session that has ended.
    after = growth_of(session, [5, 6])
    session.generation.cancel()
    bench.grow("draft", after)
    assert (totals.dropped_nodes, len(target.grown)) == (12, 1)
    assert totals.grown_nodes == 14


async def test_a_draft_that_has_forgotten_its_tree_takes_its_place_anew_before_what_it_grows(bench):
    target = bench.add_target(rests=True)
    bench.add_draft(delay_s=1000.0)
    session, other = bench.begin(1), bench.begin(2)
    bench.grow("draft", growth_of(session, [5, 6]))
    del target.told[:]
    bench.grow("draft", growth_of(session, [7], first=3, forgot=True), growth_of(other, [8]))
    assert target.told == ["TAKEN 1.0", "grow 1.0 1", "grow 2.0 1"]
    # It has nothing yet in the place of what it has forgotten.
    bench.grow("draft", growth_of(session, [], forgot=True))
    assert target.told[3:] == ["TAKEN 1.0"]


async def test_lost_growth_is_asked_for_once_until_it_comes(bench):
    target = bench.add_target(step_s=0.001)
    draft = bench.add_draft(delay_s=1000.0)
    session, other = bench.begin(1), bench.begin(2)
    target.loses_growth = True
    bench.grow("draft", growth_of(session, [5, 6]))
    # Every round says so, until the tree comes again.
    await asyncio.sleep(0.01)
    assert len(target.rounds) >= 8
    asked = [(session.session_id, session.draft_epochs["draft"])]
    assert draft.asked_again == asked
    target.loses_growth = False
    del target.told[:]
    # Growth that had left before is of no use, and does not count for the answer.
    bench.grow("draft", growth_of(session, [9], first=8), growth_of(other, [9]))
    await asyncio.sleep(0.01)
    assert draft.asked_again == asked
    guesses = right(session, 6)
    bench.grow("draft", growth_of(session, guesses, first=20, again=True))
    assert target.told == ["grow 1.0 1", "grow 2.0 1", "RESENT 1.0", "grow 1.0 6"]
    await asyncio.sleep(0.01)
    assert draft.asked_again == asked
    assert session.accepted_tokens > 0
    # It may be lost once more.
    target.loses_growth = True
    bench.grow("draft", growth_of(session, [5], first=40))
    await asyncio.sleep(0.01)
    assert draft.asked_again == 2 * asked


async def test_a_draft_forgets_all_its_trees_and_sends_each_again(bench):
    target = bench.add_target(rests=True)
    draft = bench.add_draft(delay_s=1000.0, sources=[1, 2])
    session = bench.begin()
    # Both use the same ids.
    for source in (GrowthSource.MODEL, GrowthSource.NGRAM):
        bench.grow("draft", growth_of(session, [5, 6], source=source))
    assert [(*growth.places, *nodes_of(growth)[0], *growth.sources) for growth in target.grown] == [
        (0, 1, 2), (1, 1, 2, 2, 2),
    ]  # fmt: skip
    counted = {own.source: own.drafted_tokens for own in bench.scheduler.totals.sources.counts()}
    assert counted == {GrowthSource.MODEL: 2, GrowthSource.NGRAM: 2}
    # One of its trees is lost: it is asked once, for all.
    for lost in (0b10, 0b11):
        outcome = Outcome(session_id=1, epoch=session.target_epoch, token_ids=(), lost=lost)
        bench.scheduler.relay.take_results("target", results_of([outcome]))
    assert draft.asked_again == [(1, session.draft_epochs["draft"])]
    del target.told[:]
    # It has forgotten before it sends what it has now.
    anew = growth_of(session, [7], first=3, forgot=True, again=True, source=GrowthSource.NGRAM)
    bench.grow("draft", anew)
    assert target.told == ["TAKEN 1.0", "TAKEN 1.1", "RESENT 1.1", "grow 1.1 1"]
    # The other one is still on its way.
    other = Outcome(session_id=1, epoch=session.target_epoch, token_ids=(), lost=0b01)
    bench.scheduler.relay.take_results("target", results_of([other]))
    assert len(draft.asked_again) == 1
    bench.grow("draft", growth_of(session, [7, 8], again=True))
    assert target.told[4:] == ["RESENT 1.0", "grow 1.0 2"]
    # Nothing of it has been grown anew.
    assert counted == {own.source: own.drafted_tokens for own in bench.scheduler.totals.sources.counts()}
    bench.scheduler.relay.take_results("target", results_of([outcome]))
    assert len(draft.asked_again) == 2


async def test_only_drafts_that_are_there_are_asked_for_what_was_lost(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(rests=True)
    drafts = [bench.add_draft(name, delay_s=1000.0) for name in ("first", "second")]
    session = bench.begin()
    lost = Outcome(session_id=session.session_id, epoch=session.target_epoch, token_ids=(), lost=(1 << 32) - 1)
    bench.scheduler.drafts.remove("first")
    bench.scheduler.relay.take_results("target", results_of([lost]))
    assert [len(draft.asked_again) for draft in drafts] == [0, 1]
    # Nothing is committed by it, and no round of the session has ended.
    assert (session.output_length, bench.scheduler.totals.verify_steps) == (0, 0)


async def test_a_session_whose_target_is_lost_is_opened_elsewhere_with_its_tokens_and_its_drafts_trees(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target("first", step_s=0.005)
    drafts = {name: bench.add_draft(name, accuracy=0.9, delay_s=0.001) for name in ("one", "two")}
    request = make_request(tokens=60)
    generation = bench.submit(request)
    (session,) = generation.sessions
    reading = asyncio.create_task(tokens_read(generation))
    await asyncio.sleep(0.022)
    committed, epoch = list(session.token_ids), session.target_epoch
    assert len(committed) > 7
    second = bench.add_target("second", step_s=0.005)
    late = growth_of(session, right(session, 3), draft="one", first=900)
    # Somebody has been asked for what the first target had lost, and it will not hear of that any more.
    bench.scheduler.relay.take_results("first", results_of([Outcome(session_id=1, epoch=epoch, token_ids=(), lost=1)]))
    bench.scheduler.remove_target("first", "gone", kind=LossKind.SILENT)
    assert session.target_epoch > epoch
    assert second.sessions[1].tokens == committed
    assert second.told == ["open 1", "TAKEN 1.0", "TAKEN 1.1"]
    assert {name: len(draft.asked_again) for name, draft in drafts.items()} == {"one": 2, "two": 1}
    assert drafts["one"].sessions[1].epoch == session.draft_epochs["one"]
    # Growth that was on its way goes to the new target.
    bench.grow("one", late)
    assert second.told[3:] == ["grow 1.0 3"]
    assert list(second.grown[0].epochs) == [session.target_epoch]
    await asyncio.sleep(0.004)
    assert {told for told in second.told if told.startswith("RESENT")} == {"RESENT 1.0", "RESENT 1.1"}
    # What the first one still says is nobody's.
    bench.scheduler.relay.take_results("first", results_of([Outcome(session_id=1, epoch=epoch, token_ids=[5, 6, 7])]))
    assert session.token_ids[: len(committed)] == committed
    tokens = await reading
    assert tokens == expected_output(request)
    # The very first of its rounds had the tree.
    assert len(second.rounds[0][1]) > 1


@pytest.mark.parametrize("kind", [FaultKind.LOST, FaultKind.NO_ROOM])
async def test_a_session_that_is_opened_anew_where_it_is_has_its_drafts_trees_too(bench, kind):
    target = bench.add_target(step_s=0.001)
    target.fault_kind = kind
    draft = bench.add_draft(accuracy=0.9, delay_s=0.001)
    session = bench.begin()
    await asyncio.sleep(0.01)
    target.fail_sessions.add(session.session_id)
    epoch = session.target_epoch
    await until(lambda: session.target_epoch != epoch)
    opened = target.told.index("open 1", 1)
    assert target.told[opened : opened + 2] == ["open 1", "TAKEN 1.0"]
    assert draft.asked_again[-1] == (1, session.draft_epochs["draft"])
    await asyncio.sleep(0.002)
    assert "RESENT 1.0" in target.told[opened:]
    # While it was nowhere, it was told nothing.
    assert not draft.closed


async def test_growth_while_a_session_has_no_target_is_dropped(make_bench):
    bench = make_bench(target_wait_s=10.0)
    bench.add_target("first", rests=True)
    draft = bench.add_draft(delay_s=1000.0)
    session = bench.begin()
    bench.scheduler.remove_target("first", "gone", kind=LossKind.SILENT)
    bench.grow("draft", growth_of(session, [5, 6], again=True))
    assert bench.scheduler.totals.dropped_nodes == 2
    second = bench.add_target("second")
    assert second.told == ["open 1", "TAKEN 1.0"]
    assert draft.asked_again == [(1, session.draft_epochs["draft"])]


async def test_a_client_that_does_not_read_holds_its_session_and_no_other(make_bench):
    bench = make_bench(max_buffered_events=4)
    target = bench.add_target(step_s=0.001)
    request = make_request(2)
    held, reading = (bench.submit(own) for own in (make_request(1), request))
    tokens = await tokens_read(reading)
    assert tokens == expected_output(request)
    assert target.bounds == [(1, 0, False)]
    rounds = sum(1 in done for done in target.rounds)
    assert 4 <= rounds <= 6
    # It goes on once its client has taken everything, and is held as often as it has to.
    request, events = make_request(1), aiter(held)
    tokens = list((await anext(events)).token_ids)
    assert target.bounds == [(1, 0, False)]
    tokens += (await anext(events)).token_ids
    assert target.bounds == [(1, 0, False), (1, (1 << 31) - 1, False)]
    assert tokens + await tokens_read(held) == expected_output(request)


async def test_a_session_that_is_held_rests_at_the_next_target_too(make_bench):
    bench = make_bench(max_buffered_events=2)
    bench.add_target("first", step_s=0.001)
    generation = bench.submit(make_request())
    await asyncio.sleep(0.01)
    second = bench.add_target("second", step_s=0.001)
    bench.scheduler.remove_target("first", "gone", kind=LossKind.SILENT)
    await asyncio.sleep(0.01)
    assert second.bounds == [(1, 0, False)]
    assert not second.rounds
    assert len(await tokens_read(generation)) == 40
