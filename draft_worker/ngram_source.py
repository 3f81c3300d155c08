"""The trie as all sessions of a worker share it: matches now, insertions when there is time.

Insertions are queued and done by a thread of their own, a few tokens at a time: a match waits for at most those few.
How many they are follows from how long they take, so that it holds on any machine, with numba and without. A match that
waits is next; without that, the inserting thread would take the lock again before the other one has woken up. And where
the system has put the inserting thread to sleep in the middle of its few, a match is put off instead of waiting.

The queue is bounded in tokens. What does not fit is dropped and counted: a trie that has not seen a text guesses worse,
and nothing else. If the inserting thread fails, what was inserted is forgotten, and matches find nothing from then on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from outrider.compiled import IS_COMPILED
from outrider.draft_worker.ngram_tree import GuessColumns, NgramConfig, TextTails, guess_columns
from outrider.draft_worker.ngram_trie import NgramTrie

logger = logging.getLogger(__name__)

# How long the lock is held for insertions, about; a match waits for as long at most. Fewer tokens at once cost more
# each, for the runs that they go on with are looked for anew: plain Python would get nowhere.
_HOLD_NS = 400_000 if IS_COMPILED else 1_000_000
# Tokens that are inserted at once: bounds of what the time above says.
_FEWEST, _MOST = 1, 512
# Memory is made ready for so many tokens, each of which is new in every context and makes a node of every depth.
_READY_TOKENS = 2048
# Tokens of a corpus that are queued at a time.
_CORPUS_PIECE = 4096
# In plain Python an insertion holds the interpreter, which growth and messages need: it rests as long as it has worked.
_REST = 0.0 if IS_COMPILED else 1.0
# How often a thread that waits for the queue looks.
_POLL_S = 0.005

Text = tuple[Sequence[int], int]


@dataclass(kw_only=True)
class NgramCounts:
    """Counters since start; each is written by one thread alone.

    Attributes:
        matches: texts that were looked for.
        hits: of these, texts of which a suffix was found that goes on.
        matched_tokens: of the longest such suffixes, in sum.
        guessed_nodes: of all trees.
        match_ns: that looking took, with waiting.
        longest_wait_ns: that looking waited for an insertion.
        longest_hold_ns: that an insertion held the lock, in its thread's CPU time: what a match waits for at most on a
            machine that has nothing else to do.
        most_at_once: tokens that were inserted under one lock.
        put_off: times that looking waited too long, and nothing was looked for.
        queued_tokens: of sessions' texts that were accepted for insertion.
        corpus_tokens: likewise, of corpora.
        inserted_tokens: of those, what is in the trie.
        dropped_tokens: of texts that did not fit the queue.
    """

    matches: int = 0
    hits: int = 0
    matched_tokens: int = 0
    guessed_nodes: int = 0
    match_ns: int = 0
    longest_wait_ns: int = 0
    longest_hold_ns: int = 0
    most_at_once: int = 0
    put_off: int = 0
    queued_tokens: int = 0
    corpus_tokens: int = 0
    inserted_tokens: int = 0
    dropped_tokens: int = 0


class NgramSource:
    """A trie that one thread matches in while another one inserts.

    Args:
        trie: nobody else touches it from now on; given up if the inserting thread fails.
        config: how trees are made.
        queue_tokens: most tokens that wait to be inserted.
        patience_s: longest that a match waits, in each of two turns, before it is put off.

    Attributes:
        counts: what happened so far.
        failed: whether the inserting thread has come to grief.
    """

    def __init__(
        self, trie: NgramTrie, config: NgramConfig, *, queue_tokens: int = 2_000_000, patience_s: float = 0.0007
    ) -> None:
        self.trie, self.config = trie, config
        self.counts = NgramCounts()
        self.failed = False
        self._queue_tokens, self._patience_s = queue_tokens, patience_s
        # None ends the thread.
        self._queue: SimpleQueue[Text | None] = SimpleQueue()
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._at_once = 8
        # In the place of one whose links may be half made.
        self._nothing = NgramTrie(capacity=2 * trie.max_trie_depth, max_trie_depth=trie.max_trie_depth)
        self._thread = threading.Thread(target=self._run, name="ngram-insert", daemon=True)

    @property
    def suffix_tokens(self) -> int:
        """Tokens before a text's continuation that its insertion needs, and the most that are matched."""
        return self.trie.max_trie_depth - 1

    @property
    def waiting_tokens(self) -> int:
        """Queued and not inserted yet, about."""
        return self.counts.queued_tokens + self.counts.corpus_tokens - self.counts.inserted_tokens

    def start(self) -> None:
        """Starts inserting. What is slow at first (compiling) is done here."""
        if not IS_COMPILED:
            logger.warning("n-grams grow in plain Python, several times slower: numba is not installed")
        tiny = NgramTrie(capacity=self._nothing.capacity, max_trie_depth=self.trie.max_trie_depth)
        tiny.insert_many([([1, 2, 1, 2], 0)])
        guess_columns(tiny, TextTails.of([[1, 2]], self.suffix_tokens), self.config)
        self.trie.make_ready(_READY_TOKENS * self.trie.max_trie_depth)
        self._thread.start()

    def stop(self) -> None:
        """Ends inserting; what waits is not inserted any more."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for the inserting thread's end; False if it does not come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def add(self, tokens: Sequence[int], *, start: int = 0) -> bool:
        """Queues a text, or the continuation of one; never waits. One thread calls it.

        Args:
            tokens: not changed by anybody from now on.
            start: tokens before it are only context: the last `suffix_tokens` of what was queued before.

        Returns:
            Whether there was room for it.
        """
        new = len(tokens) - start
        if self.failed or self.waiting_tokens + new > self._queue_tokens:
            self.counts.dropped_tokens += new
            return False
        self.counts.queued_tokens += new
        self._queue.put((tokens, start))
        return True

    def add_corpus(self, tokens: Sequence[int], stopped: threading.Event) -> None:
        """Queues a text piece by piece, each when little else waits; sessions' texts are not held up by it.

        Args:
            tokens: whole.
            stopped: ends the waiting.
        """
        for start in range(0, len(tokens), _CORPUS_PIECE):
            while self.waiting_tokens > _CORPUS_PIECE and not self.failed:
                if stopped.wait(_POLL_S):
                    return
            if self.failed:
                # Nobody empties the queue any more.
                return
            first = max(0, start - self.suffix_tokens)
            piece = tokens[first : start + _CORPUS_PIECE]
            self.counts.corpus_tokens += len(piece) - (start - first)
            self._queue.put((piece, start - first))

    def guess(self, texts: TextTails) -> GuessColumns | None:
        """What may follow each text, by what is in the trie now; None if it has to be asked again, soon.

        Args:
            texts: their tails, `suffix_tokens` wide.
        """
        counts, began = self.counts, time.perf_counter_ns()
        is_mine = self._take_lock()
        waited = time.perf_counter_ns() - began
        counts.longest_wait_ns = max(counts.longest_wait_ns, waited)
        if not is_mine:
            counts.put_off += 1
            return None
        try:
            found = guess_columns(self._nothing if self.failed else self.trie, texts, self.config)
        finally:
            self._lock.release()
        nodes, matched = found.found.T.tolist()
        counts.matches += len(nodes)
        counts.hits += len(matched) - matched.count(0)
        counts.guessed_nodes += sum(nodes)
        counts.matched_tokens += sum(matched)
        counts.match_ns += time.perf_counter_ns() - began
        return found

    def _take_lock(self) -> bool:
        """In turn with the inserting thread, which takes both for each of its few tokens; False: not in time."""
        if not self._next.acquire(timeout=self._patience_s):
            return False
        try:
            return self._lock.acquire(timeout=self._patience_s)
        finally:
            self._next.release()

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Waits until everything that was queued is inserted; False if that does not come in time."""
        deadline = time.monotonic() + timeout_s
        while self.waiting_tokens > 0 and not self.failed:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return not self.failed

    def _run(self) -> None:
        try:
            self._insert_all()
        except Exception:
            # Guesses are all that is lost.
            logger.exception("n-grams are inserted no more, and forgotten: their thread has failed")
            self.failed = True
            with self._lock:
                self.trie = self._nothing

    def _insert_all(self) -> None:
        waiting: deque[Text] = deque()
        while True:
            if not waiting:
                text = self._queue.get()
                if text is None:
                    return
                waiting.append(text)
            if not self._receive(waiting):
                return
            pieces = self._pieces(waiting)
            if not pieces:
                continue
            with self._turn():
                began, cpu_began = time.perf_counter_ns(), time.thread_time_ns()
                self.trie.insert_many(pieces)
                took, held = time.perf_counter_ns() - began, time.thread_time_ns() - cpu_began
            new = sum(len(tokens) - start for tokens, start in pieces)
            counts = self.counts
            counts.inserted_tokens += new
            counts.longest_hold_ns = max(counts.longest_hold_ns, held)
            counts.most_at_once = max(counts.most_at_once, new)
            self._pace(new, took)
            if _REST:
                time.sleep(_REST * took * 1e-9)
            self.trie.make_ready(_READY_TOKENS * self.trie.max_trie_depth)

    def _receive(self, waiting: deque[Text]) -> bool:
        """Takes what is queued, as far as it is inserted at once; False when that is to end."""
        while len(waiting) < self._at_once:
            try:
                text = self._queue.get_nowait()
            except Empty:
                return True
            if text is None:
                return False
            waiting.append(text)
        return True

    def _pieces(self, waiting: deque[Text]) -> list[Text]:
        """The next few tokens of what waits, each piece with the tokens before it."""
        pieces, room = list[Text](), self._at_once
        while waiting and room > 0:
            tokens, start = waiting.popleft()
            end = min(start + room, len(tokens))
            if end < len(tokens):
                waiting.appendleft((tokens, end))
            if end > start:
                first = max(0, start - self.suffix_tokens)
                pieces.append((tokens[first:end], start - first))
            room -= end - start
        return pieces

    def _pace(self, tokens: int, took_ns: int) -> None:
        """How many tokens go at once from now on: fewer at once, more by and by."""
        fitting = tokens * _HOLD_NS // max(took_ns, 1)
        if fitting < self._at_once:
            self._at_once = max(_FEWEST, fitting)
        elif tokens >= self._at_once:
            self._at_once = min(_MOST, fitting, self._at_once + self._at_once // 4 + 1)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock, unless a match waits for it: that goes first."""
        with self._next:
            self._lock.acquire()
        try:
            yield
        except BaseException:
            # Its links may be half made: whoever has the lock next may not follow them.
            self.failed = True
            raise
        finally:
            self._lock.release()
