"""The n-gram drafter: proposals of a shared trie become nodes of its sessions' trees, after every open and commit.

All sessions that were opened or committed to since the last time are matched together, in one call. Most proposals are
in the tree already; only new nodes are sent. Prompts and committed tokens are queued for the trie.

Trees are rows of a candidate pool (`outrider.kernels.pool`) on the CPU: commits re-root them, proposals are grafted as
records of growth. Under coupled noise, a proposal is right as often as the target chooses what it chose before; the
rule matters to the estimates alone. Rejection needs the distribution that a node was drawn from, which a trie has not:
such sessions only feed it. A grammar may forbid what is proposed; the target knows.

Knows neither proto nor grpc. Not thread-safe.
"""

import functools
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outrider.draft_worker.drafters.ngram import tree_loops
from outrider.draft_worker.drafters.ngram.calibration import NgramCalibration, rule_number
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, TextTails
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, Key, SessionStart
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import OutOfSlots
from outrider.kernels.pool.columns import MAX_STOPS, Pool, PoolArrays
from outrider.kernels.pool.graft import graft_reference
from outrider.kernels.pool.re_root import re_root_reference
from outrider.kernels.pool.records import WORDS, Records, Verdict
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.wire import MOST_NODES

# Times that a match is followed by one of the text with the likeliest leaf, so that the next commit finds a tree that
# goes on.
_LOOKS_AHEAD = 2


@dataclass(kw_only=True, slots=True)
class _Session:
    start: SessionStart
    tokens: list[int]  # committed
    row: int | None = None  # of the pool; None if the session only feeds the trie
    speaks: bool  # whether a match without new nodes is reported: nobody else answers the session's commits
    pending: list[int] = field(default_factory=list)  # committed tokens that the pool has not got yet


class NgramDrafter:
    """All sessions of a worker that grow by its trie.

    Args:
        max_sessions: most sessions that have a tree.
        max_live_nodes: most nodes of a session, whatever its credit, up to 256.
        min_value: nodes of a lower value are not proposed.
    """

    source = GrowthSource.NGRAM

    def __init__(
        self,
        trie: SharedTrie,
        *,
        vocab_size: int,
        max_model_len: int,
        max_sessions: int = 64,
        max_live_nodes: int = MOST_NODES,
        min_value: float = 0.01,
    ) -> None:
        self.trie, self.vocab_size, self.max_model_len = trie, vocab_size, max_model_len
        self._max_live_nodes, self._min_value, rows = min(max_live_nodes, MOST_NODES), min_value, max_sessions
        self.calibration = NgramCalibration()
        self.steps = 0  # matches with growth so far
        self.wake: Callable[[], None] = lambda: None  # called when a match was put off
        # Keys of sessions that need no other drafter now: most of a round's depth is expected to be accepted.
        self.leading: set[Key] = set()
        self._sessions: dict[Key, _Session] = {}
        # Opened or committed to since they were matched.
        self._due: dict[Key, _Session] = {}
        # All growth continues the root or an entry, so nothing else of the trail is needed.
        self._pool = Pool.allocate(sessions=rows, max_len=max_model_len, capacity=MOST_NODES, places=1, trail=1)
        self._columns = PoolArrays(*self._pool.arrays)
        self._free_rows = list(range(rows))[::-1]
        # Of each row: the id of its next node, its rule's number, and the calibration's buckets of its entries.
        self._next_ids, self._rules = np.ones(rows, np.int32), np.zeros(rows, np.int64)
        self._buckets = np.zeros((rows, MOST_NODES), np.int64)
        # `graft` collects commits of records; there are none.
        self._commits = torch.zeros(rows, 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def open(self, start: SessionStart) -> None:
        """Open a session, of a key that none is open under; `Drafters` has checked what it begins with.

        A shared session that finds no row free only feeds the trie.

        Raises:
            OutOfSlots: nobody else grows the session, and no row is free.
        """
        assert start.key not in self._sessions
        session = _Session(start=start, tokens=[*start.prompt, *start.output], speaks=not start.is_shared)
        if start.sampling.rule is not VerificationRule.REJECTION:
            if self._free_rows:
                session.row = self._open_row(start, session.tokens)
            elif session.speaks:
                raise OutOfSlots(f"all {self._pool.sessions} rows are taken: raise max_num_seqs")
        self._sessions[start.key] = self._due[start.key] = session
        self.trie.add(tuple(session.tokens))

    def commit(self, key: Key, tokens: Sequence[int]) -> bool:
        """Commit tokens that continue an open session, one at least; return whether its tree is dropped."""
        session = self._sessions[key]
        session.tokens += tokens
        if session.row is not None:
            session.pending += tokens
        context = min(self.trie.suffix_tokens, len(session.tokens) - len(tokens))
        self.trie.add(session.tokens[-len(tokens) - context :], start=context)
        self._due[key] = session
        self.leading.discard(key)
        return session.start.is_sync

    def live_tree(self, key: Key) -> list[Growth]:
        """Return all nodes of an open session's tree, as one growth."""
        session, columns, growth = self._sessions[key], self._columns, Growth(GrowthSource.NGRAM)
        start, row, count = session.start, session.row or 0, 0
        if session.row is not None:
            self._re_root([session])
            count = columns.count[row]
        # The root is the parent -1.
        ids = np.append(columns.ids[row, :count, 0], 0)
        growth.add(
            start, len(session.tokens), ids[:-1].tolist(), ids[columns.parent[row, :count]].tolist(),
            columns.token[row, :count].tolist(), columns.acceptance[row, :count].tolist(),
            complete=key in self.leading or (start.is_sync and session.speaks and key not in self._due),
        )  # fmt: skip
        return [growth]

    def close(self, key: Key) -> None:
        """Close the session if it is open."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self.leading.discard(key)
        self._due.pop(key, None)
        if session.row is not None:
            # The calibration learns from the last commits too.
            self._re_root([session])
            records = Records()
            records.close(session.row, self._generation(session.row))
            self._graft(records.array())
            self._free_rows.append(session.row)

    def match(self, left_out: Container[Key] = ()) -> Growth | None:
        """Return the new nodes of all sessions that were opened or committed to; None if there is nothing to report.

        Args:
            left_out: keys of sessions that stay due.
        """
        began = time.perf_counter_ns()
        due = [session for key, session in self._due.items() if key not in left_out]
        growth = Growth(GrowthSource.NGRAM)
        for session in due:
            del self._due[session.start.key]
            if session.row is None and session.speaks:
                growth.add(session.start, len(session.tokens), (), (), (), (), complete=session.start.is_sync)
        growing = [session for session in due if session.row is not None]
        if growing:
            self._grow(growing, growth)
        if not growth.counts:
            return None
        self.steps += 1
        growth.step_ns = time.perf_counter_ns() - began
        return growth

    def _grow(self, growing: Sequence[_Session], growth: Growth) -> None:
        self._re_root(growing)
        rows = np.array([session.row for session in growing])
        texts = TextTails.of([session.tokens for session in growing], self.trie.suffix_tokens)
        nodes = self._look(rows, np.full(len(rows), -1), texts)
        if nodes is None:
            self._due |= {session.start.key: session for session in growing}
            self.wake()
            return
        looks, is_async = [nodes], np.array([not session.start.is_sync for session in growing])
        leads, leaves = np.empty(len(rows), np.bool_), np.empty(len(rows), np.int64)
        longer = TextTails(np.empty_like(texts.tails), np.empty_like(texts.lengths))
        while True:
            tree_loops.follow_likeliest(
                self._pool.arrays, rows, texts.tails, texts.lengths, leads, leaves, longer.tails, longer.lengths
            )
            goes_on = is_async & (leaves >= 0)
            if len(looks) > _LOOKS_AHEAD or not goes_on.any():
                break
            nodes = self._look(rows[goes_on], leaves[goes_on], longer[goes_on])
            if nodes is None:
                break
            looks.append(nodes)
        self._report(growing, rows, np.concatenate(looks), (leads & is_async).tolist(), growth)

    def _re_root(self, growing: Sequence[_Session]) -> None:
        """Commit what is pending."""
        committed = [session for session in growing if session.pending]
        if not committed:
            return
        tokens = np.zeros((self._pool.sessions, max(len(session.pending) for session in committed)), np.int32)
        num_tokens = np.zeros(self._pool.sessions, np.int32)
        for session in committed:
            tokens[session.row, : len(session.pending)] = session.pending
            num_tokens[session.row] = len(session.pending)
            session.pending.clear()
        columns, ids = self._columns, self._columns.ids[:, :, 0].copy()
        entries = columns.count, columns.parent, columns.token, columns.acceptance
        self.calibration.observe(entries, self._buckets, tokens, num_tokens)
        re_root_reference(self._pool, torch.from_numpy(tokens), torch.from_numpy(num_tokens))
        tree_loops.follow_entries(self._pool.arrays, num_tokens, ids, self._buckets)
        # A sync round's tree is made afresh: the coordinator keeps nothing of the last one.
        records = Records()
        for session in committed:
            if session.row is not None and session.start.is_sync:
                records.forget(session.row, self._generation(session.row), place=0)
        self._graft(records.array())

    def _look(self, rows: Any, tops: Any, texts: TextTails) -> Any:
        """Grow rows below the entries `tops` by what may follow the texts; return the records, None if put off."""
        proposals = self.trie.propose(texts)
        if proposals is None:
            return None
        buckets, estimates = self.calibration.estimate(proposals, self._rules[rows])
        records = np.empty((buckets.size, WORDS), np.int32)
        count = tree_loops.new_nodes(
            self._pool.arrays, rows, tops, proposals.tokens, proposals.parents, proposals.found, estimates, buckets,
            self._min_value, self._next_ids, self._buckets, records, records.view(np.float32),
        )  # fmt: skip
        self._graft(records[:count])
        return records[:count]

    def _report(
        self, growing: Sequence[_Session], rows: Any, records: Any, leads: Sequence[bool], growth: Growth
    ) -> None:
        records = records[records[:, 1].argsort(kind="stable")]
        begins, ends = (records[:, 1].searchsorted(rows, side).tolist() for side in ("left", "right"))
        node_ids, parents = (records[:, word].tolist() for word in (3, 4))
        tokens, acceptance = records[:, 6].tolist(), records.view(np.float32)[:, 7].tolist()
        for session, begin, end, is_leading in zip(growing, begins, ends, leads, strict=True):
            start, span = session.start, slice(begin, end)
            if is_leading:
                self.leading.add(start.key)
            if session.speaks or is_leading or begin < end:
                growth.rows += end - begin
                growth.num_sessions += 1
                growth.add(
                    start, len(session.tokens), node_ids[span], parents[span], tokens[span], acceptance[span],
                    complete=is_leading or (start.is_sync and session.speaks),
                )  # fmt: skip

    def _open_row(self, start: SessionStart, tokens: Sequence[int]) -> int:
        columns, row = self._columns, self._free_rows.pop()
        columns.history[row, : len(tokens)] = tokens
        # Below stop tokens beyond the pool's bound, nodes are proposed in vain.
        stops = [token for token in start.stop_ids if token < self.vocab_size][:MAX_STOPS]
        columns.stops[row, : len(stops)], columns.stops[row, len(stops) :] = stops, -1
        columns.max_nodes[row] = min(start.limits.max_live_nodes, self._max_live_nodes)
        columns.max_depth[row] = min(start.limits.max_depth, MOST_NODES)
        self._rules[row], self._next_ids[row] = rule_number(start.sampling), 1
        end, records = start.end(self.max_model_len), Records()
        records.open(row, self._generation(row) + 1, length=len(tokens), cached=0, end=end, allow=end)
        self._graft(records.array())
        return row

    def _graft(self, records: Any) -> None:
        if not len(records):
            return
        count, verdicts = torch.tensor([len(records)]), torch.empty(len(records), dtype=torch.int32)
        graft_reference(self._pool, torch.from_numpy(records), count, verdicts, *self._commits)
        outcomes = set(verdicts.tolist())
        assert outcomes <= {Verdict.EDITED, Verdict.APPENDED}, f"verdicts {outcomes} on the drafter's own growth"

    def _generation(self, row: int) -> int:
        return int(self._columns.generation[row])


@functools.cache
def warm_up() -> None:
    """Compile the loops, or load what was compiled, before anybody waits for it."""
    trie = SharedTrie(NgramTrie(capacity=100, max_trie_depth=4), ProposalConfig())
    trie.trie.insert(([0, 1, 0, 1], 0))
    drafter = NgramDrafter(trie, vocab_size=2, max_model_len=9, max_sessions=1)
    sampling, limits = SamplingSpec(max_new_tokens=8), GrowthLimits()
    start = SessionStart(key=(0, 0), owner=None, epoch=1, prompt=[0], output=(), sampling=sampling, limits=limits)
    drafter.open(start)
    drafter.match()
    drafter.commit(start.key, [1])
    drafter.match()
