"""One tree from several drafts, and who gets how many of them."""

import asyncio
from dataclasses import replace

import pytest
from tests.coordinator.fake_workers import ENDLESS, growth_of, make_request, results_of

from outrider.coordinator.sessions.messages import FaultKind, Outcome, SessionFault
from outrider.coordinator.sessions.session import PLACES
from outrider.drafting.growth_source import GrowthSource, to_proto
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule
from outrider.v1 import common_pb2, registry_pb2, target_pb2
from outrider.v1.generation_pb2 import SourceStats

MODEL, NGRAM, EAGLE = GrowthSource
REFUSED = SessionFault(kind=FaultKind.REFUSED, message="no")
REJECTION = SamplingSpec(temperature=1.0, max_new_tokens=100_000, verification=VerificationRule.REJECTION)


def room_for(count: int) -> registry_pb2.WorkerLimits:
    return registry_pb2.WorkerLimits(max_sessions=count)


def held(*drafts) -> list[int]:
    return [len(draft.sessions) for draft in drafts]


@pytest.mark.parametrize(
    ("changes", "drafts"),
    [
        ({}, 2),
        ({"sampling": replace(ENDLESS, temperature=1.0)}, 2),
        ({"mode": SpeculationMode.SYNC}, 1),
        ({"mode": SpeculationMode.OFF}, 0),
        ({"sampling": REJECTION}, 1),
    ],
)
async def test_fixed_trees_and_chains_have_one_draft(make_bench, changes, drafts):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(step_s=0.01)
    workers = [bench.add_draft(name, delay_s=1000.0) for name in ("first", "second", "third")]
    session = bench.begin(**changes)
    assert sum(held(*workers)) == drafts
    session.generation.cancel()
    assert held(*workers) == [0, 0, 0]


async def test_a_session_without_a_draft_takes_a_second_place_of_another(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(step_s=0.01)
    bench.limits = room_for(2)
    drafts = [bench.add_draft(name, delay_s=1000.0) for name in ("first", "second")]
    sessions = [bench.begin(number) for number in (1, 2)]
    assert held(*drafts) == [2, 2]
    sessions += [bench.begin(number) for number in (3, 4)]
    # Everybody has one, nobody two, and the drafts were told.
    assert held(*drafts) == [2, 2]
    assert all(len(session.draft_epochs) == 1 for session in sessions)
    sessions += [bench.begin(5)]
    assert not sessions[4].draft_epochs
    for session in sessions[:3]:
        session.generation.cancel()
    # The places that are free again: first for who has none, then for second drafts.
    assert held(*drafts) == [2, 2]
    for session in sessions[3:]:
        assert len(session.draft_epochs) == 2
        session.generation.cancel()


async def test_a_new_draft_goes_to_who_has_none(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(step_s=0.01)
    bench.limits = room_for(1)
    first = bench.add_draft("first", delay_s=1000.0)
    one, two = (bench.begin(number) for number in (1, 2))
    second = bench.add_draft("second", delay_s=1000.0)
    assert [set(session.draft_epochs) for session in (one, two)] == [{"first"}, {"second"}]
    assert not first.closed and not second.closed


async def test_who_wants_no_draft_or_was_refused_keeps_nobody_from_one(bench):
    bench.add_target(step_s=0.01)
    bench.limits = room_for(2)
    bench.add_draft("first", delay_s=1000.0)
    off = bench.begin(1, mode=SpeculationMode.OFF)
    session, second, *others = (bench.begin(number) for number in (2, 3, 4, 5))
    bench.scheduler.drafts.take_fault("first", session.session_id, session.draft_epochs["first"], REFUSED)
    second.generation.cancel()
    assert [len(own.draft_epochs) for own in (off, session, *others)] == [0, 0, 1, 1]


async def test_who_loses_one_of_two_drafts_keeps_the_other(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(step_s=0.01)
    drafts = []
    for name, room in (("first", 2), ("second", 1)):
        bench.limits = room_for(room)
        drafts.append(bench.add_draft(name, delay_s=1000.0))
        if name == "first":
            modes = (SpeculationMode.SYNC, SpeculationMode.ASYNC)
            one, two = (bench.begin(mode=mode) for mode in modes)
    assert held(*drafts) == [2, 1]
    bench.scheduler.drafts.remove("first")
    assert not one.draft_epochs
    assert set(two.draft_epochs) == {"second"}
    assert not drafts[1].closed


async def test_one_of_two_drafts_may_go_or_fall_silent(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(step_s=0.001)
    bench.add_draft("good", accuracy=1.0, delay_s=0.0)
    bench.add_draft("silent", delay_s=1000.0)
    bench.add_draft("lost", accuracy=0.9)
    task = asyncio.create_task(bench.generate(make_request(tokens=200)))
    await asyncio.sleep(0.02)
    bench.scheduler.drafts.remove("lost")
    result = await task
    # The one that speaks is heard, whoever else was asked.
    assert result.speculation.acceptance_length > 1.5


async def test_a_session_has_a_draft_of_each_source_that_it_asks_for(bench):
    bench.add_target(step_s=0.01)
    drafts = {"model": [MODEL], "trie": [NGRAM], "another": [MODEL], "both": [MODEL, NGRAM]}
    for name in ("model", "trie", "another"):
        bench.add_draft(name, delay_s=1000.0, sources=drafts[name])

    def placed(**changes) -> set[str]:
        session = bench.begin(**changes)
        found = set(session.draft_epochs)
        session.generation.cancel()
        return found

    assert placed() == {"model", "trie"}
    assert placed(sources=frozenset({NGRAM})) == {"trie"}
    assert placed(sources=frozenset({MODEL})) == {"model"}
    # Its target may; no draft does, and it goes on without.
    assert placed(sources=frozenset({EAGLE})) == set()
    assert placed(sources=frozenset({EAGLE, NGRAM})) == {"trie"}
    assert placed(mode=SpeculationMode.SYNC) == {"model"}
    assert placed(mode=SpeculationMode.SYNC, sources=frozenset({NGRAM})) == {"trie"}
    for name in ("model", "another"):
        bench.scheduler.drafts.remove(name)
    assert placed() == {"trie"}
    # One that has both is enough, and the trie has had its session.
    bench.scheduler.drafts.remove("trie")
    bench.add_draft("both", delay_s=1000.0, sources=drafts["both"])
    assert placed() == {"both"}


async def test_a_chain_waits_for_a_model_and_keeps_nobody_from_a_trie(bench):
    bench.add_target(step_s=0.01)
    chain, other = bench.begin(1, sampling=REJECTION), bench.begin(2)

    def placed() -> list[set[str]]:
        return [set(session.draft_epochs) for session in (chain, other)]

    bench.add_draft("trie", delay_s=1000.0, sources=[NGRAM])
    assert placed() == [set(), {"trie"}]
    bench.add_draft("model", delay_s=1000.0, sources=[MODEL])
    assert placed() == [{"model"}, {"trie", "model"}]


async def test_who_listens_to_its_target_alone_keeps_nobody_from_a_draft(bench):
    bench.add_target(step_s=0.01)
    own, all_sources = bench.begin(1, sources=frozenset({EAGLE})), bench.begin(2)
    assert bench.scheduler.drafts.speculating() == (1, 1)
    bench.add_draft("late", delay_s=1000.0)
    assert (set(own.draft_epochs), set(all_sources.draft_epochs)) == (set(), {"late"})
    assert bench.scheduler.drafts.speculating() == (1, 0)


async def test_who_listens_to_tries_alone_lacks_no_model(bench):
    bench.add_target(step_s=0.01)
    bench.begin(1, sources=frozenset({NGRAM}))
    bench.begin(2)
    # Only one of the two would have a further model.
    assert bench.scheduler.drafts.speculating() == (1, 1)
    bench.add_draft("model", delay_s=1000.0, sources=[MODEL])
    assert bench.scheduler.drafts.speculating() == (1, 0)
    bench.add_draft("trie", delay_s=1000.0, sources=[NGRAM])
    assert bench.scheduler.drafts.speculating() == (2, 0)
    bench.scheduler.drafts.remove("model")
    assert bench.scheduler.drafts.speculating() == (2, 0)


async def test_drafts_hear_what_was_asked_for_and_look_further_than_one_tree(bench):
    bench.add_target(step_s=0.01)
    opened = {}
    for name, sources in (("model", [MODEL]), ("trie", [NGRAM])):
        draft = bench.add_draft(name, delay_s=1000.0, sources=sources)
        draft.open_session = lambda opening, name=name: opened.setdefault(name, opening)
    sources = frozenset({MODEL, NGRAM})
    for mode, depths in ((SpeculationMode.ASYNC, {"model": 10, "trie": 10}), (SpeculationMode.SYNC, {"model": 4})):
        opened.clear()
        session = bench.begin(max_depth=4, sources=sources, mode=mode)
        assert {name: opening.limits.max_depth for name, opening in opened.items()} == depths
        # Each is asked for what it has, and gets the credit of its places.
        asked = {"model": {MODEL}, "trie": {NGRAM}}
        assert {name: set(opening.sources) for name, opening in opened.items()} == {
            name: asked[name] for name in opened
        }
        assert {opening.limits.max_live_nodes for opening in opened.values()} == {128}
        session.generation.cancel()


async def test_sources_are_counted_for_the_request_and_for_the_server(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft("model", accuracy=0.9, delay_s=0.0005)
    bench.add_draft("trie", accuracy=0.9, delay_s=0.0005, sources=[NGRAM])
    result = await bench.generate(make_request(tokens=120))
    counted = {own.source: own for own in result.speculation.sources}
    assert set(counted) == {MODEL, NGRAM}
    for own in counted.values():
        assert own.drafted_tokens >= own.accepted_tokens > 0
        assert own.drafted_tokens >= own.submitted_tokens >= own.accepted_tokens
        assert own.accepted_tokens <= result.speculation.accepted_tokens
    assert sum(own.accepted_tokens for own in counted.values()) >= result.speculation.accepted_tokens
    assert bench.scheduler.totals.sources.counts() == list(result.speculation.sources)


async def test_what_a_source_is_credited_with_never_goes_down(bench):
    """Whoever reads counters takes less than before for a new start."""
    bench.add_target(step_s=0.001)
    bench.add_draft("model", accuracy=0.6, delay_s=0.002)
    bench.add_draft("trie", accuracy=0.9, delay_s=0.0005, sources=[NGRAM])
    task = asyncio.create_task(bench.generate(make_request(tokens=300)))
    last: dict[int, tuple[int, ...]] = {}
    while not task.done():
        for own in bench.scheduler.totals.sources.counts():
            counts = (own.drafted_tokens, own.submitted_tokens, own.accepted_tokens)
            assert all(now >= before for now, before in zip(counts, last.get(own.source, counts), strict=True))
            last[own.source] = counts
        await asyncio.sleep(0.0001)
    assert set(last) == {MODEL, NGRAM}
    assert task.result()


async def test_a_draft_that_comes_back_to_a_session_begins_anew(make_bench):
    bench = make_bench(drafts_per_session=2)
    target = bench.add_target(rests=True)
    bench.limits = room_for(1)
    for name in ("first", "second"):
        bench.add_draft(name, delay_s=1000.0)
    session = bench.begin()
    other = bench.begin(2)
    (lost,) = other.draft_epochs
    (kept,) = session.draft_epochs
    other.generation.cancel()
    assert set(session.draft_epochs) == {"first", "second"}
    taken, left = target_pb2.PLACE_CHANGE_TAKEN, target_pb2.PLACE_CHANGE_LEFT
    (place,) = session.places_of(lost)
    assert session.places_of(kept) == [1 - place]
    told = [(at, change) for session_id, at, change in target.changes if session_id == session.session_id]
    assert told == [(0, taken), (1, taken), (place, left), (place, taken)]


async def test_every_draft_hears_of_every_commit_under_its_own_epoch(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(step_s=0.001)
    drafts = {name: bench.add_draft(name, delay_s=1000.0) for name in ("first", "second")}
    session = bench.begin()
    await asyncio.sleep(0.01)
    assert len(session.token_ids) > 8
    for name, draft in drafts.items():
        heard = draft.sessions[session.session_id]
        assert (heard.epoch, heard.tokens) == (session.draft_epochs[name], session.token_ids)
        assert draft.commits == session.verify_steps
    assert len(set(session.draft_epochs.values())) == 2


async def test_what_was_verified_is_counted_for_the_source_that_alone_has_grown(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft("trie", accuracy=0.9, delay_s=0.0005, sources=[NGRAM])
    result = await bench.generate(make_request(tokens=60))
    (own,) = result.speculation.sources
    assert own.source == NGRAM
    assert own.drafted_tokens > own.submitted_tokens > own.accepted_tokens > 0
    assert (own.submitted_tokens, own.accepted_tokens) == (
        result.speculation.drafted_tokens,
        result.speculation.accepted_tokens,
    )


async def test_what_a_drafter_in_the_target_grows_is_counted_as_what_a_workers_drafter_sends(bench):
    bench.add_target(rests=True)
    session = bench.begin()
    ids = {"session_id": session.session_id, "epoch": session.target_epoch}
    rounds = (
        Outcome(token_ids=[5], grown_by_source=(0, 0, 4), **ids),
        Outcome(
            token_ids=[6, 7], accepted=1, selected=3, selected_by_source=(0, 0, 3), grown_by_source=(0, 0, 2),
            sources=[1 << EAGLE], **ids,
        ),
    )  # fmt: skip
    for outcome in rounds:
        bench.scheduler.relay.take_results("target", results_of([outcome]))
    assert bench.scheduler.totals.sources.counts() == [
        SourceStats(source=to_proto(EAGLE), drafted_tokens=6, submitted_tokens=3, accepted_tokens=1)
    ]


async def test_each_source_of_a_draft_has_a_place_of_its_own(bench):
    target = bench.add_target(rests=True)
    draft = bench.add_draft("both", delay_s=1000.0, sources=[MODEL, NGRAM])
    opened = list[common_pb2.SessionOpen]()
    open_session = draft.open_session
    draft.open_session = lambda opening: (opened.append(opening), open_session(opening))
    every = bench.begin(1)
    bench.begin(2, sampling=REJECTION)
    assert target.told == ["open 1", "TAKEN 1.0", "TAKEN 1.1", "open 2", "TAKEN 2.0"]
    assert [set(opening.sources) for opening in opened] == [{MODEL, NGRAM}, {MODEL}]
    # Together they fill the target's pool, and no more.
    assert [opening.limits.max_live_nodes for opening in opened] == [256, 256]
    bench.scheduler.drafts.remove("both")
    assert target.told[5:] == ["LEFT 1.0", "LEFT 1.1", "LEFT 2.0"]
    assert every.places == [None] * PLACES


async def test_a_draft_grows_by_no_more_sources_than_there_are_places(make_bench):
    bench = make_bench(drafts_per_session=4)
    target = bench.add_target(rests=True)
    for name, sources in (("one", [MODEL]), ("two", [MODEL, NGRAM]), ("three", [MODEL, NGRAM])):
        bench.add_draft(name, delay_s=1000.0, sources=sources)
    session = bench.begin()
    placed = [(drafter.worker_id, drafter.source) for drafter in session.places if drafter is not None]
    assert placed == [("one", MODEL), ("two", MODEL), ("two", NGRAM), ("three", MODEL)]
    # Nobody asked it for this.
    bench.grow("three", growth_of(session, [5], draft="three", source=NGRAM))
    assert (bench.scheduler.totals.dropped_nodes, target.grown) == (1, [])
    bench.grow("two", growth_of(session, [5], draft="two", source=NGRAM))
    assert [list(growth.places) for growth in target.grown] == [[2]]


async def test_where_the_model_refuses_a_session_its_ngrams_go_on_and_another_model_takes_the_place(bench):
    target = bench.add_target(rests=True)
    both = bench.add_draft("both", delay_s=1000.0, sources=[MODEL, NGRAM])
    session = bench.begin()
    bench.scheduler.drafts.take_fault("both", session.session_id, session.draft_epochs["both"], REFUSED)
    assert both.sessions[session.session_id].sources == [NGRAM]
    assert session.places == [("both", NGRAM), None, None, None]
    assert target.changes == [
        (1, 0, target_pb2.PLACE_CHANGE_TAKEN),
        (1, 1, target_pb2.PLACE_CHANGE_TAKEN),
        (1, 0, target_pb2.PLACE_CHANGE_LEFT),
        (1, 1, target_pb2.PLACE_CHANGE_LEFT),
        (1, 0, target_pb2.PLACE_CHANGE_TAKEN),
    ]
    model = bench.add_draft("model", delay_s=1000.0, sources=[MODEL])
    assert model.sessions[session.session_id].sources == [MODEL]
    # It refuses whatever it is asked for: it is not asked for that again.
    for name in ("model", "both"):
        bench.scheduler.drafts.take_fault(name, session.session_id, session.draft_epochs[name], REFUSED)
    assert session.places == [None] * PLACES
    assert held(both, model) == [1, 1]


async def test_nobody_loses_its_only_trie_with_a_second_model(make_bench):
    bench = make_bench(drafts_per_session=2)
    bench.add_target(rests=True)
    for name, sources in (("both", [MODEL, NGRAM]), ("model", [MODEL])):
        bench.limits = room_for(1)
        bench.add_draft(name, delay_s=1000.0, sources=sources)
    first, second = (bench.begin(number) for number in (1, 2))
    # The second takes the first one's second model, which is not beside its trie.
    assert [set(session.draft_epochs) for session in (first, second)] == [{"both"}, {"model"}]
