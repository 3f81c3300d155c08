"""The pool's operators against the naive tree, over interleavings that a service would and would not produce."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from tests.kernels.pool.naive_tree import Limits, NaivePool, NaiveSession, Node, Row, assert_invariants, assert_same

from outrider.kernels.pool.append import append
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import COMMITTED, PADDING, ROOT, Packed, pack
from outrider.kernels.pool.re_root import re_root
from outrider.kernels.pool.records import RecordKind, Records, Verdict
from outrider.kernels.pool.select import GAIN_SCALE, SHORT_GAP, Selection, select

MAX_LEN = 128
VOCABULARY = 3
ACCEPTANCES = [0.0, 0.1, 0.3, 0.7, 0.9, 1.0]
SCRAP_SLOT = 99_999
BUCKETS = [(4, 2, 3, 9), (9, 3, 6, 2), (80, 4, 60, 70), (40, 4, 20, 12)]
"""Rows, sessions, most rows of a session, and most entries."""
MOST_COMMITS = 6
ANY_ENTRY = Limits()
EDITS = 0.05
"""Chance of a row edit in a draft worker's step."""
TAKEN = {Verdict.APPENDED, Verdict.MERGED, Verdict.ABSORBED, Verdict.DUPLICATE}


class Both:
    """A pool and its naive model. Every operator is applied to both, and has to leave them alike."""

    def __init__(
        self,
        *,
        sessions: int,
        capacity: int,
        places: int,
        trail: int,
        node_slots: int | None = None,
        regrows: bool = False,
    ) -> None:
        self.pool = Pool.allocate(
            sessions=sessions,
            max_len=MAX_LEN,
            capacity=capacity,
            places=places,
            trail=trail,
            node_slots=node_slots,
        )
        self.naive = NaivePool(
            sessions=sessions,
            capacity=capacity,
            places=places,
            trail=trail,
            most_commits=MOST_COMMITS,
            owns_slots=node_slots is not None,
            regrows=regrows,
        )
        self._regrows = regrows
        self._selection = Selection.allocate(self.pool, BUCKETS)
        self._packed = [Packed.allocate(self.pool, bucket, scrap_slot=SCRAP_SLOT) for bucket in BUCKETS]
        self._commits = self._ints([[-1] * MOST_COMMITS] * sessions)
        self._num_commits = self._ints([-1] * sessions)
        self._turn = 0
        if node_slots is not None and self.pool.nodes is not None:
            # A drafter has all its slots before the first round.
            self.pool.nodes.free.copy_(torch.arange(node_slots))
            self.pool.nodes.free_tail.fill_(node_slots)
            self.naive.free.extend(range(node_slots))

    def lengths(self) -> list[int]:
        return self.pool.length.tolist()

    def lost(self) -> list[list[bool]]:
        return self.pool.lost.tolist()

    def copy(
        self,
        row: int,
        history: Sequence[int],
        *,
        stops: Iterable[int] = (),
        min_end: int = 0,
        max_nodes: int = 99,
        max_depth: int = 99,
    ) -> None:
        """Fill the row's wide columns, as the host does before it opens the row."""
        pool, session = self.pool, self.naive.sessions[row]
        session.history, session.stops = list(history), set(stops)
        pool.history[row, : len(history)] = torch.tensor(history, dtype=torch.int32)
        pool.stops[row] = -1
        pool.stops[row, : len(session.stops)] = torch.tensor(sorted(session.stops), dtype=torch.int32)
        pool.min_end[row], pool.max_nodes[row], pool.max_depth[row] = min_end, max_nodes, max_depth
        session.min_end, session.max_nodes, session.max_depth = min_end, max_nodes, max_depth
        if pool.nodes is None:
            pool.table[row] = torch.arange(MAX_LEN, dtype=torch.int32) + 1000 * (row + 1)
            session.table = dict(enumerate(pool.table[row].tolist()))

    def run(self, row: int) -> None:
        """Let the row of a target's pool run; its prompt has KV by now."""
        session = self.naive.sessions[row]
        session.state, session.cached = RowState.RUNNING, session.length - 1
        self.pool.state[row], self.pool.cached[row] = session.state, session.cached

    def graft(self, records: np.ndarray) -> list[Verdict]:
        # Records behind the count, and verdicts of them, are another round's.
        padded = torch.from_numpy(np.concatenate([records, records[:2]]))
        verdicts = torch.full((len(padded),), -1, dtype=torch.int32)
        graft(self.pool, padded, self._ints([len(records)]), verdicts, self._commits, self._num_commits)
        expected = self.naive.graft(records)
        assert [Verdict(verdict) for verdict in verdicts[: len(records)].tolist()] == expected
        commits = [session.commits for session in self.naive.sessions]
        assert self._num_commits.tolist() == [len(tokens) for tokens in commits]
        assert [row[: len(new)] for row, new in zip(self._commits.tolist(), commits, strict=True)] == commits
        self.check()
        return expected

    def commit(self) -> None:
        """Commit the tokens of the records that were grafted last."""
        re_root(self.pool, self._commits, self._num_commits, regrows=self._regrows)
        self.naive.re_root([session.commits for session in self.naive.sessions])
        self.check()

    def step(self, launched: int, *, limits: Limits = ANY_ENTRY, reserved: int = 0) -> list[Row]:
        """Select for a bucket and pack; the rows of the step."""
        selection, packed = self._selection, self._packed[launched]
        selection.least_value.fill_(limits.least_value)
        selection.reserved_sessions.fill_(reserved)
        select(self.pool, selection, launched, children=limits.children, chunk=limits.chunk)
        own_rows = self.naive.own_rows(limits)
        taken, gains = self._expected_selection(launched, own_rows, limits, reserved)
        assert selection.own_rows.tolist() == [own_rows.get(row, 0) for row in range(self.pool.sessions)]
        assert int(selection.needed) == sum(own_rows.values())
        assert selection.gains.tolist() == gains
        assert selection.num_selected.tolist() == [-1 if chosen is None else len(chosen) for chosen in taken]
        assert int(selection.turn) == self._turn
        pack(self.pool, selection, packed)
        rows: list[Row] = []
        for row, (session, chosen) in enumerate(zip(self.naive.sessions, taken, strict=True)):
            if chosen is not None:
                rows += session.rows(row, own_rows[row], chosen, len(rows), self.naive.free)
        assert selection.totals.tolist() == [len(rows), len({row.session for row in rows})]
        assert _packed_rows(self.pool, packed) == rows
        self.check()
        return rows

    def append(self, launched: int, rows: list[Row], rng: random.Random, *, children: int) -> None:
        """Let the rows of a step bring children."""
        size = (BUCKETS[launched][0], children)
        tokens, acceptances = np.full(size, 1, np.int32), np.ones(size, np.float32)
        made, parent_ids = np.zeros(size, np.int32), np.full(size[0], -1, np.int32)
        for row in rows:
            if row.entry >= 0:
                session = self.naive.sessions[row.session]
                session.adopt(session.entries[row.entry], place=0)
        for number, row in enumerate(rows):
            tokens[number] = [rng.choice([token, -1]) for token in rng.sample(range(VOCABULARY), children)]
            acceptances[number] = [rng.choice(ACCEPTANCES) for _ in range(children)]
            session = self.naive.sessions[row.session]
            if row.entry == COMMITTED:
                continue
            parent = session.root if row.entry == ROOT else session.entries[row.entry]
            parent_ids[number] = 0 if row.entry == ROOT else parent.ids[0]
            for child, (token, acceptance) in enumerate(zip(tokens[number], acceptances[number], strict=True)):
                if token < 0:
                    continue
                verdict = session.append(parent, int(token), acceptance, place=0, drafters=1 << 3)
                made[number, child] = parent.children[int(token)].ids[0] if verdict == Verdict.APPENDED else 0
        its_made, its_parent_ids = (self._ints(np.full_like(column, -7).tolist()) for column in (made, parent_ids))
        append(
            self.pool,
            self._packed[launched],
            torch.from_numpy(tokens),
            torch.from_numpy(acceptances),
            its_made,
            its_parent_ids,
            drafter=3,
        )
        assert its_made.tolist() == made.tolist()
        assert its_parent_ids.tolist() == parent_ids.tolist()
        self.check()

    def re_root(self, tokens: Sequence[Sequence[int]]) -> None:
        width = max(1, *(len(new) for new in tokens))
        # What stands behind a row's tokens does not matter.
        padded = self._ints([[*new, *([1] * (width - len(new)))] for new in tokens])
        tree_ends = self._ints([-1] * len(tokens))
        re_root(self.pool, padded, self._ints([len(new) for new in tokens]), tree_ends)
        self.naive.re_root(tokens)
        assert tree_ends.tolist() == [session.tree_end for session in self.naive.sessions]
        self.check()

    def check(self) -> None:
        assert_same(self.pool, self.naive)
        assert_invariants(self.pool)

    def _ints(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def _expected_selection(
        self, launched: int, own_rows: dict[int, int], limits: Limits, reserved: int
    ) -> tuple[list[list[Node] | None], list[int]]:
        """The entries of each row, None for one that takes no part, and the gain of each bucket."""
        taken: list[list[Node] | None] = [None] * self.pool.sessions
        gains, next_turn = [], self._turn
        for bucket, (rows, places, most, most_entries) in enumerate(BUCKETS):
            room = rows if self.pool.nodes is None else min(rows, len(self.naive.free))
            fitting, waits = self.naive.who_fits(room, places - reserved, most, limits, first=self._turn)
            best = self.naive.select(room, fitting, most, most_entries, limits)
            gains.append(self._gain(best) if fitting == own_rows else -1)
            if bucket == launched:
                taken = [chosen if row in fitting else None for row, chosen in enumerate(best)]
                next_turn = self._turn if waits is None else waits
        self._turn = next_turn
        return taken, gains

    def _gain(self, best: list[list[Node]]) -> int:
        values = [
            float(session.value(entry))
            for session, chosen in zip(self.naive.sessions, best, strict=True)
            for entry in chosen
        ]
        # Of doubles, in which this is exact.
        return sum(math.floor(value * GAIN_SCALE + 0.5) for value in values)


def _packed_rows(pool: Pool, packed: Packed) -> list[Row]:
    """The rows of a step, as the naive sessions write them."""
    columns = {
        name: getattr(packed, name).tolist()
        for name in ("tokens", "positions", "slots", "entries", "parents", "sessions", "prefix_len", "pool_rows")
    }
    starts, key_lens, tables = packed.tree_start.tolist(), packed.key_len.tolist(), pool.table.tolist()
    query_start = packed.query_start.tolist()
    rows: list[Row] = []
    for at, (session, words) in enumerate(zip(columns["sessions"], packed.tree_mask.tolist(), strict=True)):
        token, position, slot, entry, parent, prefix = (
            columns[name][at] for name in ("tokens", "positions", "slots", "entries", "parents", "prefix_len")
        )
        if session < 0:
            assert (token, position, slot, entry, prefix, words) == (0, 0, SCRAP_SLOT, PADDING, 0, [0] * len(words))
            assert at >= query_start[-1]
            continue
        assert query_start[session] <= at < query_start[session + 1]
        row = columns["pool_rows"][session]
        bits = [64 * word + bit for word, mask in enumerate(words) for bit in range(64) if mask >> bit & 1]
        keys = [*range(prefix), *(starts[session] + bit for bit in bits)]
        assert len({*keys}) == len(keys) and max(keys) < key_lens[session]
        if pool.nodes is not None:
            assert starts[session] == pool.cached[row]
        slots = frozenset(tables[row][key] for key in keys)
        assert len(slots) == len(keys)
        rows.append(Row(row, entry, token, position, slot, parent, slots))
    assert query_start[0] == 0 and query_start == sorted(query_start) and query_start[-1] == len(rows)
    for session, row in enumerate(columns["pool_rows"]):
        assert (row < 0) == (query_start[session] == query_start[session + 1])
    return rows


def _open_row(both: Both, generations: list[int], row: int, tokens: list[int], min_end: int, **bounds: int) -> None:
    """Open a row of a target's pool, with slots; no token has KV."""
    generations[row] += 1
    both.copy(row, tokens, stops=[2], min_end=min_end, **bounds)
    records = Records()
    records.open(row, generations[row], length=len(tokens), cached=0, end=MAX_LEN, allow=MAX_LEN)
    records.slots(row, generations[row], start=min(len(tokens) + 20, MAX_LEN), slots=[])
    both.graft(records.array())


# Anything at all, in small numbers, so that they meet.


class Noise:
    """Records and commits that no drafter would send in this order, though most of them mean something."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._both = Both(sessions=2, capacity=8, places=2, trail=4)
        # As bit patterns: a count of openings has no sign.
        self._generations = [0, (1 << 31) - 2]
        for row in range(2):
            self._open(row)

    def tick(self) -> None:
        """Some records, or commits."""
        rng = self._rng
        if rng.random() < 0.25:
            self._both.re_root([self._committed(session) for session in self._both.naive.sessions])
            return
        for row, session in enumerate(self._both.naive.sessions):
            if rng.random() < 0.015 or session.length > MAX_LEN - 6 - MOST_COMMITS:
                self._open(row)
        records = Records()
        for _ in range(rng.randint(1, 8)):
            if rng.random() < 0.9:
                self._add_growth(records, rng.randrange(2))
            else:
                self._add_edit(records, rng.randrange(2))
        words = records.array()
        for record in words:
            # Of no known kind, of a row that is not there, or with a number of tokens that no record has.
            if rng.random() < 0.01:
                record[0] = rng.choice([99, *(RecordKind.COMMIT | count << 8 for count in (0, 6, 255))])
            elif rng.random() < 0.01:
                record[1] = rng.choice([-1, 2])
        self._both.graft(words)
        self._both.commit()

    def _open(self, row: int) -> None:
        tokens = self._rng.choices(range(VOCABULARY), k=self._rng.randint(1, 7))
        _open_row(self._both, self._generations, row, tokens, self._rng.randrange(10))
        if self._rng.random() < 0.8:
            self._both.run(row)

    def _committed(self, session: NaiveSession) -> list[int]:
        node: Node | None = session.path[-1]
        tokens = []
        for _ in range(self._rng.choice([0, 1, 1, 2, 6])):
            known = [*node.children] if node is not None else []
            tokens.append(self._rng.choice([*known, *known, self._rng.randrange(VOCABULARY)]))
            node = node.children.get(tokens[-1]) if node is not None else None
        return tokens

    def _add_growth(self, records: Records, row: int) -> None:
        rng, session = self._rng, self._both.naive.sessions[row]
        place = rng.randrange(2)
        ids = [node.ids[place] for node in (*session.path, *session.entries) if place in node.ids]
        parent_id = rng.choice([0, rng.randint(1, 30), *ids, *ids])
        behind = rng.randint(-1, 5)
        # Often the committed token, where it hangs below one.
        token = rng.choice([session.path[-behind].token if 1 <= behind <= session.length else 0, *range(VOCABULARY)])
        records.growth(
            row, self._generations[row] - (rng.random() < 0.02), place=place, node_id=rng.randint(1, 30),
            parent_id=parent_id, as_of=max(session.length - behind, 0), token=token,
            acceptance=rng.choice(ACCEPTANCES), drafter=7 * place,
        )  # fmt: skip

    def _add_edit(self, records: Records, row: int) -> None:
        rng, generation = self._rng, self._generations[row]
        kinds = ["forget", "forget", "resent", "resent", "limits", "slots", "preempt", "close", "commit", "prefill"]
        match rng.choice(kinds):
            case "forget":
                records.forget(row, generation, place=rng.randrange(2))
            case "resent":
                records.resent(row, generation, place=rng.randrange(2))
            case "limits":
                records.limits(row, generation, end=rng.randrange(12), allow=rng.randrange(12))
            case "slots":
                slots = [rng.randrange(99) for _ in range(rng.randrange(7))]
                records.slots(row, generation, start=rng.randrange(4), slots=slots)
            case "preempt":
                records.preempt(row, generation)
            case "prefill":
                records.prefill(row, generation, start=rng.randrange(5), size=rng.randrange(5))
            case "close" if rng.random() < 0.2:
                records.close(row, generation)
            case "commit":
                # At times more than there is room for.
                tokens = self._committed(self._both.naive.sessions[row]) + [0] * rng.choice([0, 0, 4])
                records.commit(row, generation, tokens)


@pytest.mark.parametrize("seed", range(60))
def test_anything_is_taken_as_the_naive_tree_takes_it(seed: int) -> None:
    noise = Noise(seed)
    for _ in range(60):
        noise.tick()


# A service of toy drafters.

Path = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Behaviour of a simulated service."""

    sessions: int = 3
    capacity: int = 16
    places: int = 2
    trail: int = 8
    right: float = 0.7
    credit: int = 8
    delay: int = 2
    duplicates: float = 0.1
    replacements: float = 0.02
    edits: float = 0.1
    most_committed: int = 6


class Grown(NamedTuple):
    """A node as its worker sends it; `path` is the whole text down to it."""

    path: Path
    node_id: int
    parent_id: int
    as_of: int


class Message(NamedTuple):
    """Growth that a worker sends at once."""

    worker: Worker
    nodes: list[Grown]
    is_resent: bool = False
    is_copy: bool = False


class Post(deque[tuple[int, T]]):
    """Things on their way, with the time of arrival; none overtakes."""

    def send(self, due: int, thing: T) -> None:
        self.append((max(due, self[-1][0] if self else due), thing))

    def arrived(self, now: int) -> list[T]:
        arrived = []
        while self and self[0][0] <= now:
            arrived.append(self.popleft()[1])
        return arrived


class Worker:
    """A toy drafter at one place of a session. Its tree is a name for every text that it has thought of.

    Attributes:
        heard: committed tokens on their way to it; None asks for its tree.
        said: its messages on their way.
        dropped: what is right and was lost.
    """

    def __init__(
        self, rng: random.Random, habits: Habits, row: int, place: int, *, generation: int, known: Path
    ) -> None:
        self.row, self.place, self.generation = row, place, generation
        self._rng, self._habits, self._known = rng, habits, known
        self._delay = rng.randint(0, habits.delay)
        self._names: dict[Path, int] = {}
        self._next_id = 1
        self.heard = Post[Path | None]()
        self.said = Post[Message]()
        self.is_asked = False
        self.dropped: set[Path] = set()

    def tell(self, now: int, tokens: Path | None) -> None:
        """Send it committed tokens, or ask for its tree."""
        self.heard.send(now + self._rng.randint(0, self._delay), tokens)

    def tick(self, now: int, truth: Path) -> list[Message]:
        """Let it see and grow; what has come from it by now."""
        for tokens in self.heard.arrived(now):
            if tokens is None:
                self._say(now, Message(self, [self._grown(path) for path in self._names], is_resent=True))
                continue
            self._known += tokens
            own = len(self._known)
            self._names = {
                path: name for path, name in self._names.items() if len(path) > own and path[:own] == self._known
            }
        if grown := self._grow(truth):
            self._say(now, Message(self, grown))
            if self._rng.random() < self._habits.duplicates:
                self._say(now + 2 * self._delay, Message(self, grown, is_copy=True))
        return self.said.arrived(now)

    def _say(self, now: int, message: Message) -> None:
        self.said.send(now + self._rng.randint(0, self._delay), message)

    def _grow(self, truth: Path) -> list[Grown]:
        """Think of nodes, right ones with the worker's probability."""
        grown = []
        for _ in range(self._rng.randint(0, 4)):
            texts = [self._known, *self._names]
            parent = self._rng.choice([self._rng.choice(texts), max(texts, key=len)])
            is_right = self._rng.random() < self._habits.right and len(parent) < len(truth)
            path = (*parent, truth[len(parent)] if is_right else self._rng.randrange(VOCABULARY))
            if path not in self._names and len(self._names) < self._habits.credit:
                self._names[path], self._next_id = self._next_id, self._next_id + 1
                grown.append(self._grown(path))
        return grown

    def _grown(self, path: Path) -> Grown:
        return Grown(path, self._names[path], self._names.get(path[:-1], 0), len(self._known))


class Service:
    """Sessions of a target and of toy drafters; every tick is a round of the target."""

    def __init__(self, habits: Habits, seed: int) -> None:
        self.habits = habits
        self.verdicts: Counter[Verdict] = Counter()
        self.resent: Counter[bool] = Counter()
        self._rng = random.Random(seed)
        self._both = Both(sessions=habits.sessions, capacity=habits.capacity, places=habits.places, trail=habits.trail)
        self._now = 0
        self._generations = [0] * habits.sessions
        self._truths: list[Path] = [()] * habits.sessions
        self._workers: list[list[Worker]] = [[] for _ in range(habits.sessions)]
        # What is on its way from workers of sessions that are over.
        self._stragglers: list[Message] = []
        for row in range(habits.sessions):
            self._open(row)

    def tick(self) -> None:
        """One round: growth joins, tokens are committed."""
        self._now += 1
        rng = self._rng
        said = [worker.tick(self._now, self._truths[row]) for row, own in enumerate(self._workers) for worker in own]
        # Messages of one worker stay in order.
        rng.shuffle(said)
        late = [self._stragglers.pop() for _ in range(min(len(self._stragglers), rng.randrange(3)))]
        self._graft([*late, *(message for messages in said for message in messages)])
        for workers, lost in zip(self._workers, self._both.lost(), strict=True):
            for worker, is_lost in zip(workers, lost, strict=True):
                if is_lost and not worker.is_asked:
                    worker.is_asked = True
                    worker.tell(self._now, None)
        limits = Limits(least_value=rng.choice([0, 0, 0.2]))
        self._both.step(rng.randrange(len(BUCKETS)), limits=limits, reserved=rng.choice([0, 0, 1]))
        self._commit()
        for row, length in enumerate(self._both.lengths()):
            if length >= len(self._truths[row]) - self.habits.most_committed:
                self._reopen(row)
            elif rng.random() < self.habits.edits:
                self._edit(row)
            elif rng.random() < self.habits.replacements:
                self._replace(row, rng.randrange(self.habits.places))

    def _graft(self, batch: list[Message]) -> None:
        records, sent = Records(), []
        for message in batch:
            worker = message.worker
            if message.is_resent:
                records.resent(worker.row, worker.generation, place=worker.place)
                sent.append((message, None))
                worker.is_asked = False
            for node in message.nodes:
                records.growth(
                    worker.row, worker.generation, place=worker.place, node_id=node.node_id,
                    parent_id=node.parent_id, as_of=node.as_of, token=node.path[-1],
                    acceptance=self._rng.choice(ACCEPTANCES), drafter=worker.place,
                )  # fmt: skip
                sent.append((message, node))
        for (message, node), verdict in zip(sent, self._both.graft(records.array()), strict=True):
            if node is not None:
                self._judge(message, node, verdict)

    def _judge(self, message: Message, node: Grown, verdict: Verdict) -> None:
        """Check that valid nodes are lost by `STALE` and `FULL` alone, and below nodes so lost."""
        self.verdicts[verdict] += 1
        worker = message.worker
        if worker.generation != self._generations[worker.row]:
            assert verdict == Verdict.OLD_GENERATION
            return
        if message.is_copy or node.path != self._truths[worker.row][: len(node.path)]:
            return
        if message.is_resent:
            self.resent[verdict in TAKEN] += 1
        if verdict in TAKEN:
            worker.dropped.discard(node.path)
            return
        length = self._both.lengths()[worker.row]
        assert (
            verdict == Verdict.FULL
            or (verdict == Verdict.STALE and node.as_of <= length - self.habits.trail)
            or (verdict == Verdict.UNKNOWN_PARENT and node.parent_id and node.path[:-1] in worker.dropped)
        ), f"{verdict.name} for {node} of a text of {length} tokens"
        worker.dropped.add(node.path)

    def _commit(self) -> None:
        committed: list[Path] = []
        for truth, session in zip(self._truths, self._both.naive.sessions, strict=True):
            node, accepted = session.root, 0
            for token in truth[session.length :]:
                if token not in node.children:
                    break
                node, accepted = node.children[token], accepted + 1
            most = self._rng.choice([0, 1, 2, self.habits.most_committed])
            count = min(self._rng.randint(0, accepted) + self._rng.randint(0, 1), most, self.habits.most_committed)
            committed.append(truth[session.length : session.length + count])
        self._both.re_root(committed)
        for workers, tokens in zip(self._workers, committed, strict=True):
            for worker in workers:
                if tokens:
                    worker.tell(self._now, tokens)

    def _open(self, row: int) -> None:
        rng = self._rng
        tokens = [rng.randrange(VOCABULARY) for _ in range(40 + rng.randrange(20))]
        prompt, self._truths[row] = tokens[: rng.randint(1, 12)], tuple(tokens)
        bounds = {"max_nodes": rng.choice([3, 99]), "max_depth": rng.choice([3, 99])}
        _open_row(self._both, self._generations, row, prompt, min_end=rng.randrange(30), **bounds)
        self._both.run(row)
        self._workers[row] = [self._worker(row, place) for place in range(self.habits.places)]

    def _worker(self, row: int, place: int) -> Worker:
        known = self._truths[row][: self._both.lengths()[row]]
        return Worker(self._rng, self.habits, row, place, generation=self._generations[row], known=known)

    def _reopen(self, row: int) -> None:
        self._stragglers += [message for worker in self._workers[row] for _, message in worker.said]
        if self._rng.random() < 0.5:
            records = Records()
            records.close(row, self._generations[row])
            self._both.graft(records.array())
        self._open(row)

    def _replace(self, row: int, place: int) -> None:
        records = Records()
        records.forget(row, self._generations[row], place=place)
        self._both.graft(records.array())
        self._workers[row][place] = self._worker(row, place)

    def _edit(self, row: int) -> None:
        """Other limits, or other slots behind those in use."""
        records, generation, length, rng = Records(), self._generations[row], self._both.lengths()[row], self._rng
        if rng.random() < 0.3:
            records.limits(row, generation, end=MAX_LEN, allow=rng.choice([0, length, length + 1, MAX_LEN]))
        else:
            slots = [10_000 + 5 * self._now + number for number in range(rng.randint(0, 5))]
            records.slots(row, generation, start=length + rng.randint(-1 + bool(slots), 9), slots=slots)
        self._both.graft(records.array())
        if self._both.naive.sessions[row].state != RowState.RUNNING:
            self._both.run(row)


def _serve(habits: Habits, *, seeds: range, ticks: int) -> Counter[Verdict]:
    verdicts: Counter[Verdict] = Counter()
    for seed in seeds:
        service = Service(habits, seed)
        for _ in range(ticks):
            service.tick()
        verdicts += service.verdicts
    return verdicts


@pytest.mark.parametrize("places", [1, 2, 4])
@pytest.mark.parametrize(("capacity", "trail"), [(8, 4), (16, 8)])
def test_growth_of_toy_drafters(places: int, capacity: int, trail: int) -> None:
    habits = Habits(places=places, capacity=capacity, trail=trail, delay=trail)
    verdicts = _serve(habits, seeds=range(5), ticks=60)
    expected = {*Verdict} - {Verdict.INVALID, Verdict.EDITED}
    if places == 1:
        expected -= {Verdict.MERGED}
    # Credits that sum up to no more than C leave room for all that grows.
    if places * habits.credit <= capacity:
        expected -= {Verdict.FULL}
    assert {*verdicts} == expected


def test_a_right_drafter_that_is_hardly_late_loses_nothing() -> None:
    # At most two rounds each way and the one under way, of one token each: late by less than T.
    habits = Habits(places=2, right=1, delay=2, trail=8, most_committed=1, replacements=0)
    verdicts = _serve(habits, seeds=range(8), ticks=150)
    assert {*verdicts} - {Verdict.OLD_GENERATION} == TAKEN


def test_a_tree_that_was_lost_finds_its_place_again() -> None:
    habits = Habits(places=2, capacity=8, credit=8, right=0.9, duplicates=0.3)
    service = Service(habits, 5)
    for _ in range(400):
        service.tick()
    assert service.resent[True] > 100 and service.verdicts[Verdict.FULL] and service.verdicts[Verdict.STALE]


# A drafter that computes here.


class Draft:
    """Sessions of a draft worker; every tick is a growth step."""

    def __init__(self, seed: int, *, node_slots: int, regrows: bool = False) -> None:
        self.short_of: Counter[str] = Counter()
        self.verdicts: Counter[Verdict] = Counter()
        self._rng = random.Random(seed)
        self.both = Both(sessions=3, capacity=16, places=1, trail=4, node_slots=node_slots, regrows=regrows)
        self._generations = [0] * 3

    def tick(self) -> None:
        """Row edits and commits, then a step."""
        rng, naive = self._rng, self.both.naive
        records = Records()
        for row, session in enumerate(naive.sessions):
            self._add_records(records, row, session)
        self.verdicts += Counter(self.both.graft(records.array()))
        self.both.commit()
        children, launched = rng.randint(1, 3), rng.randrange(len(BUCKETS))
        limits = Limits(least_value=rng.choice([0, 0, 0.1]), children=children, chunk=rng.choice([7, 20, 40]))
        self.short_of["slots"] += len(naive.free) < BUCKETS[launched][0]
        gaps = [session.gap() for session in naive.sessions if session.takes_part()]
        self.short_of["chunk"] += sum(gap for gap in gaps if gap > SHORT_GAP) > limits.chunk
        self.short_of["rows"] += any(own > BUCKETS[launched][2] for own in naive.own_rows(limits).values())
        rows = self.both.step(launched, limits=limits)
        self.both.append(launched, rows, rng, children=children)

    def _add_records(self, records: Records, row: int, session: NaiveSession) -> None:
        rng = self._rng
        resumes = session.state == RowState.HELD and rng.random() < 0.5
        if session.state == RowState.EMPTY or session.length > 90 or rng.random() < EDITS:
            # What is committed before a close or an opening is void.
            records.commit(row, self._generations[row], [0, 1])
            closes, opens = rng.choice([(True, True), (True, False), (False, True)])
            if closes:
                records.close(row, self._generations[row])
            if opens:
                self._open(records, row)
        elif rng.random() < EDITS:
            records.preempt(row, self._generations[row])
            resumes = rng.random() < 0.7
        elif rng.random() < EDITS:
            records.forget(row, self._generations[row], place=0)
            records.prefill(row, self._generations[row], start=session.cached, size=1)
        if resumes or rng.random() < 0.1:
            end, allow = session.length + rng.randint(0, 30), rng.choice([0, session.length, MAX_LEN, MAX_LEN])
            records.limits(row, self._generations[row], end=end, allow=allow)
        if rng.random() < 0.6:
            records.commit(row, self._generations[row], self._committed(session))

    def _open(self, records: Records, row: int) -> None:
        """Open the row, at times twice, at times to be closed at once. What opens it with KV is invalid."""
        rng = self._rng
        tokens = rng.choices(range(VOCABULARY), k=rng.choice([rng.randint(1, 8), rng.randint(17, 50)]))
        self.both.copy(
            row, tokens, stops=[2], min_end=rng.randrange(20), max_nodes=rng.choice([6, 99]),
            max_depth=rng.choice([3, 99]),
        )  # fmt: skip
        allow = rng.choice([0, len(tokens), MAX_LEN, MAX_LEN, MAX_LEN])
        for _ in range(rng.choice([1, 1, 2])):
            self._generations[row] += 1
            for cached in rng.choice([[0], [0], [1, 0], [0, 1]]):
                records.open(
                    row, self._generations[row] + cached, length=len(tokens), cached=cached, end=MAX_LEN, allow=allow
                )
            if rng.random() < 0.1:
                records.close(row, self._generations[row])

    def _committed(self, session: NaiveSession) -> list[int]:
        """Down the tree for a while, then perhaps out of it."""
        if not session.path:
            return []
        node, tokens = session.root, []
        while node.children and self._rng.random() < 0.6:
            tokens.append(self._rng.choice([*node.children]))
            node = node.children[tokens[-1]]
        return [*tokens, *self._rng.choices(range(VOCABULARY), k=self._rng.choice([0, 0, 1, 2]))]


@pytest.mark.parametrize("regrows", [False, True], ids=["keeps", "regrows"])
@pytest.mark.parametrize("node_slots", [128, 512])
def test_growth_of_a_drafter_that_computes_here(node_slots: int, regrows: bool) -> None:
    short_of: Counter[str] = Counter()
    verdicts: Counter[Verdict] = Counter()
    for seed in range(6):
        draft = Draft(seed, node_slots=node_slots, regrows=regrows)
        for _ in range(60):
            draft.tick()
        short_of += draft.short_of
        verdicts += draft.verdicts
    assert {*verdicts} >= {Verdict.EDITED, Verdict.INVALID, Verdict.OLD_GENERATION}
    assert short_of["chunk"] > 20 and short_of["rows"] > 20
    assert (short_of["slots"] > 0) == (node_slots == 128)


def test_what_a_resident_drafter_has_expanded_is_its_own_too() -> None:
    both = Both(sessions=1, capacity=8, places=2, trail=4, node_slots=32)
    both.copy(0, [1])
    records = Records()
    records.open(0, 1, length=1, cached=0, end=MAX_LEN, allow=MAX_LEN)
    for node_id in (1, 2):
        records.growth(
            0, 1, place=1, node_id=node_id, parent_id=node_id - 1, as_of=1, token=node_id - 1, acceptance=1, drafter=1
        )
    both.graft(records.array())
    launched, limits = len(BUCKETS) - 1, Limits(children=2, chunk=1)
    rows = both.step(launched, limits=limits)
    assert [row.entry for row in rows] == [ROOT, 0, 1]
    both.append(launched, rows, random.Random(1), children=2)
    assert int(both.pool.count[0]) > 2
    forget = Records()
    # Had the resident drafter's children parents that only the other place knows, they would hang in the air now.
    forget.forget(0, 1, place=1)
    both.graft(forget.array())


def test_a_full_row_is_packed_whole() -> None:
    both = Both(sessions=1, capacity=8, places=1, trail=4)
    _open_row(both, [0], 0, [1], min_end=99)
    records = Records()
    for node_id in range(1, 9):
        records.growth(0, 1, place=0, node_id=node_id, parent_id=node_id - 1, as_of=1, token=node_id, acceptance=1)
    both.graft(records.array())
    # With the root one row more than a row of the pool has columns.
    assert [row.entry for row in both.step(len(BUCKETS) - 1)] == [ROOT, *range(8)]
