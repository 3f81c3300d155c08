"""Sessions that grow by n-grams: epochs, commits, modes, rules, bounds of their trees."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.draft_worker.session_growth import SessionGrowth, sessions_of
from tests.draft_worker.settling import settle

from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter, NgramDrafterConfig
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, Proposals, TextTails
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.session import GrowthLimits, GrowthMode
from outrider.errors import CommitMismatch, InvalidRequest, OutOfSlots, Superseded
from outrider.growth_source import GrowthSource
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


def depths(own: SessionGrowth) -> dict[int, int]:
    """Depth of each new node, where the tree was empty before."""
    found = {0: 0}
    for node, parent in zip(own.node_ids, own.parents, strict=True):
        found[node] = found[parent] + 1
    return found


def test_an_open_and_every_commit_are_answered_with_what_is_new(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    drafter.open(make_start(prompt=[7, 3, 1, 4]))
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


def test_a_match_counts_its_nodes_and_sessions(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    drafter.open(make_start(1, prompt=[7, 3, 1, 4]))
    drafter.open(make_start(2, prompt=[7, 3, 1, 4], is_shared=True))
    drafter.open(make_start(3, prompt=[7, 28], is_shared=True))
    growth = drafter.match()
    assert growth is not None
    # The third has nothing to say, and somebody else answers for it.
    assert (growth.rows, growth.num_sessions, len(growth.counts)) == (len(growth.node_ids), 2, 2)


def test_what_follows_the_likeliest_leaf_is_proposed_as_well(make_drafter: Make, make_start: Make):
    drafter, song = make_drafter(ProposalConfig(draft_tokens=2)), list(range(25))
    for _ in range(6):
        # Seen often enough to be believed for many tokens in a row.
        learn(drafter, song)
    drafter.open(make_start(1, prompt=song[:4], limits=GrowthLimits(max_depth=5)))
    drafter.open(make_start(2, prompt=song[:4], limits=GrowthLimits(max_depth=5, mode=GrowthMode.SYNC)))
    found = matched(drafter)
    # Three matches of two nodes, as deep as the session's tree may be; a sync tree is of one match.
    assert found[1].tokens == song[4:9]
    assert found[1].parents == [0, *found[1].node_ids[:-1]]
    assert found[2].tokens == song[4:6]
    drafter.commit(KEY, song[4:8])
    second = matched(drafter)[1]
    assert (second.tokens, second.parents[0]) == (song[9:13], found[1].node_ids[-1])


def test_prompts_and_outputs_of_all_sessions_are_learned(drafter: NgramDrafter, make_start: Make):
    drafter.open(make_start(1, prompt=SONG[:5]))
    drafter.commit(KEY, SONG[5:9])
    drafter.commit(KEY, SONG[9:])
    assert settle(drafter.trie)
    matched(drafter)
    drafter.open(make_start(2, prompt=[20, *SONG[2:5]], output=SONG[5:6]))
    assert matched(drafter)[2].tokens[:5] == SONG[6:11]
    drafter.close(KEY)
    drafter.close((7, 2))
    assert drafter.num_sessions == 0


def test_all_sessions_that_are_due_are_one_step_but_those_left_out(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    for number in (1, 2, 3):
        drafter.open(make_start(number, prompt=[7, 3, 1, 4]))
    assert set(matched(drafter, {(7, 2)})) == {1, 3}
    assert set(matched(drafter)) == {2}
    assert drafter.steps == 2


def test_commits_of_what_is_known_and_of_what_is_missing(drafter: NgramDrafter, make_start: Make):
    drafters = Drafters(None, drafter)
    drafters.open(make_start(prompt=SONG[:4]))
    drafters.commit(KEY, 1, 4, [5, 6])
    drafters.commit(KEY, 1, 4, [5, 6])
    drafters.commit(KEY, 1, 5, [6, 7])
    assert matched(drafter)[1].as_of == 7
    assert settle(drafter.trie)
    assert drafter.trie.counts.inserted_tokens == 7
    with pytest.raises(CommitMismatch, match="differs"):
        drafters.commit(KEY, 1, 5, [9])
    with pytest.raises(Superseded):
        drafters.commit(KEY, 1, 7, [9])
    drafters.open(make_start(prompt=SONG[:4], epoch=2))
    with pytest.raises(CommitMismatch, match="only 4"):
        drafters.commit(KEY, 2, 5, [9])
    assert drafters.num_sessions == 0
    assert not matched(drafter)


def test_epochs(drafter: NgramDrafter, make_start: Make):
    drafters = Drafters(None, drafter)
    drafters.open(make_start(epoch=2))
    for epoch in (1, 2):
        with pytest.raises(Superseded):
            drafters.open(make_start(epoch=epoch))
    drafters.open(make_start(epoch=3, owner="other"))
    drafters.close(KEY, 2)
    assert drafters.num_sessions == 1
    growth = matched(drafter)[1]
    assert (growth.epoch, growth.owner) == (3, "other")
    drafters.close(KEY, 3)
    assert drafters.num_sessions == 0


def test_tokens_that_are_none(drafter: NgramDrafter, make_start: Make):
    drafters = Drafters(None, drafter)
    with pytest.raises(InvalidRequest, match="below 30"):
        drafters.open(make_start(prompt=[30]))
    with pytest.raises(InvalidRequest, match="201 tokens"):
        drafters.open(make_start(prompt=[1] * 201))
    drafters.open(make_start())
    with pytest.raises(InvalidRequest, match="below 30"):
        drafters.commit(KEY, 1, 3, [30])
    assert drafters.num_sessions == 0


def test_sync_rounds_are_whole_trees_made_afresh(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    limits = GrowthLimits(mode=GrowthMode.SYNC, max_depth=3)
    drafter.open(make_start(prompt=[7, 3, 1, 4], limits=limits))
    first = matched(drafter)[1]
    assert first.complete
    assert first.tokens[:3] == [1, 5, 9]
    drafter.commit(KEY, [1])
    second = matched(drafter)[1]
    assert (second.complete, second.as_of) == (True, 5)
    assert second.tokens[:3] == [5, 9, 2]
    assert not set(first.node_ids) & set(second.node_ids)
    drafter.commit(KEY, [29])
    assert (matched(drafter)[1].complete, drafter.match()) == (True, None)


def test_a_rejection_session_gets_nothing_but_teaches(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    drafter.open(make_start(prompt=[7, 3, 1, 4], sampling=REJECTION))
    assert matched(drafter)[1].node_ids == []
    drafter.commit(KEY, [1, 5])
    assert matched(drafter)[1].node_ids == []
    assert settle(drafter.trie)
    assert drafter.trie.counts.inserted_tokens == len(SONG) + 6
    # Without a temperature every rule is the greedy one.
    sampling = SamplingSpec(temperature=0.0, verification=VerificationRule.REJECTION, max_new_tokens=50)
    drafter.open(make_start(2, prompt=[7, 3, 1, 4], sampling=sampling))
    assert matched(drafter)[2].tokens[:2] == [1, 5]


def test_trees_end_at_stop_tokens_at_the_last_token_and_at_their_depth(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    drafter.open(make_start(1, prompt=[7, 3, 1, 4], sampling=SamplingSpec(max_new_tokens=2)))
    stops = SamplingSpec(max_new_tokens=50, stop_token_ids=(2**32 - 1, 9))
    drafter.open(make_start(2, prompt=[7, 3, 1, 4], sampling=stops))
    drafter.open(make_start(3, prompt=[7, 3, 1, 4], limits=GrowthLimits(max_depth=3)))
    drafter.open(make_start(4, prompt=[*[7] * 195, 3, 1, 4]))
    found = matched(drafter)
    assert [max(depths(found[number]).values()) for number in (1, 3, 4)] == [2, 3, 2]
    (end,) = (node for node, token in zip(found[2].node_ids, found[2].tokens, strict=True) if token == 9)
    assert end not in found[2].parents


def test_a_tree_holds_its_sessions_credit_which_commits_give_back(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    drafter.open(make_start(prompt=[7, 3, 1, 4], limits=GrowthLimits(max_live_nodes=3)))
    first = matched(drafter)[1]
    assert first.tokens == [1, 5, 9]
    drafter.commit(KEY, [1])
    second = matched(drafter)[1]
    assert (second.tokens, second.parents) == ([2], [first.node_ids[-1]])
    # A token that was not proposed takes everything with it.
    drafter.commit(KEY, [4])
    assert len(matched(drafter)[1].tokens) == 3


def test_estimates_of_siblings_add_up_to_one_at_most(make_drafter: Make, make_start: Make):
    drafter = make_drafter(ProposalConfig(draft_tokens=30))
    # After 1: 2 follows a long suffix surely, and after shorter suffixes many others do.
    for token in range(10, 20):
        learn(drafter, [5, 1, token], [5, 1, token])
    for _ in range(5):
        learn(drafter, [4, 5, 1, 2])
    drafter.open(make_start(prompt=[4, 5, 1]))
    own = matched(drafter)[1]
    siblings = [acceptance for parent, acceptance in zip(own.parents, own.acceptance, strict=True) if parent == 0]
    assert len(siblings) > 3
    assert sum(siblings) <= 1 + 1e-6
    assert min(siblings) >= drafter.config.min_value


def test_a_session_longer_than_the_drafters_limit_stays_open_and_silent(make_drafter: Make, make_start: Make):
    drafter = make_drafter(max_model_len=10)
    learn(drafter, SONG)
    drafter.open(make_start(prompt=[7, 3, 1, 4]))
    assert matched(drafter)[1].tokens
    length = 4
    for new in ([1, 5, 9, 2, 6, 5, 3], [5], [8, 3]):
        drafter.commit(KEY, new)
        length += len(new)
        own = matched(drafter)[1]
        assert (own.as_of, own.tokens) == (length, [])


def test_rows_are_a_limit_for_sessions_that_nobody_else_answers(make_drafter: Make, make_start: Make):
    drafter = make_drafter(max_sessions=2)
    learn(drafter, SONG)
    drafter.open(make_start(1, prompt=[7, 3, 1, 4]))
    drafter.open(make_start(2, prompt=[7, 3, 1, 4]))
    with pytest.raises(OutOfSlots, match="all 2 rows are taken: raise max_num_seqs"):
        drafter.open(make_start(3, prompt=[7, 3, 1, 4]))
    # Those that need none are no matter.
    drafter.open(make_start(4, prompt=[7, 3, 1, 4], is_shared=True))
    drafter.open(make_start(5, prompt=[7, 3, 1, 4], sampling=REJECTION))
    assert set(matched(drafter)) == {1, 2, 5}
    for length in (4, 5):
        drafter.commit((7, 4), SONG[length - 1 : length])
    assert not matched(drafter)
    # A row begins anew.
    drafter.close((7, 2))
    drafter.open(make_start(3, prompt=[7, 3, 1, 4]))
    own = matched(drafter)[3]
    assert (own.tokens[:2], own.node_ids[:2], own.parents[:2]) == ([1, 5], [1, 2], [0, 1])


class BusyTrie(SharedTrie):
    """One whose insertions take long while `is_busy`."""

    is_busy = False

    def propose(self, texts: TextTails) -> Proposals | None:
        return None if self.is_busy else super().propose(texts)


def test_what_was_put_off_is_due_again_and_says_so(make_start: Make):
    inner = NgramTrie(capacity=5000, max_trie_depth=6)
    inner.insert((SONG, 0))
    trie = BusyTrie(inner, ProposalConfig())
    drafter = NgramDrafter(trie, NgramDrafterConfig(vocab_size=30, max_model_len=200, max_sessions=4))
    woken: list[int] = []
    drafter.wake = lambda: woken.append(1)
    trie.is_busy = True
    drafter.open(make_start(1, prompt=[7, 3, 1, 4]))
    assert drafter.match() is None
    drafter.commit(KEY, [1])
    # A session that has nothing to propose is answered all the same.
    drafter.open(make_start(2, prompt=[7], sampling=REJECTION))
    assert set(matched(drafter)) == {2}
    assert woken == [1, 1]
    trie.is_busy = False
    own = matched(drafter)[1]
    assert (own.as_of, own.tokens[:2]) == (5, [5, 9])


def test_repeated_texts_teach_that_proposals_come_true(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    sent = []
    for _ in range(39):
        drafter.open(make_start(prompt=[7, *SONG[:3]]))
        sent.append(matched(drafter)[1].acceptance[0])
        drafter.commit(KEY, SONG[3:])
        assert settle(drafter.trie)
        matched(drafter)
        drafter.close(KEY)
    assert sent[-1] > 0.85
    assert sent[-1] > sent[0]


def test_what_is_expected_to_be_right_for_most_of_a_round_leads(drafter: NgramDrafter, make_start: Make):
    song = list(range(25))
    learn(drafter, song)
    for _ in range(29):
        drafter.open(make_start(3, prompt=song[:8]))
        matched(drafter)
        drafter.commit((7, 3), song[8:])
        assert settle(drafter.trie)
        drafter.close((7, 3))
    # What nobody waits for is reported if it leads, and then no other drafter is needed this round.
    drafter.open(make_start(1, prompt=song[:8], limits=GrowthLimits(max_depth=8), is_shared=True))
    drafter.open(make_start(2, prompt=[29], limits=GrowthLimits(max_depth=8), is_shared=True))
    found = matched(drafter)
    assert drafter.leading == {KEY}
    assert found[1].complete
    assert set(found) == {1}
    drafter.commit(KEY, [0])
    assert drafter.leading == set()


def test_each_session_is_estimated_by_its_own_rule(drafter: NgramDrafter, make_start: Make):
    learn(drafter, SONG)
    for number, temperature in ((1, 1.0), (2, 0.0), (3, 1.0)):
        sampling = SamplingSpec(temperature=temperature, max_new_tokens=50)
        drafter.open(make_start(number, prompt=[7, 3, 1, 4], sampling=sampling))
    found = matched(drafter)
    # Noise makes repetitions rarer.
    assert found[1].tokens[:5] == found[2].tokens[:5] == found[3].tokens[:5] == [1, 5, 9, 2, 6]
    for place in (0, 4):
        coupled, greedy = found[1].acceptance[place], found[2].acceptance[place]
        assert coupled == found[3].acceptance[place] < greedy
    drafter.commit((7, 2), SONG[3:5])
    # Observed with the next match, and a session that is closed before that counts too.
    drafter.close((7, 2))
    assert [own.rule for own in drafter.calibration.reliability()] == ["greedy"]
