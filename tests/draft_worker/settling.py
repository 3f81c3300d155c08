"""Waiting for the thread that inserts into an n-gram trie."""

import time

from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie


def settle(trie: SharedTrie) -> bool:
    """Wait until everything queued is inserted; return whether it is, in time."""
    deadline = time.monotonic() + 60
    while trie.waiting_tokens > 0 and not trie.failed and time.monotonic() < deadline:
        time.sleep(0.005)
    return trie.waiting_tokens == 0 and not trie.failed
