"""Insertions beside matches: queued, bounded, paced, and given up without harm."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker import ngram_source
from outrider.draft_worker.ngram_source import _HOLD_NS, NgramSource
from outrider.draft_worker.ngram_tree import NgramConfig, TextTails
from outrider.draft_worker.ngram_trie import NgramTrie, find

DEPTH = 5


def make_source(*, capacity: int = 10_000, **options: Any) -> NgramSource:
    options = {"patience_s": 60.0} | options
    return NgramSource(NgramTrie(capacity=capacity, max_trie_depth=DEPTH), NgramConfig(), **options)


def end(source: NgramSource) -> None:
    source.stop()
    assert source.join(30)


def first_guesses(source: NgramSource, text: list[int]) -> list[int]:
    found = source.guess(TextTails.of([text], source.suffix_tokens))
    assert found is not None
    return found.tokens[0, : found.found[0, 0]].tolist()


def count_of(source: NgramSource, path: list[int]) -> int:
    nodes, node = source.trie.nodes, 0
    for token in path:
        node = find(nodes.token, nodes.parent, nodes.chain, nodes.heads, nodes.state, node, token)
        if node == 0:
            return 0
    return int(nodes.count[node])


def test_what_is_added_is_found_soon_and_counted_once_however_it_is_cut():
    drawn = random.Random(3)
    text = [drawn.randrange(4) for _ in range(300)]
    source = make_source()
    source._at_once = 3
    source.start()
    # A session's text as it grows: each piece with what is needed of what came before.
    start = 0
    while start < len(text):
        new = drawn.randrange(1, 12)
        context = min(start, source.suffix_tokens)
        assert source.add(text[start - context : start + new], start=context)
        start += new
    assert source.settle()
    for length in range(1, DEPTH + 1):
        for place in range(0, len(text) - length, 17):
            run = text[place : place + length]
            expected = sum(text[at : at + length] == run for at in range(len(text) - length + 1))
            assert count_of(source, run) == expected
    counts = source.counts
    assert (counts.queued_tokens, counts.inserted_tokens, counts.dropped_tokens) == (300, 300, 0)
    assert first_guesses(source, text[:50])
    assert (counts.matches, counts.hits) == (1, 1)
    end(source)


def test_a_full_queue_drops_and_counts():
    source = make_source(queue_tokens=10)
    assert source.add([1, 2, 3, 4, 5, 6])
    assert not source.add([1, 2, 3, 4, 5])
    assert source.add([6, 7, 8], start=1)
    assert (source.waiting_tokens, source.counts.dropped_tokens) == (8, 5)
    source.start()
    assert source.settle()
    # What was dropped was never seen; there is room again.
    assert first_guesses(source, [9, 6]) == [7, 8]
    assert first_guesses(source, [1, 2, 3]) == [4, 5, 6]
    assert source.add([1, 2, 3, 4, 5])
    assert source.settle()
    end(source)


def test_nothing_grows_beyond_the_capacity():
    source = make_source(capacity=200)
    source.start()
    before = source.trie.reserved_bytes
    for seed in range(10):
        drawn = random.Random(seed)
        source.add([drawn.randrange(1000) for _ in range(200)])
    assert source.settle()
    assert len(source.trie) == 200
    assert source.trie.evicted > 5000
    assert source.trie.reserved_bytes == before
    end(source)


def test_a_match_is_put_off_while_an_insertion_hangs_and_succeeds_after(monkeypatch: pytest.MonkeyPatch):
    source = make_source(patience_s=0.001)
    source.start()
    source.add([1, 2, 3])
    assert source.settle()
    entered, go_on = threading.Event(), threading.Event()
    insert = source.trie.insert_many

    def hang(texts: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        insert(texts)

    monkeypatch.setattr(source.trie, "insert_many", hang)
    source.add([1, 2, 9])
    assert entered.wait(30)
    # It does not wait for the insertion, which does not end.
    assert source.guess(TextTails.of([[1, 2]], source.suffix_tokens)) is None
    assert source.counts.put_off == 1
    go_on.set()
    assert source.settle()
    source._patience_s = 60
    assert set(first_guesses(source, [1, 2])) == {3, 9}
    end(source)


def test_the_thread_that_inserts_may_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    source = make_source()
    source.start()
    source.add([1, 2, 3])
    assert source.settle()

    def fail(texts: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(source.trie, "insert_many", fail)
    source.add([1, 2, 9])
    assert source.join(30)
    assert source.failed
    assert "their thread has failed" in caplog.text
    # Half made links are not followed: everything is forgotten, and nothing is taken any more.
    assert first_guesses(source, [1, 2]) == []
    assert not source.add([4, 5])
    source.add_corpus([4, 5], threading.Event())
    assert source.counts.corpus_tokens == 0
    assert not source.settle()


def test_a_match_that_waits_while_an_insertion_fails_follows_no_half_made_link(monkeypatch: pytest.MonkeyPatch):
    source = make_source()
    source.start()
    source.add([1, 2, 3])
    assert source.settle()
    inserting, go_on, found = threading.Event(), threading.Event(), []

    def fail(texts: Any) -> None:
        inserting.set()
        assert go_on.wait(30)
        raise MemoryError("no more")

    monkeypatch.setattr(source.trie, "insert_many", fail)
    # What the thread does behind the lock takes its time.
    monkeypatch.setattr(ngram_source.logger, "exception", lambda text: waiting.join(30))
    source.add([1, 2, 9])
    assert inserting.wait(30)
    waiting = threading.Thread(target=lambda: found.append(first_guesses(source, [1, 2])))
    waiting.start()
    go_on.set()
    waiting.join(30)
    assert source.join(30)
    assert found == [[]]
    assert len(source.trie) == 0


def test_what_is_still_queued_at_the_end_does_not_hold_it_up():
    source = make_source()
    source.add(list(range(1000)))
    source.stop()
    source.start()
    assert source.join(30)


def test_the_pace_follows_the_time_that_insertions_take():
    source = make_source()
    source._at_once = 100
    fitting = min(512, _HOLD_NS // 1000)
    source._pace(100, 10 * _HOLD_NS)
    slow = source._at_once
    assert 1 <= slow <= 10
    for _ in range(50):
        source._pace(source._at_once, source._at_once * 1000)
    assert source._at_once == fitting
    # A short piece tells nothing of what a long one would take.
    source._pace(1, 100)
    assert source._at_once == fitting
    source._pace(1, 10**10)
    assert source._at_once == 1


def test_corpora_are_queued_piece_by_piece_and_counted_as_one_text():
    source = make_source(capacity=100_000)
    source.start()
    text = np.array([token % 7 for token in range(10_000)], np.int32)
    source.add_corpus(text, threading.Event())  # pyright: ignore[reportArgumentType]
    assert source.settle()
    assert count_of(source, [0, 1, 2, 3, 4]) == len([at for at in range(0, 10_000, 7) if at + 5 <= 10_000])
    assert source.counts.corpus_tokens == 10_000
    end(source)


def test_memory_is_made_ready_ahead_without_harm():
    trie = NgramTrie(capacity=200_000, max_trie_depth=DEPTH)
    trie.insert_many([([1, 2, 3], 0)])
    for _ in range(3):
        trie.make_ready(50_000)
        trie.insert_many([([1, 2, 3, 4], 3)])
    trie.make_ready(10**9)
    source = NgramSource(trie, NgramConfig())
    assert count_of(source, [1, 2, 3]) == 1
    assert count_of(source, [2, 3, 4]) == 3
