"""Several sources in one worker: who grows for whom, ids, credit, and faults of one of them."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.ngram_growth import NgramGrowth, NgramGrowthConfig
from outrider.draft_worker.ngram_source import NgramSource
from outrider.draft_worker.ngram_tree import NgramConfig
from outrider.draft_worker.ngram_trie import NgramTrie
from outrider.draft_worker.session import GrowthLimits, GrowthMode
from outrider.draft_worker.session_checks import CommitMismatch
from outrider.draft_worker.sourced_growth import SourcedGrowth
from outrider.errors import InvalidRequest, OutOfSlots, Superseded
from outrider.growth_source import GrowthSource
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]
KEY = (7, 1)
SONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
MODEL, NGRAM, EAGLE = GrowthSource.MODEL, GrowthSource.NGRAM, GrowthSource.EAGLE


@pytest.fixture
def ngram() -> Iterator[NgramGrowth]:
    source = NgramSource(NgramTrie(capacity=5000, max_trie_depth=6), NgramConfig(), patience_s=60)
    source.start()
    source.add(SONG)
    assert source.settle()
    yield NgramGrowth(source, NgramGrowthConfig(vocab_size=24, max_model_len=200))
    source.stop()
    assert source.join(30)


def drive(
    growth: SourcedGrowth, steps: int = 200, *, left_out: Container[tuple[int, int]] = ()
) -> list[tuple[GrowthSource, Any]]:
    """Every record until there is nothing to do, with its source, as the thread would hand them out."""
    records = []
    for _ in range(steps):
        matched = growth.match(left_out)
        begun = growth.begin(left_out)
        for step in (matched, growth.finish() if begun else None):
            if step is not None:
                records += [(step.source, record) for record in step.growths]
        if matched is None and not begun:
            return records
    raise AssertionError("does not come to rest")


def test_both_grow_one_session_from_one_counter_of_ids(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    assert growth.sources == {MODEL, NGRAM}
    growth.open(make_start(prompt=[7, 3, 1, 4]))
    records = drive(growth)
    assert {source for source, _ in records} == {MODEL, NGRAM}
    # What was said before leaves first.
    assert records[0][0] is NGRAM
    assert records[0][1].tokens[:2] == [1, 5]
    ids = [node for _, record in records for node in record.node_ids]
    assert len(set(ids)) == len(ids) > 12
    assert all(record.as_of == 4 and not record.complete for _, record in records)
    growth.commit(KEY, 1, 4, [1])
    later = drive(growth)
    assert {record.as_of for _, record in later} == {5}
    assert {source for source, _ in later} == {MODEL, NGRAM}
    assert not {node for _, record in later for node in record.node_ids} & set(ids)
    growth.close(KEY, 1)
    assert (growth.num_sessions, model.num_sessions, ngram.num_sessions, growth.slots.used) == (0, 0, 0, 0)


def test_a_session_grows_by_what_it_asks_for(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    asked = {1: {MODEL}, 2: {NGRAM}, 3: {MODEL, NGRAM}, 4: {EAGLE}, 5: {NGRAM, EAGLE}}
    for number, sources in asked.items():
        growth.open(make_start(number, prompt=[7, 3, 1, 4], sources=sources))
    # All but the first and the fourth have fed the trie.
    assert ngram.source.settle()
    assert ngram.source.counts.inserted_tokens == len(SONG) + 3 * 4
    seen: dict[int, set[GrowthSource]] = {}
    for source, record in drive(growth):
        seen.setdefault(record.session_id, set()).add(source)
    assert seen == {1: {MODEL}, 2: {NGRAM}, 3: {MODEL, NGRAM}, 5: {NGRAM}}
    # One that nobody grows takes commits like the others.
    for number in asked:
        growth.commit((7, number), 1, 4, [1])
    assert {record.session_id for _, record in drive(growth)} == {1, 2, 3, 5}
    growth.close_owned("owner")
    assert (growth.num_sessions, growth.slots.used) == (0, 0)


def test_sessions_of_one_owner_rest_by_every_source(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    for number, owner in ((1, "unread"), (2, "read"), (3, "unread")):
        growth.open(make_start(number, owner=owner, prompt=[7, 3, 1, 4]))
    resting = growth.keys_of("unread")
    assert resting == model.keys_of("unread") == ngram.keys_of("unread") == {(7, 1), (7, 3)}
    assert growth.keys_of("nobody") == set()
    for length, token in ((4, 1), (5, 5)):
        assert {record.session_id for _, record in drive(growth, left_out=resting)} == {2}
        for number in (1, 2, 3):
            growth.commit((7, number), 1, length, [token])
    records = [(source, record) for source, record in drive(growth) if record.session_id != 2]
    # Both go on, with nothing of what they knew before.
    assert {(source, record.session_id) for source, record in records} == {
        (source, number) for source in (MODEL, NGRAM) for number in (1, 3)
    }
    assert {record.as_of for _, record in records} == {6}


def test_a_worker_of_one_source_stays_silent_where_it_is_not_asked_for(
    make_growth: Make, ngram: NgramGrowth, make_start: Make
):
    model, _ = make_growth()
    for growth, other in ((SourcedGrowth(model, None), NGRAM), (SourcedGrowth(None, ngram), MODEL)):
        growth.open(make_start(prompt=[7, 3, 1, 4], sources={other}))
        assert drive(growth) == []
        growth.commit(KEY, 1, 4, [1])
        assert drive(growth) == []
        growth.close(KEY, 1)
        with pytest.raises(Superseded):
            growth.commit(KEY, 1, 5, [1])


def test_together_they_hold_no_more_nodes_than_the_session_may(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    growth.open(make_start(prompt=[7, 3, 1, 4], limits=GrowthLimits(max_live_nodes=15)))
    drive(growth)
    of_model, of_ngram = model.session(KEY), ngram.session(KEY)
    assert of_model is not None
    assert of_ngram is not None
    assert of_ngram.tree.size == 5
    assert 5 < of_model.tree.size <= 10


def test_what_one_source_refuses_is_open_nowhere(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth(runner={"num_slots": 20, "max_rows": 1, "max_row_len": 300})
    growth = SourcedGrowth(model, ngram)
    for refused in (make_start(prompt=[24], sources={NGRAM}), make_start(prompt=[24])):
        with pytest.raises(InvalidRequest):
            growth.open(refused)
    growth.open(make_start(1, prompt=[1, 2, 3]))
    with pytest.raises(OutOfSlots):
        # There is no row left, which may change: another worker may have one.
        growth.open(make_start(2, prompt=[1, 2, 3]))
    assert (growth.num_sessions, model.num_sessions, ngram.num_sessions) == (1, 1, 1)
    with pytest.raises(InvalidRequest):
        growth.commit(KEY, 1, 3, [24])
    assert (growth.num_sessions, model.num_sessions, ngram.num_sessions) == (0, 0, 0)
    growth.open(make_start(prompt=[1, 2, 3]))
    with pytest.raises(CommitMismatch):
        growth.commit(KEY, 1, 5, [1])
    assert (growth.num_sessions, model.num_sessions, ngram.num_sessions) == (0, 0, 0)


def test_what_is_too_long_for_the_models_kv_goes_on_by_ngrams(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth(runner={"num_slots": 20, "max_rows": 2, "max_row_len": 300})
    growth = SourcedGrowth(model, ngram)
    growth.open(make_start(1, prompt=[7] * 21))
    growth.open(make_start(2, prompt=[7] * 10))
    assert model.session((7, 1)) is None
    drive(growth)
    growth.commit((7, 2), 1, 10, [2] * 11)
    assert (growth.num_sessions, model.num_sessions, ngram.num_sessions) == (2, 0, 2)
    growth.commit((7, 1), 1, 21, [3, 1, 4])
    growth.commit((7, 2), 1, 21, [22])
    records = {record.session_id: (source, record) for source, record in drive(growth)}
    assert {source for source, _ in records.values()} == {NGRAM}
    assert records[1][1].tokens[:2] == [1, 5]
    # Nobody else answers: it is said that there is nothing.
    assert (records[2][1].as_of, records[2][1].tokens) == (22, [])
    with pytest.raises(CommitMismatch):
        growth.commit((7, 2), 1, 30, [1])
    growth.close((7, 1), 1)
    assert (growth.num_sessions, ngram.num_sessions, growth.slots.used) == (0, 0, 0)
    alone = SourcedGrowth(model, ngram)
    for sources in ({MODEL}, {MODEL, EAGLE}):
        with pytest.raises(OutOfSlots):
            alone.open(make_start(prompt=[7] * 21, sources=sources))
        alone.open(make_start(prompt=[1, 2, 3], sources=sources))
        with pytest.raises(OutOfSlots):
            alone.commit(KEY, 1, 3, [1] * 20)
    assert (alone.num_sessions, model.num_sessions) == (0, 0)


def test_epochs_hold_over_all_sources(make_growth: Make, ngram: NgramGrowth, make_start: Make):
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    growth.open(make_start(epoch=3, sources={EAGLE}))
    for epoch in (1, 3):
        with pytest.raises(Superseded):
            growth.open(make_start(epoch=epoch))
    growth.open(make_start(epoch=4))
    growth.open(make_start(epoch=5, sources={NGRAM}))
    assert (growth.num_sessions, model.num_sessions, ngram.num_sessions) == (1, 0, 1)
    with pytest.raises(Superseded):
        growth.commit(KEY, 4, 3, [1])
    growth.close(KEY, 4)
    assert growth.num_sessions == 1
    growth.close(KEY, 5)
    assert (growth.num_sessions, ngram.num_sessions) == (0, 0)


def test_waking_reaches_every_source(make_growth: Make, ngram: NgramGrowth):
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    woken: list[int] = []
    growth.wake = lambda: woken.append(1)
    model.wake()
    ngram.wake()
    assert woken == [1, 1]
    assert growth.wake is model.wake


def test_a_session_without_noise_or_with_coins_is_guessed_for_as_well(ngram: NgramGrowth, make_start: Make):
    growth = SourcedGrowth(None, ngram)
    for number, temperature in ((1, 0.0), (2, 1.3)):
        sampling = SamplingSpec(temperature=temperature, max_new_tokens=50)
        growth.open(make_start(number, prompt=[7, 3, 1, 4], sampling=sampling))
    records = {record.session_id: record for _, record in drive(growth)}
    assert records[1].tokens[:4] == records[2].tokens[:4] == [1, 5, 9, 2]


def test_the_model_rests_while_ngrams_are_expected_to_be_right_for_most_of_a_tree(
    make_growth: Make, ngram: NgramGrowth, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    text = [number * 5 % 23 for number in range(23)]
    ngram.source.add(text)
    assert ngram.source.settle()
    model, runner = make_growth()
    growth = SourcedGrowth(model, ngram)
    growth.open(make_start(prompt=text[:3], limits=GrowthLimits(max_live_nodes=64, max_depth=10)))
    # What matches have been worth so far is not enough.
    assert ngram.match() is not None
    assert not ngram.leading
    assert growth.begin()
    growth.finish()
    monkeypatch.setattr(ngram.calibration, "estimates", lambda buckets: np.full(buckets.shape, 0.97))
    growth.commit(KEY, 1, 3, [(text[3] + 1) % 23, *text[:4]])
    assert ngram.match() is not None
    assert ngram.leading == {KEY}
    rows = sum(len(batch.token_ids) for batch in runner.batches)
    assert not growth.begin()
    growth.commit(KEY, 1, 8, text[4:7])
    # Until the text is matched again nobody knows.
    assert not ngram.leading
    ngram.match()
    assert ngram.leading == {KEY}
    assert not growth.begin()
    assert sum(len(batch.token_ids) for batch in runner.batches) == rows
    # Elsewhere the trie knows nothing: the model computes what it has missed, and grows.
    growth.commit(KEY, 1, 11, [23, 23])
    records = drive(growth)
    assert not ngram.leading
    assert MODEL in {source for source, _ in records}
    session = model.session(KEY)
    assert session is not None
    assert session.length == 13
    # Others' growth does not stop for it, and it is forgotten with its session.
    growth.commit(KEY, 1, 13, text[:5])
    ngram.match()
    assert ngram.leading == {KEY}
    growth.open(make_start(2, sources=[MODEL]))
    ngram.match()
    assert growth.begin()
    growth.finish()
    growth.close(KEY, 1)
    assert not ngram.leading
    # A prompt is computed all the same, and nothing after it.
    growth.close((7, 2), 1)
    growth.open(make_start(3, prompt=text[:4], limits=GrowthLimits(max_live_nodes=64, max_depth=10)))
    ngram.match()
    assert ngram.leading == {(7, 3)}
    rows = len(runner.batches)
    drive(growth)
    assert [batch.token_ids.tolist() for batch in runner.batches[rows:]] == [text[:4]]


def test_a_sync_sessions_model_never_rests(
    make_growth: Make, ngram: NgramGrowth, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ngram.calibration, "estimates", lambda buckets: np.full(buckets.shape, 0.97))
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    limits = GrowthLimits(max_live_nodes=64, max_depth=4, mode=GrowthMode.SYNC, sync_nodes=8)
    growth.open(make_start(prompt=SONG[:4], limits=limits))
    assert ngram.match() is not None
    assert not ngram.leading
    assert growth.begin()
    growth.finish()


def test_the_trie_answers_every_commit_while_the_model_rests(
    make_growth: Make, ngram: NgramGrowth, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    """Also where there is nothing new to say, for nobody else does; and it says that nothing more will come."""
    monkeypatch.setattr(ngram.calibration, "estimates", lambda buckets: np.full(buckets.shape, 0.99))
    text = [number * 5 % 23 for number in range(23)]
    ngram.source.add(text)
    assert ngram.source.settle()
    model, _ = make_growth()
    growth = SourcedGrowth(model, ngram)
    # Its end is near: soon every guess has been made.
    limits, sampling = GrowthLimits(max_live_nodes=64, max_depth=34), SamplingSpec(max_new_tokens=14)
    growth.open(make_start(prompt=text[:4], limits=limits, sampling=sampling))
    drive(growth)
    empty = 0
    for length in range(4, 17):
        growth.commit(KEY, 1, length, [text[length]])
        records = drive(growth)
        assert {source for source, _ in records} == {NGRAM}
        assert [(record.as_of, record.complete) for _, record in records] == [(length + 1, True)]
        empty += not records[0][1].node_ids
    assert empty > 3


def test_who_rests_and_who_is_left_out_have_no_part_in_a_step(
    make_growth: Make, ngram: NgramGrowth, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ngram.calibration, "estimates", lambda buckets: np.full(buckets.shape, 0.99))
    model, runner = make_growth()
    growth = SourcedGrowth(model, ngram)
    growth.open(make_start(prompt=SONG[:4], limits=GrowthLimits(max_live_nodes=64, max_depth=10)))
    drive(growth)
    assert ngram.leading == {KEY}
    for number in (2, 3):
        growth.open(make_start(number, prompt=[7, 7, number], sources=[MODEL]))
    assert growth.begin({(7, 2)})
    growth.finish()
    assert runner.batches[-1].token_ids.tolist() == [7, 7, 3]
