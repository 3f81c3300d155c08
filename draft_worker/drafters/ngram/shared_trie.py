"""The trie that all sessions of a worker share: proposals at once, insertions on a thread of their own.

Texts are queued and inserted a few tokens at a time, so a proposal waits for those few at most. Their number follows
from how long insertions take. A waiting proposal is next: without that, the inserting thread would take the lock again
before the other thread has woken up. If the system suspends the inserting thread while it holds the lock, the proposal
is put off instead of waiting.

The queue is bounded in tokens; texts that do not fit are dropped and counted, which costs acceptance and nothing else.
If the inserting thread fails, the trie is dropped, and nothing is proposed from then on.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, Proposals, TextTails, propose
from outrider.draft_worker.drafters.ngram.trie import NgramTrie

logger = logging.getLogger(__name__)

HOLD_NS = 400_000
"""Time that an insertion may hold the lock, about."""
MAX_AT_ONCE = 512
"""Most tokens that are inserted at a time."""
# Memory is made ready for this many tokens, each of which may make a node of every depth.
_READY_TOKENS = 2048
# Tokens of a corpus that are queued at a time.
_CORPUS_PIECE = 4096
# How often the thread that queues a corpus looks whether the queue has room.
_POLL_S = 0.005

# Tokens, and how many of the first are only context.
_Text = tuple[Sequence[int], int]


def next_at_once(at_once: int, inserted: int, took_ns: int) -> int:
    """Return how many tokens to insert next, after `inserted` of up to `at_once` tokens took `took_ns`.

    Fewer at once if it took too long, more by and by otherwise.
    """
    fitting = inserted * HOLD_NS // max(took_ns, 1)
    if fitting < at_once:
        return max(1, fitting)
    # A short piece does not tell how long a whole one takes.
    return at_once if inserted < at_once else min(MAX_AT_ONCE, fitting, at_once + at_once // 4 + 1)


@dataclass(kw_only=True)
class TrieCounts:
    """Counts since the start; one thread writes each of them."""

    matches: int = 0  # texts for which proposals were asked
    hits: int = 0  # texts of which a suffix was found that continues
    matched_tokens: int = 0  # sum of the lengths of the longest such suffixes
    proposed_nodes: int = 0
    match_ns: int = 0  # time that asking took, waiting included
    longest_wait_ns: int = 0  # that a proposal waited for an insertion
    most_at_once: int = 0  # tokens that were inserted under one lock
    put_off: int = 0  # times that a proposal was put off
    queued_tokens: int = 0  # of sessions
    corpus_tokens: int = 0  # queued, of corpora
    inserted_tokens: int = 0  # of both
    dropped_tokens: int = 0  # of texts that did not fit the queue


class SharedTrie:
    """A trie in which one thread matches while another one inserts.

    Args:
        trie: used by nobody else; replaced by an empty one if the inserting thread fails.
        queue_tokens: most tokens that wait to be inserted.
        patience_s: longest that a proposal waits, in each of two turns, before it is put off.
    """

    def __init__(
        self, trie: NgramTrie, config: ProposalConfig, *, queue_tokens: int = 2_000_000, patience_s: float = 0.0007
    ) -> None:
        self.trie, self.config, self.patience_s = trie, config, patience_s
        self.counts = TrieCounts()
        self.failed = False
        self._queue_tokens = queue_tokens
        # None wakes the thread to end it.
        self._queue: SimpleQueue[_Text | None] = SimpleQueue()
        self._stopped = False
        # What is left of a text of which the first tokens are inserted.
        self._rest: _Text | None = None
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._at_once = 8
        self._empty = NgramTrie(capacity=2 * trie.max_trie_depth, max_trie_depth=trie.max_trie_depth)
        self._thread = threading.Thread(target=self._run, name="ngram-insert", daemon=True)

    @property
    def suffix_tokens(self) -> int:
        """Longest suffix that is matched, and the context that a continued text's insertion needs, in tokens."""
        return self.trie.max_trie_depth - 1

    @property
    def waiting_tokens(self) -> int:
        """Tokens queued and not inserted yet, about."""
        return self.counts.queued_tokens + self.counts.corpus_tokens - self.counts.inserted_tokens

    def start(self) -> None:
        """Start the inserting thread. `drafter.warm_up` compiles what it runs; call it before."""
        self.trie.make_ready(_READY_TOKENS * self.trie.max_trie_depth)
        self._thread.start()

    def stop(self) -> None:
        """Tell the inserting thread to end; what is still queued is not inserted."""
        self._stopped = True
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the inserting thread to end; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def add(self, tokens: Sequence[int], *, start: int = 0) -> bool:
        """Queue a text, or the continuation of one, without waiting; return whether there was room. Of one thread.

        Args:
            tokens: not changed by anybody afterwards.
            start: tokens before it are context: the last `suffix_tokens` of what was queued before.
        """
        new = len(tokens) - start
        if self.failed or self.waiting_tokens + new > self._queue_tokens:
            self.counts.dropped_tokens += new
            return False
        self.counts.queued_tokens += new
        self._queue.put((tokens, start))
        return True

    def add_corpus(self, tokens: Sequence[int], stopped: threading.Event) -> None:
        """Queue a long text in pieces, each when little else waits, so that sessions' texts are not delayed."""
        for start in range(0, len(tokens), _CORPUS_PIECE):
            while self.waiting_tokens > _CORPUS_PIECE and not self.failed:
                if stopped.wait(_POLL_S):
                    return
            if self.failed:
                return
            first = max(0, start - self.suffix_tokens)
            piece = tokens[first : start + _CORPUS_PIECE]
            self.counts.corpus_tokens += len(piece) - (start - first)
            self._queue.put((piece, start - first))

    def propose(self, texts: TextTails) -> Proposals | None:
        """Return what may follow each text; None if an insertion takes too long: ask again soon."""
        counts, began = self.counts, time.perf_counter_ns()
        has_lock = self._take_lock()
        counts.longest_wait_ns = max(counts.longest_wait_ns, time.perf_counter_ns() - began)
        if not has_lock:
            counts.put_off += 1
            return None
        try:
            proposals = propose(self._empty if self.failed else self.trie, texts, self.config)
        finally:
            self._lock.release()
        nodes, matched = proposals.found.T.tolist()
        counts.matches += len(nodes)
        counts.hits += len(matched) - matched.count(0)
        counts.proposed_nodes += sum(nodes)
        counts.matched_tokens += sum(matched)
        counts.match_ns += time.perf_counter_ns() - began
        return proposals

    def _take_lock(self) -> bool:
        # In turn with the inserting thread, which takes both locks for each of its pieces.
        if not self._next.acquire(timeout=self.patience_s):
            return False
        try:
            return self._lock.acquire(timeout=self.patience_s)
        finally:
            self._next.release()

    def _run(self) -> None:
        try:
            self._insert_all()
        except Exception:
            # Only proposals are lost.
            logger.exception("n-grams are inserted no more, and forgotten: their thread has failed")
            self.failed = True
            with self._lock:
                self.trie = self._empty

    def _insert_all(self) -> None:
        while pieces := self._next_pieces():
            # Behind a proposal that waits for the lock.
            with self._next:
                self._lock.acquire()
            try:
                began = time.perf_counter_ns()
                self.trie.insert(*pieces)
                took = time.perf_counter_ns() - began
            except BaseException:
                # Links may be half made: nobody may follow them once the lock is released.
                self.failed = True
                raise
            finally:
                self._lock.release()
            new = sum(len(tokens) - start for tokens, start in pieces)
            counts = self.counts
            counts.inserted_tokens += new
            counts.most_at_once = max(counts.most_at_once, new)
            self._at_once = next_at_once(self._at_once, new, took)
            self.trie.make_ready(_READY_TOKENS * self.trie.max_trie_depth)

    def _next_pieces(self) -> list[_Text]:
        """Return the next few queued tokens, each piece of a text with its context; none if the thread is to end."""
        pieces, room = list[_Text](), self._at_once
        while room > 0 and not self._stopped:
            text, self._rest = self._rest, None
            try:
                tokens, start = text or self._queue.get(block=not pieces) or ((), 0)
            except Empty:
                break
            end = min(start + room, len(tokens))
            if end < len(tokens):
                self._rest = (tokens, end)
            if end > start:
                first = max(0, start - self.suffix_tokens)
                pieces.append((tokens[first:end], start - first))
            room -= end - start
        return [] if self._stopped else pieces
