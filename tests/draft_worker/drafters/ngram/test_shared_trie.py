"""Insertions beside proposals: queued, bounded, paced, and given up without harm."""

import logging
import random
import threading
from typing import Any

import numpy as np
import pytest
from tests.draft_worker.settling import settle

from outrider.draft_worker.drafters.ngram import shared_trie
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, TextTails
from outrider.draft_worker.drafters.ngram.shared_trie import HOLD_NS, MAX_AT_ONCE, SharedTrie, next_at_once
from outrider.draft_worker.drafters.ngram.trie import NgramTrie, find

DEPTH = 5


class HaltingTrie(NgramTrie):
    """One whose insertions halt, and perhaps fail, where a test says so."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.halts = self.fails = False
        self.entered, self.go_on = threading.Event(), threading.Event()

    def insert(self, *texts: Any) -> None:
        if self.halts:
            self.entered.set()
            assert self.go_on.wait(60)
        if self.fails:
            raise MemoryError("no more")
        super().insert(*texts)


class SlowHandler(logging.Handler):
    """Lets whoever logs wait for a thread."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self.thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        del record
        self.thread.join(30)


def make_shared(
    *, capacity: int = 10_000, queue_tokens: int = 10_000, patience_s: float = 60
) -> tuple[SharedTrie, HaltingTrie]:
    trie = HaltingTrie(capacity=capacity, max_trie_depth=DEPTH)
    return SharedTrie(trie, ProposalConfig(), queue_tokens=queue_tokens, patience_s=patience_s), trie


def end(shared: SharedTrie) -> None:
    shared.stop()
    assert shared.join(30)


def proposed(shared: SharedTrie, text: list[int]) -> list[int]:
    proposals = shared.propose(TextTails.of([text], shared.suffix_tokens))
    assert proposals is not None
    return proposals.tokens[0, : proposals.found[0, 0]].tolist()


def count_of(trie: NgramTrie, path: list[int]) -> int:
    nodes, node = trie.nodes, 0
    for token in path:
        node = find(nodes.token, nodes.parent, nodes.chain, nodes.heads, node, token)
        if node == 0:
            return 0
    return int(nodes.count[node])


def test_what_is_added_is_found_soon_and_counted_once_however_it_is_cut():
    drawn = random.Random(3)
    text = [drawn.randrange(4) for _ in range(2000)]
    shared, trie = make_shared()
    shared.start()
    # A session's text as it grows, now and then by more than is inserted at once.
    start = 0
    while start < len(text):
        new = drawn.choice([1, 5, 12, 700])
        context = min(start, shared.suffix_tokens)
        assert shared.add(text[start - context : start + new], start=context)
        start += new
    assert settle(shared)
    for length in range(1, DEPTH + 1):
        for place in range(0, len(text) - length, 97):
            run = text[place : place + length]
            expected = sum(text[at : at + length] == run for at in range(len(text) - length + 1))
            assert count_of(trie, run) == expected
    counts = shared.counts
    assert (counts.queued_tokens, counts.inserted_tokens, counts.dropped_tokens) == (2000, 2000, 0)
    assert 0 < counts.most_at_once < 2000
    assert proposed(shared, text[:50])
    assert (counts.matches, counts.hits) == (1, 1)
    end(shared)


def test_a_full_queue_drops_and_counts():
    shared, _ = make_shared(queue_tokens=10)
    assert shared.add([1, 2, 3, 4, 5, 6])
    assert not shared.add([1, 2, 3, 4, 5])
    assert shared.add([6, 7, 8], start=1)
    assert (shared.waiting_tokens, shared.counts.dropped_tokens) == (8, 5)
    shared.start()
    assert settle(shared)
    # What was dropped was never seen; there is room again.
    assert proposed(shared, [9, 6]) == [7, 8]
    assert proposed(shared, [1, 2, 3]) == [4, 5, 6]
    assert shared.add([1, 2, 3, 4, 5])
    assert settle(shared)
    end(shared)


def test_nothing_grows_beyond_the_capacity():
    shared, trie = make_shared(capacity=200)
    shared.start()
    nodes = trie.nodes
    for seed in range(10):
        drawn = random.Random(seed)
        shared.add([drawn.randrange(1000) for _ in range(200)])
    assert settle(shared)
    assert len(trie) == 200
    assert trie.evicted > 5000
    assert trie.nodes is nodes
    end(shared)


def test_a_proposal_is_put_off_while_an_insertion_hangs_and_comes_after_it():
    shared, trie = make_shared(patience_s=0.001)
    shared.start()
    shared.add([1, 2, 3])
    assert settle(shared)
    trie.halts = True
    shared.add([1, 2, 9])
    assert trie.entered.wait(30)
    assert shared.propose(TextTails.of([[1, 2]], shared.suffix_tokens)) is None
    assert shared.counts.put_off == 1
    trie.go_on.set()
    assert settle(shared)
    shared.patience_s = 60
    assert set(proposed(shared, [1, 2])) == {3, 9}
    end(shared)


def test_the_inserting_thread_may_fail(caplog: pytest.LogCaptureFixture):
    shared, trie = make_shared()
    shared.start()
    shared.add([1, 2, 3])
    assert settle(shared)
    trie.fails = True
    shared.add([1, 2, 9])
    assert shared.join(30)
    assert shared.failed
    assert "their thread has failed" in caplog.text
    # Half made links are not followed: everything is forgotten, and nothing is taken any more.
    assert proposed(shared, [1, 2]) == []
    assert len(shared.trie) == 0
    assert not shared.add([4, 5])
    shared.add_corpus([4, 5], threading.Event())
    assert shared.counts.corpus_tokens == 0
    assert not settle(shared)


def test_a_proposal_that_waits_for_an_insertion_that_fails_follows_no_half_made_link():
    shared, trie = make_shared()
    shared.start()
    shared.add([1, 2, 3])
    assert settle(shared)
    trie.halts = trie.fails = True
    shared.add([1, 2, 9])
    assert trie.entered.wait(30)
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(proposed(shared, [1, 2])))
    log, slow = logging.getLogger(shared_trie.__name__), SlowHandler(waiting)
    log.addHandler(slow)
    waiting.start()
    trie.go_on.set()
    waiting.join(30)
    assert shared.join(30)
    log.removeHandler(slow)
    assert found == [[]]


def test_what_is_still_queued_at_the_end_does_not_hold_it_up():
    shared, trie = make_shared()
    shared.add(list(range(1000)))
    shared.stop()
    shared.start()
    assert shared.join(30)
    assert len(trie) == 0


def test_the_number_of_tokens_at_once_follows_the_time_that_they_take():
    slow = next_at_once(100, 100, 10 * HOLD_NS)
    assert slow == 10
    at_once = slow
    for _ in range(50):
        after = next_at_once(at_once, at_once, at_once * 1000)
        assert at_once <= after <= 1.25 * at_once + 1
        at_once = after
    assert at_once == min(MAX_AT_ONCE, HOLD_NS // 1000)
    # A short piece does not tell how long a whole one takes, unless it takes too long itself.
    assert next_at_once(at_once, 1, 100) == at_once
    assert next_at_once(at_once, 1, 10**10) == 1


def test_corpora_are_queued_piece_by_piece_and_counted_as_one_text():
    shared, trie = make_shared(capacity=100_000)
    shared.start()
    text = np.array([token % 7 for token in range(10_000)], np.int32)
    shared.add_corpus(text, threading.Event())  # pyright: ignore[reportArgumentType]
    assert settle(shared)
    assert count_of(trie, [0, 1, 2, 3, 4]) == len([at for at in range(0, 10_000, 7) if at + 5 <= 10_000])
    assert shared.counts.corpus_tokens == 10_000
    end(shared)


def test_memory_is_made_ready_ahead_without_harm():
    trie = NgramTrie(capacity=200_000, max_trie_depth=DEPTH)
    trie.insert(([1, 2, 3], 0))
    for _ in range(3):
        trie.make_ready(50_000)
        trie.insert(([1, 2, 3, 4], 3))
    trie.make_ready(10**9)
    assert count_of(trie, [1, 2, 3]) == 1
    assert count_of(trie, [2, 3, 4]) == 3
