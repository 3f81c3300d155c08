"""Both drafters behind one front: who grows for whom, ids, credit, faults of one of them, and when the model rests."""

import random
from collections.abc import Callable, Container
from typing import Any

import pytest
from tests.draft_worker.replica import Replica
from tests.draft_worker.session_growth import SessionGrowth, sessions_of
from tests.draft_worker.settling import settle
from tests.draft_worker.table_model import VOCAB, Bench, session_start

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.rounds.drafters import Drafters, shared_limits
from outrider.draft_worker.rounds.session import Key
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import CommitMismatch, InvalidRequest, OutOfSlots, Superseded
from outrider.kernels.pool.records import Verdict
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule

KEY = (7, 1)
MODEL, NGRAM, EAGLE = GrowthSource.MODEL, GrowthSource.NGRAM, GrowthSource.EAGLE
REJECTION = SamplingSpec(temperature=0.8, verification=VerificationRule.REJECTION, max_new_tokens=50)

Records = list[tuple[GrowthSource, SessionGrowth]]
Make = Callable[..., Drafters]


@pytest.fixture
def make(ngram: NgramDrafter) -> Make:
    def both(**options: Any) -> Drafters:
        return Drafters(Bench(**options).drafter, ngram)

    return both


def drive(drafters: Drafters, left_out: Container[Key] = ()) -> Records:
    """Everything until there is nothing to do, with its source."""
    records: Records = []
    for _ in range(300):
        growths = list(drafters.advance(left_out))
        records += [(growth.source, own) for growth in growths for own in sessions_of(growth)]
        if not growths:
            return records
    raise AssertionError("does not come to rest")


def sources_of(records: Records) -> dict[int, set[GrowthSource]]:
    found: dict[int, set[GrowthSource]] = {}
    for source, own in records:
        found.setdefault(own.session_id, set()).add(source)
    return found


def counts(drafters: Drafters) -> tuple[int, int, int]:
    assert drafters.ngram is not None
    return (
        drafters.num_sessions,
        0 if drafters.model is None else drafters.model.num_sessions,
        drafters.ngram.num_sessions,
    )


def test_both_grow_one_session_under_ids_of_their_own(make: Make):
    drafters = make()
    assert drafters.calibrations.keys() == {MODEL, NGRAM}
    drafters.open(session_start(prompt=[7, 3, 1, 4]))
    records = drive(drafters)
    assert records[0][0] is NGRAM
    assert records[0][1].tokens[:2] == [1, 5]
    drafters.commit(KEY, 1, 4, [1])
    later = drive(drafters)
    assert {own.as_of for _, own in later} == {5}
    assert sources_of(records) == sources_of(later) == {1: {MODEL, NGRAM}}
    ids = [(source, node) for source, own in records + later for node in own.node_ids]
    assert len(set(ids)) == len(ids) > 20
    # Of each drafter every parent is a node of its own.
    for source in (MODEL, NGRAM):
        known = {0}
        for found, own in records + later:
            if found is source:
                for node, parent in zip(own.node_ids, own.parents, strict=True):
                    assert parent in known
                    known.add(node)
    drafters.close(KEY, 1)
    drive(drafters)
    assert (counts(drafters), drafters.slots[0]) == ((0, 0, 0), 0)


def test_what_ngrams_match_leaves_before_the_model_computes(make: Make):
    drafters = make()
    drafters.open(session_start(prompt=[7, 3, 1, 4]))
    first = next(drafters.advance())
    assert (first.source, drafters.launches) == (NGRAM, 0)
    assert {source for source, _ in drive(drafters)} == {MODEL}


def test_a_session_grows_by_what_it_asks_for(make: Make):
    drafters = make()
    asked = {1: {MODEL}, 2: {NGRAM}, 3: {MODEL, NGRAM}, 4: {EAGLE}, 5: {NGRAM, EAGLE}}
    expected = {1: {MODEL}, 2: {NGRAM}, 3: {MODEL, NGRAM}, 5: {NGRAM}}
    for number, sources in asked.items():
        drafters.open(session_start(number, prompt=[7, 3, 1, 4], sources=sources))
    assert sources_of(drive(drafters)) == expected
    # One that nobody grows takes commits like the others.
    for number in asked:
        drafters.commit((7, number), 1, 4, [1])
    assert sources_of(drive(drafters)) == expected
    drafters.close_owned("owner")
    drive(drafters)
    assert (counts(drafters), drafters.slots[0]) == ((0, 0, 0), 0)


def test_a_worker_of_one_drafter_stays_silent_where_it_is_not_asked_for(ngram: NgramDrafter):
    for drafters, other in ((Drafters(Bench().drafter, None), NGRAM), (Drafters(None, ngram), MODEL)):
        drafters.open(session_start(prompt=[7, 3, 1, 4], sources={other}))
        assert drive(drafters) == []
        drafters.commit(KEY, 1, 4, [1])
        assert drive(drafters) == []
        drafters.close(KEY, 1)
        with pytest.raises(Superseded):
            drafters.commit(KEY, 1, 5, [1])


def test_of_a_chain_the_model_alone_grows(make: Make):
    drafters = make()
    drafters.open(session_start(1, prompt=[7, 3, 1, 4], sampling=REJECTION))
    drafters.open(session_start(2, prompt=[7, 3, 1, 4], sampling=REJECTION, sources={NGRAM}))
    records = drive(drafters)
    assert sources_of(records) == {1: {MODEL}, 2: {NGRAM}}
    assert [own.node_ids for source, own in records if source is NGRAM] == [[]]


def test_owners_have_their_own_sessions(make: Make):
    drafters = make()
    for number, owner in ((1, "one"), (2, "other"), (3, "one")):
        drafters.open(session_start(number, owner=owner))
    assert drafters.keys_of("one") == {(7, 1), (7, 3)}
    assert drafters.keys_of("nobody") == set()
    drafters.close_owned("one")
    assert (drafters.keys_of("one"), drafters.num_sessions) == (set(), 1)


def test_what_is_left_out_is_not_matched_and_what_is_held_not_computed(make: Make):
    drafters = make()
    for number in (1, 2):
        drafters.open(session_start(number, prompt=[7, 3, 1, 4]))
    drafters.hold(KEY, "unread", is_held=True)
    assert sources_of(drive(drafters, {KEY})) == {2: {MODEL, NGRAM}}
    drafters.commit(KEY, 1, 4, [1])
    drafters.hold(KEY, "unread", is_held=False)
    records = drive(drafters)
    assert sources_of(records) == {1: {MODEL, NGRAM}}
    # Nothing of what was known before.
    assert {own.as_of for _, own in records} == {5}


@pytest.mark.parametrize("credit", [6, 15, 64])
def test_together_they_hold_no_more_nodes_than_the_session_may(make: Make, credit: int):
    drafters = make()
    drafters.open(session_start(prompt=[7, 3, 1, 4], max_live_nodes=credit))
    nodes = {MODEL: 0, NGRAM: 0}
    for source, own in drive(drafters):
        nodes[source] += len(own.node_ids)
    of_ngram, of_model = shared_limits(credit)
    assert of_ngram + of_model == credit
    assert 0 < nodes[NGRAM] <= of_ngram
    assert of_model - 4 < nodes[MODEL] <= of_model


def test_what_one_drafter_refuses_is_open_nowhere(make: Make):
    drafters = make(num_slots=20, max_sessions=1)
    for refused in (session_start(prompt=[VOCAB], sources={NGRAM}), session_start(prompt=[VOCAB])):
        with pytest.raises(InvalidRequest):
            drafters.open(refused)
    drafters.open(session_start(1))
    with pytest.raises(OutOfSlots):
        # There is no row left, which may change: another worker may have one.
        drafters.open(session_start(2))
    assert counts(drafters) == (1, 1, 1)
    for position, token, error in ((3, VOCAB, InvalidRequest), (5, 1, CommitMismatch)):
        with pytest.raises(error):
            drafters.commit(KEY, 1, position, [token])
        assert counts(drafters) == (0, 0, 0)
        drafters.open(session_start(1))


def test_what_is_too_long_for_the_models_kv_is_refused_for_good(make: Make):
    drafters = make(num_slots=20, max_sessions=2)
    for sources in ({MODEL}, {MODEL, NGRAM}):
        with pytest.raises(InvalidRequest, match="21 given, 20 fit"):
            drafters.open(session_start(prompt=[7] * 21, sources=sources))
        drafters.open(session_start(prompt=[7] * 10, sources=sources))
        with pytest.raises(InvalidRequest, match="21 given, 20 fit"):
            drafters.commit(KEY, 1, 10, [2] * 11)
        assert counts(drafters) == (0, 0, 0)
    # By n-grams alone it is taken.
    drafters.open(session_start(prompt=[7] * 21, sources={NGRAM}))
    assert counts(drafters) == (1, 0, 1)


def test_epochs_hold_over_all_drafters(make: Make):
    drafters = make()
    drafters.open(session_start(epoch=3, sources={EAGLE}))
    for epoch in (1, 3):
        with pytest.raises(Superseded):
            drafters.open(session_start(epoch=epoch))
    drafters.open(session_start(epoch=4))
    drafters.open(session_start(epoch=5, sources={NGRAM}))
    assert counts(drafters) == (1, 0, 1)
    with pytest.raises(Superseded):
        drafters.commit(KEY, 4, 3, [1])
    drafters.close(KEY, 4)
    assert drafters.num_sessions == 1
    drafters.close(KEY, 5)
    assert counts(drafters) == (0, 0, 0)


def test_waking_reaches_every_drafter(make: Make):
    drafters, woken = make(), list[int]()
    drafters.set_wake(lambda: woken.append(1))
    for drafter in (drafters.model, drafters.ngram):
        assert drafter is not None
        drafter.wake()
    assert woken == [1, 1]


@pytest.fixture
def text(ngram: NgramDrafter) -> list[int]:
    """A text that the trie has seen, and has learned to trust."""
    text = [number * 5 % 23 for number in range(23)]
    ngram.trie.add(text)
    assert settle(ngram.trie)
    # Sessions that go along the text.
    for _ in range(39):
        ngram.open(session_start(99, prompt=text[:4]))
        ngram.match()
        ngram.commit((7, 99), text[4:])
        ngram.match()
        ngram.close((7, 99))
    return text


def test_the_model_rests_while_ngrams_are_expected_to_be_right(ngram: NgramDrafter, text: list[int]):
    bench = Bench()
    drafters = Drafters(bench.drafter, ngram)

    def computed() -> list[tuple[int, ...]]:
        bench.model.steps, found = [], bench.model.computed
        return found

    limits = {"max_live_nodes": 64, "max_depth": 10}
    drafters.open(session_start(prompt=text[:4], **limits))
    drive(drafters)
    assert ngram.leading == {KEY}
    # A prompt is computed all the same, and nothing after it.
    assert len(computed()) == 4
    drafters.commit(KEY, 1, 4, text[4:7])
    records = drive(drafters)
    assert [(source, own.as_of, own.complete) for source, own in records] == [(NGRAM, 7, True)]
    assert computed() == []
    # Others' growth does not stop for it.
    drafters.open(session_start(2, sources=[MODEL]))
    assert sources_of(drive(drafters)) == {2: {MODEL}}
    computed()
    # Elsewhere the trie knows nothing: the model computes what it has missed, and grows.
    drafters.commit(KEY, 1, 7, [23, 23])
    assert MODEL in sources_of(drive(drafters))[1]
    assert [len(context) for context in computed()[:5]] == [5, 6, 7, 8, 9]
    assert not ngram.leading
    # A new session of the same name is not taken for the old one.
    drafters.commit(KEY, 1, 9, text[:5])
    drive(drafters)
    assert ngram.leading == {KEY}
    computed()
    drafters.open(session_start(epoch=2, prompt=text[:4], **limits))
    drive(drafters)
    assert [len(context) for context in computed()] == [1, 2, 3, 4]
    drafters.open(session_start(epoch=3, prompt=[9, 9, 9]))
    assert MODEL in sources_of(drive(drafters))[1]


def test_a_sync_sessions_model_never_rests(make: Make, text: list[int]):
    drafters = make()
    drafters.open(session_start(prompt=text[:4], mode=SpeculationMode.SYNC, max_depth=4, sync_nodes=8))
    records = drive(drafters)
    assert {(source, own.complete) for source, own in records} == {(NGRAM, False), (MODEL, True)}


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_target_can_use_every_node(ngram: NgramDrafter, song: list[int], *, has_model: bool, seed: int):
    """Whatever is committed: every parent is known, nothing is sent twice by one drafter, credit holds."""
    drawn, credit, tokens = random.Random(seed), 30, [7, 3, 1, 4]
    drafters = Drafters(Bench().drafter if has_model else None, ngram)
    drafters.open(session_start(prompt=list(tokens), max_live_nodes=credit, max_depth=9))
    target, merged = Replica(tokens), 0
    for _ in range(12):
        for _ in range(drawn.randrange(1, 4)):
            for growth in drafters.advance():
                for own in sessions_of(growth):
                    verdicts = target.take(growth.source, own)
                    assert set(verdicts) <= {Verdict.APPENDED, Verdict.MERGED}
                    merged += verdicts.count(Verdict.MERGED)
        # Along the song, or anything; then some of it was proposed.
        place = song.index(tokens[-1]) + 1 if tokens[-1] in song else 0
        new = (song * 2)[place : place + drawn.randrange(1, 5)]
        if drawn.random() < 0.3:
            new[-1] = drawn.randrange(VOCAB)
        drafters.commit(KEY, 1, len(tokens), new)
        tokens += new
        target.commit(new)
        assert len(target.tree) <= credit
    # One drafter never grows a node twice; two may.
    assert (merged > 0) == has_model
