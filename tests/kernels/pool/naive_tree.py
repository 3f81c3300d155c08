"""Pools as plain Python objects: one session, one node, one token at a time. What the operators are held against.

Written from the semantics of the pool alone. A session's tree begins with the first committed token: the committed path
is the part of it where every node has one child that counts, the root is the last node of that path, and the entries
are the nodes below, in the order in which they were appended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.pack import COMMITTED, ROOT
from outrider.kernels.pool.re_root import TreeEnd
from outrider.kernels.pool.records import TOKENS_PER_RECORD, RecordKind, Verdict
from outrider.kernels.pool.select import SHORT_GAP

__all__ = ["Limits", "NaivePool", "NaiveSession", "Node", "Row", "assert_invariants", "assert_same"]


@dataclass(eq=False)
class Node:
    """A token of a session's tree.

    Attributes:
        token: its id in the vocabulary.
        parent: the node before it; None for the first committed token.
        acceptance: estimate that the target accepts it, given its parent.
        ids: what each place calls it.
        drafters: bit set of the kinds of drafter that have proposed it.
        stopped: whether it ends the session, or a candidate above it does.
        slot: its KV slot, -1 if it is not expanded.
        children: the nodes behind it, by token.
    """

    token: int
    parent: Node | None = field(default=None, repr=False)
    acceptance: np.float32 = field(default_factory=lambda: np.float32(1))
    ids: dict[int, int] = field(default_factory=dict)
    drafters: int = 0
    stopped: bool = False
    slot: int = -1
    children: dict[int, Node] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Row:
    """A row of a forward pass.

    Attributes:
        session: the pool's row.
        entry: index of the entry, `ROOT` or `COMMITTED`.
        token, position: of the node.
        slot: where its keys and values go.
        parent: which row of the step holds the token before it, -1 if none does.
        keys: the slots that it attends to, its own among them.
    """

    session: int
    entry: int
    token: int
    position: int
    slot: int
    parent: int
    keys: frozenset[int]


class NaiveSession:
    """One row of a pool.

    `history`, `table`, `stops`, `min_end`, `max_nodes` and `max_depth` are what the host copies into the row before it
    opens it.
    """

    def __init__(self, *, capacity: int, places: int, trail: int, owns_slots: bool, regrows: bool = False) -> None:
        self.regrows = regrows
        self.capacity = capacity
        self.places = places
        self.trail = trail
        self.owns_slots = owns_slots
        self.history: list[int] = []
        self.stops: set[int] = set()
        self.min_end = 0
        self.max_nodes = self.max_depth = capacity
        self.tree_end = TreeEnd.NONE
        self.generation = 0
        self.state = RowState.EMPTY
        self.path: list[Node] = []
        self.entries: list[Node] = []
        self.lost = [False] * places
        self.cached = 0
        self.end = 0
        self.allow = 0
        self.table: dict[int, int] = {}
        self.table_len = 0
        self.next_id = 1
        self.released: list[int] = []
        self.commits: list[int] = []

    # What can be read off the tree.

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.path)

    @property
    def root(self) -> Node:
        """The last committed token."""
        return self.path[-1]

    def way(self, entry: Node) -> list[Node]:
        """The entries from below the root down to `entry`."""
        way = [entry]
        while way[0].parent is not self.root:
            assert way[0].parent is not None
            way.insert(0, way[0].parent)
        return way

    def depth(self, entry: Node) -> int:
        """Depth of `entry` below the root."""
        return len(self.way(entry))

    def value(self, entry: Node) -> np.float32:
        """The product of the acceptances from the root down to `entry`."""
        value = np.float32(1)
        for node in self.way(entry):
            value *= node.acceptance
        return value

    def parent_index(self, entry: Node) -> int:
        """The index of the parent among the entries, -1 for the root."""
        return -1 if entry.parent is self.root else self.entries.index(entry.parent)  # type: ignore[arg-type]

    def gap(self) -> int:
        """Committed tokens without KV; a target has all but the root when it runs."""
        return self.length - self.cached if self.owns_slots else 1

    def filled(self) -> int:
        """Entries of the table that count; a drafter's is filled as far as there is KV."""
        return self.cached if self.owns_slots else self.table_len

    # Row edits.

    def open(self, generation: int, *, length: int, cached: int, end: int, allow: int) -> None:
        """Begin an opening with the first `length` tokens of `history`."""
        self._drop_entries()
        self._release_cached()
        self.generation = generation
        self.state = RowState.PREFILL
        if self.owns_slots or length - cached == 1:
            self.state = RowState.RUNNING if allow > length else RowState.HELD
        self.commits = []
        self.path = []
        for token in self.history[:length]:
            self._commit_node(Node(token))
        self.lost = [False] * self.places
        self.cached, self.end, self.allow = cached, end, allow
        self.table_len = cached
        self.next_id = 1

    def close(self) -> None:
        """End the opening."""
        self._drop_entries()
        self._release_cached()
        self.commits = []
        self.state = RowState.EMPTY

    def preempt(self) -> None:
        """Take the KV of a drafter's session away."""
        for entry in self.entries:
            self._release(entry)
        self._release_cached()
        self.state, self.allow = RowState.HELD, 0

    def limits(self, *, end: int, allow: int) -> None:
        """Change how long the session may become, and how far it may go now."""
        self.end, self.allow = end, allow
        if self.state in {RowState.RUNNING, RowState.HELD}:
            self.state = RowState.RUNNING if allow > self.length else RowState.HELD

    def slots(self, start: int, slots: Sequence[int]) -> None:
        """Fill the table from `start` on."""
        for index, slot in enumerate(slots, start):
            self.table[index] = slot
        self.table_len = start + len(slots)

    def forget(self, place: int) -> None:
        """Void the ids of a place."""
        for node in (*self.path, *self.entries):
            node.ids.pop(place, None)
        self._keep(lambda entry: bool(entry.ids))

    def resent(self, place: int) -> None:
        """Nothing of a place is lost any more."""
        self.lost[place] = False

    # Growth.

    def growth(
        self,
        *,
        place: int,
        node_id: int,
        parent_id: int,
        as_of: int,
        token: int,
        acceptance: np.float32,
        drafters: int,
    ) -> Verdict:
        """Take a node that a drafter has sent."""
        if any(node.ids.get(place) == node_id for node in (*self.path, *self.entries)):
            return Verdict.DUPLICATE
        parent = self._parent(place, parent_id, as_of)
        if parent is None:
            if as_of > self.length - self.trail:
                return Verdict.UNKNOWN_PARENT
            self.lost[place] = True
            return Verdict.STALE
        if parent in self.path[:-1]:
            committed = self.path[self.path.index(parent) + 1]
            if committed.token != token:
                return Verdict.CONTRADICTED
            committed.ids[place] = max(committed.ids.get(place, 0), node_id)
            return Verdict.ABSORBED
        return self._take_child(parent, token, acceptance, place=place, node_id=node_id, drafters=drafters)

    def append(self, parent: Node, token: int, acceptance: np.float32, *, place: int, drafters: int) -> Verdict:
        """Take a child from the drafter that computes here."""
        child = parent.children.get(token)
        if child is not None:
            node_id = child.ids.get(place, 0) or self._new_id()
        else:
            node_id = self._new_id() if len(self.entries) < self.capacity else 0
        return self._take_child(parent, token, acceptance, place=place, node_id=node_id, drafters=drafters)

    def adopt(self, node: Node, *, place: int) -> None:
        """Give an entry that was expanded an id of the place of the drafter that computes here, if it has none."""
        if place not in node.ids:
            node.ids[place] = self._new_id()

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    # Commits.

    def re_root(self, tokens: Sequence[int]) -> None:
        """Commit `tokens`."""
        self.tree_end = TreeEnd.NONE
        if not tokens:
            return
        before = self.length
        walked: list[Node] = []
        self.tree_end = TreeEnd.COVERED
        for token in tokens:
            child = self.root.children.get(token)
            if child is not None:
                walked.append(child)
            elif self.tree_end is TreeEnd.COVERED:
                self.tree_end = TreeEnd.MISSED if self.root.children else TreeEnd.STARVED
            self._commit_node(child or Node(token))
        if self.regrows:
            self._drop_entries()
        elif self.owns_slots:
            self._cache_walked(walked, before)
        elif self.cached == before - 1:
            self.cached = self.length - 1
        self._keep(self._hangs_below_root)

    # A forward pass.

    def takes_part(self) -> bool:
        """Return whether the session may be in a step at all."""
        has_room = self.owns_slots or (self.length < self.allow and self.table_len >= self.length)
        return self.state == RowState.RUNNING and self.length < self.end and has_room

    def most_entries(self, own_rows: int, children: int) -> int:
        """Return the most entries of a step with so many rows of its own; each entry may bring `children`."""
        if not self.owns_slots:
            return min(self.max_nodes, self.table_len - self.length)
        if own_rows < self.gap():
            return 0
        room = min(self.capacity, self.max_nodes) - len(self.entries)
        # The root brings children, too.
        return max(room // children - (1 if own_rows else 0), 0)

    def has_entries(self, limits: Limits) -> bool:
        """Return whether a step may take an entry of a session that has no gap."""
        has_entry = any(self.is_eligible(entry, limits.least_value) for entry in self.entries)
        return has_entry and self.most_entries(0, limits.children) > 0

    def is_eligible(self, entry: Node, least_value: float) -> bool:
        """Return whether a step may select the entry."""
        end = self.end if self.owns_slots else min(self.end, self.allow)
        is_new = self.depth(entry) < self.max_depth and (not self.owns_slots or entry.slot < 0)
        may_be_reached = not entry.stopped and self.length + self.depth(entry) < end
        return is_new and may_be_reached and bool(self.value(entry) >= least_value)

    def rows(self, session: int, own_rows: int, chosen: Sequence[Node], first_row: int, free: deque[int]) -> list[Row]:
        """The session's rows of a step, `first_row` the first: committed tokens of its own, then the chosen entries."""
        begin = self.length - self.gap()
        committed = self.path[begin : begin + own_rows]
        nodes = [*committed, *chosen]
        for number, node in enumerate(nodes):
            if not self.owns_slots:
                node.slot = self.table[self.length - 1 + number]
            else:
                node.slot = free.popleft()
        if self.owns_slots:
            for index, node in enumerate(committed, self.cached):
                self.table[index] = node.slot
            self.cached += own_rows
        rows = []
        for node in nodes:
            above = [other for other in self._ancestors(node) if other in self.entries or other in committed]
            # What has KV before the root is in the table.
            before = (
                self.length - 1 if not self.owns_slots else self.path.index(node) if node in committed else self.length
            )
            rows.append(
                Row(
                    session=session,
                    entry=self.entries.index(node)
                    if node in self.entries
                    else ROOT
                    if node is self.root
                    else COMMITTED,
                    token=node.token,
                    position=self._index(node),
                    slot=node.slot,
                    parent=first_row + nodes.index(node.parent) if node.parent in nodes else -1,
                    keys=frozenset(self.table[index] for index in range(before)) | {other.slot for other in above},
                )
            )
        # A committed token's slot is the table's; a target's rows are forgotten after the step.
        for node in committed if self.owns_slots else nodes:
            node.slot = -1
        return rows

    def _index(self, node: Node) -> int:
        return self.path.index(node) if node in self.path else self.length - 1 + self.depth(node)

    def _ancestors(self, node: Node | None) -> Iterator[Node]:
        while node is not None:
            yield node
            node = node.parent

    def _parent(self, place: int, parent_id: int, as_of: int) -> Node | None:
        if parent_id == 0:
            known = max(1, self.length - self.trail + 1) <= as_of <= self.length
            return self.path[as_of - 1] if known else None
        named = [node for node in (*self.path, *self.entries) if node.ids.get(place) == parent_id]
        return named[0] if named else None

    def _take_child(
        self, parent: Node, token: int, acceptance: np.float32, *, place: int, node_id: int, drafters: int
    ) -> Verdict:
        child = parent.children.get(token)
        if child is not None:
            child.ids[place] = max(child.ids.get(place, 0), node_id)
            child.acceptance = max(child.acceptance, acceptance)
            child.drafters |= drafters
            return Verdict.MERGED
        if len(self.entries) == self.capacity:
            self.lost[place] = True
            return Verdict.FULL
        child = Node(token, parent, acceptance, {place: node_id}, drafters)
        parent.children[token] = child
        self.entries.append(child)
        index = self.length - 1 + self.depth(child)
        ends = token in self.stops and index >= self.min_end
        child.stopped = ends or (parent is not self.root and parent.stopped)
        return Verdict.APPENDED

    def _commit_node(self, node: Node) -> None:
        if self.path:
            node.parent = self.root
            self.root.children = {node.token: node}
        self.path.append(node)
        # Of older ones no ids are remembered.
        for old in self.path[: -self.trail]:
            old.ids.clear()

    def _hangs_below_root(self, entry: Node) -> bool:
        return self.root in self._ancestors(entry.parent)

    def _keep(self, stays: Callable[[Node], bool]) -> None:
        """Take the entries out that do not stay; their slots are free, but for those that the table has taken."""
        for entry in self.entries:
            if stays(entry):
                continue
            self._release(entry)
            if entry not in self.path and entry.parent is not None:
                entry.parent.children.pop(entry.token, None)
        self.entries = [entry for entry in self.entries if stays(entry)]

    def _drop_entries(self) -> None:
        self._keep(lambda _entry: False)

    def _release_cached(self) -> None:
        if self.owns_slots:
            self.released += [self.table[index] for index in range(self.cached)]
            self.cached = 0

    def _cache_walked(self, walked: Sequence[Node], before: int) -> None:
        for node in walked:
            if self.cached < before or node.slot < 0:
                break
            self.table[self.cached] = node.slot
            node.slot = -1
            self.cached += 1

    def _release(self, entry: Node) -> None:
        if entry.slot >= 0:
            self.released.append(entry.slot)
            entry.slot = -1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a selection, beside the bucket.

    Attributes:
        least_value: of an entry.
        children: that an expanded entry brings at most, in a drafter's pool.
        chunk: most committed tokens of long gaps, in a drafter's pool.
    """

    least_value: float = 0
    children: int = 0
    chunk: int = 0


class NaivePool:
    """Sessions, and the queue of free KV slots that they share where a drafter computes here.

    Records commit at most `most_commits` tokens of a session at a time.
    """

    def __init__(
        self,
        *,
        sessions: int,
        capacity: int,
        places: int,
        trail: int,
        most_commits: int,
        owns_slots: bool = False,
        regrows: bool = False,
    ) -> None:
        self.most_commits = most_commits
        self.sessions = [
            NaiveSession(capacity=capacity, places=places, trail=trail, owns_slots=owns_slots, regrows=regrows)
            for _ in range(sessions)
        ]
        self.free: deque[int] = deque()

    def graft(self, records: np.ndarray) -> list[Verdict]:
        """Let records [n, 8] take effect; `commits` of each session are the tokens that they commit."""
        for session in self.sessions:
            session.commits = []
        verdicts = [self._take(*(int(word) for word in record)) for record in records]
        self._collect_released()
        return verdicts

    def re_root(self, tokens: Sequence[Sequence[int]]) -> None:
        """Commit tokens of each row."""
        for session, new in zip(self.sessions, tokens, strict=True):
            session.re_root(new)
        self._collect_released()

    def own_rows(self, limits: Limits) -> dict[int, int]:
        """Rows that each session that has something to do needs in a step before any entry."""
        own_rows: dict[int, int] = {}
        left = limits.chunk
        for row, session in enumerate(self.sessions):
            gap = session.gap()
            if not session.takes_part() or not (gap or session.has_entries(limits)):
                continue
            if gap <= SHORT_GAP:
                own_rows[row] = gap
            elif left > 0:
                own_rows[row] = min(gap, left)
                left -= own_rows[row]
        return own_rows

    def select(
        self, rows: int, taking_part: dict[int, int], most: int, most_entries: int, limits: Limits
    ) -> list[list[Node]]:
        """The eligible entries of highest value, session by session in index order.

        Args:
            rows: of the bucket.
            taking_part: the pool's rows that take part, and how many rows of its own each needs.
            most: rows of a session.
            most_entries: of all sessions.
            limits: of the entries.
        """
        room = min(rows - sum(taking_part.values()), most_entries)
        ranked: list[tuple[float, int, int]] = []
        for row, own_rows in taking_part.items():
            session = self.sessions[row]
            of_row = sorted(
                (-float(session.value(entry)), row, index)
                for index, entry in enumerate(session.entries)
                if session.is_eligible(entry, limits.least_value)
            )
            ranked += of_row[: max(min(session.most_entries(own_rows, limits.children), most - own_rows), 0)]
        best = sorted(ranked)[:room]
        return [
            [session.entries[index] for index in sorted(index for _, of, index in best if of == row)]
            for row, session in enumerate(self.sessions)
        ]

    def who_fits(
        self, rows: int, places: int, most: int, limits: Limits, *, first: int
    ) -> tuple[dict[int, int], int | None]:
        """The pool's rows that fit into a bucket of `rows`, `places` for sessions and `most` rows of a session, with
        the rows of its own of each, and the one that begins the next time, None if none has to wait for its turn.
        """
        needs = {row: own for row, own in self.own_rows(limits).items() if own <= min(most, rows)}
        fitting: dict[int, int] = {}
        for row in sorted(needs, key=lambda row: (row < first, row)):
            if len(fitting) >= places or sum(fitting.values()) + needs[row] > rows:
                return dict(sorted(fitting.items())), row
            fitting[row] = needs[row]
        return needs, None

    def _take(self, head: int, row: int, generation: int, *words: int) -> Verdict:  # noqa: PLR0911 - one an outcome
        number, place, drafters = head & 0xFF, head >> 8 & 0xFF, head >> 16 & 0xFF
        if not 0 <= row < len(self.sessions):
            return Verdict.INVALID
        session = self.sessions[row]
        if number == RecordKind.OPEN:
            length, cached, end, allow, _ = words
            most_cached = 0 if session.owns_slots else length - 1
            if not (1 <= length <= len(session.history) and 0 <= cached <= most_cached):
                return Verdict.INVALID
            session.open(generation, length=length, cached=cached, end=end, allow=allow)
            return Verdict.EDITED
        # A closed row has no opening in force.
        if generation != session.generation or session.state == RowState.EMPTY:
            return Verdict.OLD_GENERATION
        if number == RecordKind.NOTHING or number not in {*RecordKind}:
            return Verdict.INVALID
        kind = RecordKind(number)
        # A drafter has no chunks; a target's session gives its KV away when it is closed.
        if kind == (RecordKind.PREFILL if session.owns_slots else RecordKind.PREEMPT):
            return Verdict.INVALID
        if kind in {RecordKind.GROWTH, RecordKind.FORGET, RecordKind.RESENT} and place >= session.places:
            return Verdict.INVALID
        if kind == RecordKind.GROWTH:
            node_id, parent_id, as_of, token, bits = words
            return session.growth(
                place=place,
                node_id=node_id,
                parent_id=parent_id,
                as_of=as_of,
                token=token,
                acceptance=np.int32(bits).view(np.float32),
                drafters=drafters,
            )
        if kind == RecordKind.CLOSE:
            session.close()
        elif kind == RecordKind.PREEMPT:
            session.preempt()
        elif kind == RecordKind.LIMITS:
            session.limits(end=words[0], allow=words[1])
        elif kind == RecordKind.SLOTS:
            session.slots(words[0], words[1 : 1 + place])
        elif kind == RecordKind.FORGET:
            session.forget(place)
        elif kind == RecordKind.RESENT:
            session.resent(place)
        elif kind == RecordKind.PREFILL:
            # Chunks are another operator's.
            pass
        elif 1 <= place <= TOKENS_PER_RECORD and len(session.commits) + place <= self.most_commits:
            session.commits += words[:place]
        else:
            return Verdict.INVALID
        return Verdict.EDITED

    def _collect_released(self) -> None:
        for session in self.sessions:
            self.free.extend(session.released)
            session.released.clear()


_OF_ENTRIES = ("token", "parent", "depth", "acceptance", "value", "ids", "drafters", "stopped")
_OF_SESSIONS = (
    "count", "length", "cached", "history", "root_ids", "state", "generation", "end", "allow", "table", "table_len",
    "lost",
)  # fmt: skip
_OF_SLOTS = ("slot", "expanded", "next_id")


def naive_columns(session: NaiveSession) -> dict[str, Any]:
    """A session's columns, up to what is in use of each."""
    places, entries = range(session.places), session.entries
    root_ids = [[0] * session.places for _ in range(session.trail)]
    for index in range(max(session.length - session.trail, 0), session.length):
        root_ids[index % session.trail] = [session.path[index].ids.get(place, 0) for place in places]
    columns = {
        "count": len(entries),
        "token": [entry.token for entry in entries],
        "parent": [session.parent_index(entry) for entry in entries],
        "depth": [session.depth(entry) for entry in entries],
        "acceptance": [float(entry.acceptance) for entry in entries],
        "value": [float(session.value(entry)) for entry in entries],
        "ids": [[entry.ids.get(place, 0) for place in places] for entry in entries],
        "drafters": [entry.drafters for entry in entries],
        "stopped": [entry.stopped for entry in entries],
        "length": session.length,
        "cached": session.cached,
        "history": [node.token for node in session.path],
        "root_ids": root_ids,
        "state": int(session.state),
        "generation": session.generation,
        "end": session.end,
        "allow": session.allow,
        "table": [session.table.get(index, -1) for index in range(session.filled())],
        "table_len": session.table_len,
        "lost": session.lost,
    }
    if session.owns_slots:
        del columns["table_len"]
        columns["slot"] = [entry.slot for entry in entries]
        columns["expanded"] = [entry.slot >= 0 for entry in entries]
        columns["next_id"] = session.next_id
    return columns


def pool_columns(pool: Pool) -> list[dict[str, Any]]:
    """Each row's columns, up to what is in use of each."""
    whole = {name: getattr(pool, name).tolist() for name in (*_OF_ENTRIES, *_OF_SESSIONS)}
    if pool.nodes is not None:
        whole |= {name: getattr(pool.nodes, name).tolist() for name in _OF_SLOTS}
    rows = []
    for row in range(pool.sessions):
        columns = {name: column[row] for name, column in whole.items()}
        in_use = {
            **dict.fromkeys((*_OF_ENTRIES, "slot", "expanded"), "count"),
            "history": "length",
            "table": "table_len" if pool.nodes is None else "cached",
        }
        for name, limit in in_use.items():
            if name in columns:
                columns[name] = columns[name][: columns[limit]]
        # Bit sets: int8 has a sign.
        columns["drafters"] = [bits & 0xFF for bits in columns["drafters"]]
        rows.append(columns)
    return rows


def free_slots(pool: Pool) -> list[int]:
    """The queue of free slots, oldest first."""
    assert pool.nodes is not None
    queue = pool.nodes.free.tolist()
    return [queue[i % len(queue)] for i in range(int(pool.nodes.free_head), int(pool.nodes.free_tail))]


def assert_same(pool: Pool, naive: NaivePool) -> None:
    """Raise AssertionError naming the row and the column in which the two differ."""
    for row, (columns, session) in enumerate(zip(pool_columns(pool), naive.sessions, strict=True)):
        for name, expected in naive_columns(session).items():
            assert columns[name] == expected, f"row {row}, {name}: {columns[name]} in the pool, {expected} in the tree"
    if pool.nodes is not None:
        assert free_slots(pool) == list(naive.free)


def assert_invariants(pool: Pool) -> None:
    """Raise AssertionError unless each row is a tree as `columns.py` promises, and each KV slot is in one place.

    All slots of a drafter's pool must have been given to it.
    """
    rows = pool_columns(pool)
    for columns in rows:
        _assert_tree(columns, pool.places)
    if pool.nodes is not None:
        held = [slot for columns in rows for slot in (*columns["table"], *columns["slot"]) if slot >= 0]
        assert sorted(free_slots(pool) + held) == [*range(len(pool.nodes.free))]


def _assert_tree(columns: dict[str, Any], places: int) -> None:
    parents, depths, values, ids = (columns[name] for name in ("parent", "depth", "value", "ids"))
    for entry, parent in enumerate(parents):
        assert -1 <= parent < entry
        assert depths[entry] == (1 if parent < 0 else depths[parent] + 1)
        assert 0 <= values[entry] <= (1 if parent < 0 else values[parent])
        assert any(ids[entry])
        # The root is known to a place by its index, so an id of it may be missing.
        assert parent < 0 or all(ids[parent][place] or not ids[entry][place] for place in range(places))
    families = list(zip(parents, columns["token"], strict=True))
    assert len(set(families)) == len(families)
    for place in range(places):
        of_place = [names[place] for names in (*ids, *columns["root_ids"]) if names[place]]
        assert len(set(of_place)) == len(of_place)
