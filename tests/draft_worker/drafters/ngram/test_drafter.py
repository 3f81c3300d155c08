"""Sessions that grow by n-grams: epochs, commits, modes, rules, bounds of their trees."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.draft_worker.session_growth import SessionGrowth, sessions_of
from tests.draft_worker.settling import settle
from tests.draft_worker.table_model import session_start

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, Proposals, TextTails
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import InvalidRequest, OutOfSlots
from outrider.sampling import SamplingSpec, VerificationRule

Make = Callable[..., Any]
KEY = (7, 1)
SONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
REJECTION = SamplingSpec(temperature=0.8, verification=VerificationRule.REJECTION, max_new_tokens=50)


@pytest.fixture
def drafter(make_drafter: Make) -> NgramDrafter:
    return make_drafter()


def learn(drafter: NgramDrafter, *texts: list[int]) -> None:
    for text in texts:
        drafter.trie.add(text)
    assert settle(drafter.trie)


def matched(drafter: NgramDrafter, left_out: Any = ()) -> dict[int, SessionGrowth]:
    growth = drafter.match(left_out)
    if growth is None:
        return {}
    assert growth.source is GrowthSource.NGRAM
    assert growth.step_ns > 0
    return {own.session_id: own for own in sessions_of(growth)}


def test_an_open_and_every_commit_are_answered_with_what_is_new(drafter: NgramDrafter):
    learn(drafter, SONG)
    drafter.open(session_start(prompt=[7, 3, 1, 4]))
    first = matched(drafter)[1]
    assert (first.epoch, first.as_of, first.complete) == (1, 4, False)
    assert first.tokens[:5] == [1, 5, 9, 2, 6]
    assert first.node_ids[:5] == [1, 2, 3, 4, 5]
    assert first.parents[:5] == [0, 1, 2, 3, 4]
    assert all(0 < acceptance <= 1 for acceptance in first.acceptance)
    assert not matched(drafter)
    drafter.commit(KEY, [1, 5])
    second = matched(drafter)[1]
    assert second.as_of == 6
    # No id and no node twice: a node is the path to it.
    paths: dict[int, tuple[int, ...]] = {}
    for root, own in (((), first), ((1, 5), second)):
        for node, parent, token in zip(own.node_ids, own.parents, own.tokens, strict=True):
            assert node not in paths
            paths[node] = (*(paths[parent] if parent else root), token)
    assert len(set(paths.values())) == len(paths) > len(first.node_ids)
    drafter.commit(KEY, [29])
    third = matched(drafter)[1]
    # Nothing is known of 29, and whoever waits is told.
    assert (third.as_of, third.node_ids) == (7, [])


def test_a_match_counts_its_nodes_and_sessions(drafter: NgramDrafter):
    learn(drafter, SONG)
    drafter.open(session_start(1, prompt=[7, 3, 1, 4]))
    drafter.open(session_start(2, prompt=[7, 3, 1, 4], is_shared=True))
    drafter.open(session_start(3, prompt=[7, 28], is_shared=True))
    growth = drafter.match()
    assert growth is not None
    # The third has nothing to say, and somebody else answers for it.
    assert (growth.rows, growth.num_sessions, len(growth.counts)) == (len(growth.node_ids), 2, 2)


def test_prompts_and_outputs_of_all_sessions_are_learned(drafter: NgramDrafter):
    drafter.open(session_start(1, prompt=SONG[:5]))
    drafter.commit(KEY, SONG[5:9])
    drafter.commit(KEY, SONG[9:])
    assert settle(drafter.trie)
    matched(drafter)
    drafter.open(session_start(2, prompt=[20, *SONG[2:5]], output=SONG[5:6]))
    assert matched(drafter)[2].tokens[:5] == SONG[6:11]
    drafter.close(KEY)
    drafter.close((7, 2))
    assert drafter.num_sessions == 0


def test_all_sessions_that_are_due_are_one_step_but_those_left_out(drafter: NgramDrafter):
    learn(drafter, SONG)
    for number in (1, 2, 3):
        drafter.open(session_start(number, prompt=[7, 3, 1, 4]))
    assert set(matched(drafter, {(7, 2)})) == {1, 3}
    assert set(matched(drafter)) == {2}
    assert drafter.steps == 2


def test_tokens_that_are_none(drafter: NgramDrafter):
    drafters = Drafters(None, drafter)
    with pytest.raises(InvalidRequest, match="below 30"):
        drafters.open(session_start(prompt=[30]))
    with pytest.raises(InvalidRequest, match="201 tokens"):
        drafters.open(session_start(prompt=[1] * 201))
    drafters.open(session_start())
    with pytest.raises(InvalidRequest, match="below 30"):
        drafters.commit(KEY, 1, 3, [30])
    assert drafters.num_sessions == 0


def test_a_rejection_session_gets_nothing_but_teaches(drafter: NgramDrafter):
    learn(drafter, SONG)
    drafter.open(session_start(prompt=[7, 3, 1, 4], sampling=REJECTION))
    assert matched(drafter)[1].node_ids == []
    drafter.commit(KEY, [1, 5])
    assert matched(drafter)[1].node_ids == []
    assert settle(drafter.trie)
    assert drafter.trie.counts.inserted_tokens == len(SONG) + 6
    # Without a temperature every rule is the greedy one.
    sampling = SamplingSpec(temperature=0.0, verification=VerificationRule.REJECTION, max_new_tokens=50)
    drafter.open(session_start(2, prompt=[7, 3, 1, 4], sampling=sampling))
    assert matched(drafter)[2].tokens[:2] == [1, 5]


def test_a_session_longer_than_the_drafters_limit_stays_open_and_silent(make_drafter: Make):
    drafter = make_drafter(max_model_len=10)
    learn(drafter, SONG)
    drafter.open(session_start(prompt=[7, 3, 1, 4]))
    assert matched(drafter)[1].tokens
    length = 4
    for new in ([1, 5, 9, 2, 6, 5, 3], [5], [8, 3]):
        drafter.commit(KEY, new)
        length += len(new)
        own = matched(drafter)[1]
        assert (own.as_of, own.tokens) == (length, [])


def test_rows_are_a_limit_for_sessions_that_nobody_else_answers(make_drafter: Make):
    drafter = make_drafter(max_sessions=2)
    learn(drafter, SONG)
    drafter.open(session_start(1, prompt=[7, 3, 1, 4]))
    drafter.open(session_start(2, prompt=[7, 3, 1, 4]))
    with pytest.raises(OutOfSlots, match="all 2 rows are taken: raise max_num_seqs"):
        drafter.open(session_start(3, prompt=[7, 3, 1, 4]))
    # Those that need none are no matter.
    drafter.open(session_start(4, prompt=[7, 3, 1, 4], is_shared=True))
    drafter.open(session_start(5, prompt=[7, 3, 1, 4], sampling=REJECTION))
    assert set(matched(drafter)) == {1, 2, 5}
    for length in (4, 5):
        drafter.commit((7, 4), SONG[length - 1 : length])
    assert not matched(drafter)
    # A row begins anew.
    drafter.close((7, 2))
    drafter.open(session_start(3, prompt=[7, 3, 1, 4]))
    own = matched(drafter)[3]
    assert (own.tokens[:2], own.node_ids[:2], own.parents[:2]) == ([1, 5], [1, 2], [0, 1])


class BusyTrie(SharedTrie):
    """One whose insertions take long while `is_busy`."""

    is_busy = False

    def propose(self, texts: TextTails) -> Proposals | None:
        return None if self.is_busy else super().propose(texts)


def test_what_was_put_off_is_due_again_and_says_so():
    inner = NgramTrie(capacity=5000, max_trie_depth=6)
    inner.insert((SONG, 0))
    trie = BusyTrie(inner, ProposalConfig())
    drafter = NgramDrafter(trie, vocab_size=30, max_model_len=200, max_sessions=4)
    woken: list[int] = []
    drafter.wake = lambda: woken.append(1)
    trie.is_busy = True
    drafter.open(session_start(1, prompt=[7, 3, 1, 4]))
    assert drafter.match() is None
    drafter.commit(KEY, [1])
    # A session that has nothing to propose is answered all the same.
    drafter.open(session_start(2, prompt=[7], sampling=REJECTION))
    assert set(matched(drafter)) == {2}
    assert woken == [1, 1]
    trie.is_busy = False
    own = matched(drafter)[1]
    assert (own.as_of, own.tokens[:2]) == (5, [5, 9])
