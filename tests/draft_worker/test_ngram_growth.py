"""Sessions that grow by n-grams: epochs, commits, modes, rules, and what the thread needs of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.draft_worker.growth_step import SessionGrowth
from outrider.draft_worker.ngram_growth import NgramGrowth, NgramGrowthConfig
from outrider.draft_worker.ngram_source import NgramSource
from outrider.draft_worker.ngram_tree import NgramConfig
from outrider.draft_worker.ngram_trie import NgramTrie
from outrider.draft_worker.session import GrowthLimits, GrowthMode
from outrider.draft_worker.session_checks import CommitMismatch
from outrider.errors import InvalidRequest, Superseded
from outrider.growth_source import GrowthSource
from outrider.sampling import SamplingSpec, VerificationRule

Make = Callable[..., Any]
KEY = (7, 1)
SONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture
def growth() -> Iterator[NgramGrowth]:
    source = NgramSource(NgramTrie(capacity=5000, max_trie_depth=6), NgramConfig(), patience_s=60)
    source.start()
    yield NgramGrowth(source, NgramGrowthConfig(vocab_size=30, max_model_len=200))
    source.stop()
    assert source.join(30)


def learn(growth: NgramGrowth, *texts: list[int]) -> None:
    for text in texts:
        growth.source.add(text)
    assert growth.source.settle()


def matched(growth: NgramGrowth, left_out: Any = ()) -> dict[int, SessionGrowth]:
    step = growth.match(left_out)
    if step is None:
        return {}
    assert step.source is GrowthSource.NGRAM
    return {record.session_id: record for record in step.growths}


def test_an_open_and_every_commit_are_answered_with_what_is_new(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    growth.open(make_start(prompt=[7, 3, 1, 4]))
    record = matched(growth)[1]
    assert (record.epoch, record.as_of, record.complete) == (1, 4, False)
    assert record.tokens[:5] == [1, 5, 9, 2, 6]
    assert record.parents[:5] == [0, 1, 2, 3, 4]
    assert all(0 < value <= 1 for value in record.acceptance)
    assert not matched(growth)
    growth.commit(KEY, 1, 4, [1, 5])
    second = matched(growth)[1]
    assert second.as_of == 6
    # No id and no node twice: a node is all that leads to it.
    paths: dict[int, tuple[int, ...]] = {}
    for root, sent in (((), record), ((1, 5), second)):
        for node, parent, token in zip(sent.node_ids, sent.parents, sent.tokens, strict=True):
            assert node not in paths
            paths[node] = (*(paths[parent] if parent else root), token)
    assert len(set(paths.values())) == len(paths) > len(record.node_ids)
    growth.commit(KEY, 1, 6, [29])
    third = matched(growth)[1]
    # Nothing is known of 29, and whoever waits is told.
    assert (third.as_of, third.node_ids) == (7, [])


def test_what_follows_the_guesses_is_guessed_as_well(growth: NgramGrowth, make_start: Make):
    song = list(range(25))
    for _ in range(6):
        # Seen often enough to be believed for many tokens in a row.
        learn(growth, song)
    growth.source.config = NgramConfig(draft_tokens=2)
    growth.open(make_start(1, prompt=song[:4], limits=GrowthLimits(max_depth=5)))
    growth.open(make_start(2, prompt=song[:4], limits=GrowthLimits(max_depth=5, mode=GrowthMode.SYNC)))
    records = matched(growth)
    # Three matches of two nodes, as deep as the session's tree may be; a sync tree is of one match.
    assert records[1].tokens == song[4:9]
    assert records[1].parents == [0, *records[1].node_ids[:-1]]
    assert records[2].tokens == song[4:6]
    growth.commit(KEY, 1, 4, song[4:8])
    second = matched(growth)[1]
    assert (second.tokens, second.parents[0]) == (song[9:13], records[1].node_ids[-1])


def test_prompts_and_outputs_of_all_sessions_are_learned(growth: NgramGrowth, make_start: Make):
    growth.open(make_start(1, prompt=SONG[:5]))
    growth.commit(KEY, 1, 5, SONG[5:9])
    growth.commit(KEY, 1, 9, SONG[9:])
    assert growth.source.settle()
    matched(growth)
    growth.open(make_start(2, prompt=[20, *SONG[2:5]], output=SONG[5:6]))
    assert matched(growth)[2].tokens[:5] == SONG[6:11]
    growth.close(KEY, 1)
    growth.close((7, 2), 1)
    assert (growth.num_sessions, growth.slots.used) == (0, 0)


def test_all_sessions_that_are_due_are_one_step_but_those_left_out(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    for number in (1, 2, 3):
        growth.open(make_start(number, prompt=[7, 3, 1, 4]))
    assert set(matched(growth, {(7, 2)})) == {1, 3}
    assert set(matched(growth)) == {2}
    assert growth.steps == 2


def test_commits_of_what_is_known_and_of_what_is_missing(growth: NgramGrowth, make_start: Make):
    growth.open(make_start(prompt=SONG[:4]))
    growth.commit(KEY, 1, 4, [5, 6])
    growth.commit(KEY, 1, 4, [5, 6])
    growth.commit(KEY, 1, 5, [6, 7])
    session = growth.session(KEY)
    assert session is not None
    assert session.tokens == [*SONG[:4], 5, 6, 7]
    assert session.tree.position == 6
    assert growth.source.settle()
    assert growth.source.counts.inserted_tokens == 7
    with pytest.raises(CommitMismatch, match="differs"):
        growth.commit(KEY, 1, 5, [9])
    with pytest.raises(Superseded):
        growth.commit(KEY, 1, 7, [9])
    growth.open(make_start(prompt=SONG[:4], epoch=2))
    with pytest.raises(CommitMismatch, match="only 4"):
        growth.commit(KEY, 2, 5, [9])
    assert growth.num_sessions == 0
    assert not matched(growth)


def test_epochs(growth: NgramGrowth, make_start: Make):
    growth.open(make_start(epoch=2))
    for epoch in (1, 2):
        with pytest.raises(Superseded):
            growth.open(make_start(epoch=epoch))
    growth.open(make_start(epoch=3, owner="other"))
    growth.close(KEY, 2)
    assert growth.num_sessions == 1
    assert matched(growth)[1].epoch == 3
    growth.close_owned("owner")
    assert growth.num_sessions == 1
    growth.close_owned("other")
    assert growth.num_sessions == 0


def test_tokens_that_are_none(growth: NgramGrowth, make_start: Make):
    with pytest.raises(InvalidRequest, match="below 30"):
        growth.open(make_start(prompt=[30]))
    with pytest.raises(InvalidRequest, match="201 tokens"):
        growth.open(make_start(prompt=[1] * 201))
    growth.open(make_start())
    with pytest.raises(InvalidRequest, match="below 30"):
        growth.commit(KEY, 1, 3, [30])
    assert growth.num_sessions == 0


def test_sync_rounds_are_whole_trees_made_afresh(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    limits = GrowthLimits(mode=GrowthMode.SYNC, max_depth=3)
    growth.open(make_start(prompt=[7, 3, 1, 4], limits=limits))
    first = matched(growth)[1]
    assert first.complete
    assert first.tokens[:3] == [1, 5, 9]
    growth.commit(KEY, 1, 4, [1])
    second = matched(growth)[1]
    assert (second.complete, second.as_of) == (True, 5)
    assert second.tokens[:3] == [5, 9, 2]
    assert not set(first.node_ids) & set(second.node_ids)
    growth.commit(KEY, 1, 5, [29])
    assert (matched(growth)[1].complete, growth.match()) == (True, None)


def test_a_rejection_session_gets_nothing_but_teaches(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    sampling = SamplingSpec(temperature=0.8, verification=VerificationRule.REJECTION, max_new_tokens=50)
    growth.open(make_start(prompt=[7, 3, 1, 4], sampling=sampling))
    assert matched(growth)[1].node_ids == []
    growth.commit(KEY, 1, 4, [1, 5])
    assert matched(growth)[1].node_ids == []
    assert growth.source.settle()
    assert growth.source.counts.inserted_tokens == len(SONG) + 6
    # Without a temperature every rule is the greedy one.
    sampling = SamplingSpec(temperature=0.0, verification=VerificationRule.REJECTION, max_new_tokens=50)
    growth.open(make_start(2, prompt=[7, 3, 1, 4], sampling=sampling))
    assert matched(growth)[2].tokens[:2] == [1, 5]


def test_guesses_end_at_stop_tokens_and_at_the_last_token(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    growth.open(make_start(1, prompt=[7, 3, 1, 4], sampling=SamplingSpec(max_new_tokens=2)))
    growth.open(make_start(2, prompt=[7, 3, 1, 4], sampling=SamplingSpec(max_new_tokens=50, stop_token_ids=(9,))))
    records = matched(growth)
    depth: dict[int, int] = {0: 0}
    for node, parent in zip(records[1].node_ids, records[1].parents, strict=True):
        depth[node] = depth[parent] + 1
    assert max(depth.values()) == 2
    (end,) = (node for node, token in zip(records[2].node_ids, records[2].tokens, strict=True) if token == 9)
    assert end not in records[2].parents


def test_what_was_put_off_is_due_again_and_says_so(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    woken: list[int] = []
    growth.wake = lambda: woken.append(1)
    growth.open(make_start(prompt=[7, 3, 1, 4]))
    growth.source._patience_s = 0.001
    growth.source._lock.acquire()
    try:
        assert growth.match() is None
    finally:
        growth.source._lock.release()
    assert woken == [1]
    growth.source._patience_s = 60
    assert matched(growth)[1].tokens[:2] == [1, 5]


def test_repeated_texts_teach_that_guesses_come_true(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    sent = []
    for epoch in range(1, 40):
        growth.open(make_start(prompt=[7, *SONG[:3]], epoch=epoch))
        sent.append(matched(growth)[1].acceptance[0])
        growth.commit(KEY, epoch, 4, SONG[3:])
        assert growth.source.settle()
        matched(growth)
    assert sent[-1] > 0.85
    assert sent[-1] > sent[0]


def test_each_session_is_estimated_by_its_own_rule(growth: NgramGrowth, make_start: Make):
    learn(growth, SONG)
    for number, temperature in ((1, 1.0), (2, 0.0), (3, 1.0)):
        sampling = SamplingSpec(temperature=temperature, max_new_tokens=50)
        growth.open(make_start(number, prompt=[7, 3, 1, 4], sampling=sampling))
    records = matched(growth)
    # Noise makes repetitions rarer.
    assert records[1].tokens[:5] == records[2].tokens[:5] == records[3].tokens[:5] == [1, 5, 9, 2, 6]
    for place in (0, 4):
        coupled, greedy = records[1].acceptance[place], records[2].acceptance[place]
        assert coupled == records[3].acceptance[place] < greedy
    growth.commit((7, 2), 1, 4, SONG[3:5])
    assert [own.rule for own in growth.calibration.reliability()] == ["greedy"]
