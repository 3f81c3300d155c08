"""KV that outlives its session: a radix tree over token ids, whose edges hold tokens and the slots with their KV.

The KV of a token depends on that token and on those before it alone, so sessions that begin alike may share slots.
Every path from the root is a sequence of tokens with KV; where two sequences part, an edge is split. A row borrows the
slots of one path (`SlotTable.borrow`) and never writes them. What no row borrows is given back on demand, the least
recently used first, always from a path's end.

All work on tokens is in whole arrays: O(tokens matched) in numpy, O(edges of the path) in Python.
"""

import heapq
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_slots import Slots, SlotTable

TokenIds = npt.NDArray[np.int32]


class _Edge:
    """n tokens that follow their parent's, and their slots."""

    __slots__ = ("children", "parent", "slots", "start", "tokens", "used_at", "users")

    def __init__(self, parent: "_Edge | None", start: int, tokens: TokenIds, slots: Slots) -> None:
        self.parent = parent  # the edge before; None for the root, and for an edge that is gone
        self.start = start
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, _Edge] = {}  # by their first token
        self.users = 0  # rows whose borrowed path goes through here
        self.used_at = 0  # when a row last left it, on the cache's own clock

    @property
    def end(self) -> int:
        """Tokens up to this edge's end."""
        return self.start + len(self.tokens)


class PrefixCache:
    """Lends slots to the rows of one table, and remembers what rows have computed.

    Args:
        slots: the table; the cache makes itself its lender.
    """

    def __init__(self, slots: SlotTable) -> None:
        assert slots.lender is None, "the table has a lender"
        slots.lender = self
        self._slots = slots
        self._root = _Edge(None, 0, np.empty(0, np.int32), np.empty(0, np.int32))
        self._held = [self._root] * len(slots.table)
        self.unused = 0  # slots that no row borrows
        self._edges = 0
        self._clock = 0
        # Least recently used first: (used_at, number, edge). Entries of edges that changed since are passed over.
        self._leaves: list[tuple[int, int, _Edge]] = []
        self._pushes = 0

    @property
    def size(self) -> int:
        """Slots of the cache, borrowed ones included."""
        return sum(len(edge.slots) for edge in self._all())

    def take(self, row: int, tokens: TokenIds) -> int:
        """Give the row the KV of the longest known beginning of `tokens`, if that is more than the row has.

        The row's slots, if any, are those of the first of the tokens. Returns its length then.
        """
        edge, length = self._match(tokens)
        had = self._slots.length(row)
        if length <= had:
            return had
        if length < edge.end:
            edge = self._split(edge, length - edge.start)
        borrowed = self._slots.borrowed(row)
        path = [step for step in _upwards(edge) if step.start >= borrowed][::-1]
        for step in path:
            self._enter(step)
        self._held[row] = edge
        self._slots.borrow(row, np.concatenate([step.slots for step in path]))
        return length

    def keep(self, row: int, tokens: TokenIds) -> None:
        """Remember what the row has computed; it goes on with borrowed slots.

        Where the same tokens were known already, the row takes their slots and its own become free. Every slot of the
        row has KV, and there are as many tokens.
        """
        position = self._slots.borrowed(row)
        assert len(tokens) == self._slots.length(row), "a row has as many tokens as slots"
        edge = self._held[row]
        while position < len(tokens) and (child := edge.children.get(int(tokens[position]))) is not None:
            same = common_length(child.tokens, tokens[position:])
            edge = child if same == len(child.tokens) else self._split(child, same)
            self._enter(edge)
            self._slots.borrow(row, edge.slots)
            position += same
        self._held[row] = edge
        self.share(row, tokens)

    def share(self, row: int, tokens: TokenIds) -> None:
        """Remember what the row has computed of its first tokens, and leave its slots where they are.

        Where another has remembered some of them meanwhile, nothing changes.
        """
        position, edge = self._slots.borrowed(row), self._held[row]
        if position >= len(tokens) or int(tokens[position]) in edge.children:
            return
        leaf = _Edge(edge, position, tokens[position:].copy(), self._slots.lend(row, len(tokens)))
        leaf.users = 1
        edge.children[int(leaf.tokens[0])] = leaf
        self._held[row] = leaf
        self._edges += 1

    def take_return(self, row: int, length: int) -> None:
        """The row keeps only the first `length` of what it has borrowed; for the table alone."""
        edge = self._held[row]
        self._clock += 1
        while edge.start >= length and edge.parent is not None:
            self._leave(edge)
            edge = edge.parent
        if length < edge.end:
            first = self._split(edge, length - edge.start)
            self._leave(edge)
            edge = first
        self._held[row] = edge

    def give_back(self, count: int) -> Slots:
        """Forget `count` unused slots, the least recently used ones, and part with them."""
        assert count <= self.unused, f"{count} slots wanted of {self.unused} unused ones"
        self.unused -= count
        parts: list[Slots] = []
        while count:
            used_at, _, edge = heapq.heappop(self._leaves)
            if edge.parent is None or edge.users or edge.children or edge.used_at != used_at:
                continue
            rest = max(len(edge.tokens) - count, 0)
            parts.append(edge.slots[rest:])
            count -= len(edge.slots) - rest
            if rest:
                edge.tokens, edge.slots = edge.tokens[:rest], edge.slots[:rest]
                self._push(edge)
            else:
                self._remove(edge)
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def freed_by(self, rows: Iterable[int]) -> int:
        """Return how many slots would become free or reclaimable if all these rows were emptied."""
        freed = 0
        users: dict[int, int] = {}
        edges: dict[int, _Edge] = {}
        for row in rows:
            freed += self._slots.length(row) - self._slots.borrowed(row)
            for edge in _upwards(self._held[row]):
                users[id(edge)] = users.get(id(edge), 0) + 1
                edges[id(edge)] = edge
        return freed + sum(len(edge.tokens) for key, edge in edges.items() if users[key] == edge.users)

    def _match(self, tokens: TokenIds) -> tuple[_Edge, int]:
        """The last edge of the longest known beginning, and that beginning's length."""
        edge, position = self._root, 0
        while position < len(tokens) and (child := edge.children.get(int(tokens[position]))) is not None:
            same = common_length(child.tokens, tokens[position:])
            edge, position = child, position + same
            if same < len(child.tokens):
                break
        return edge, position

    def _split(self, edge: _Edge, count: int) -> _Edge:
        """Cut an edge after its first `count` tokens and return the new edge of these. Rows go on holding the rest."""
        parent = edge.parent
        assert parent is not None and 0 < count < len(edge.tokens)
        first = _Edge(parent, edge.start, edge.tokens[:count], edge.slots[:count])
        first.users, first.used_at = edge.users, edge.used_at
        first.children[int(edge.tokens[count])] = edge
        parent.children[int(edge.tokens[0])] = first
        edge.parent, edge.start = first, edge.start + count
        edge.tokens, edge.slots = edge.tokens[count:], edge.slots[count:]
        self._edges += 1
        return first

    def _enter(self, edge: _Edge) -> None:
        if not edge.users:
            self.unused -= len(edge.tokens)
        edge.users += 1

    def _leave(self, edge: _Edge) -> None:
        edge.users -= 1
        if not edge.users:
            self.unused += len(edge.tokens)
            edge.used_at = self._clock
            self._push(edge)

    def _push(self, edge: _Edge) -> None:
        if edge.children or edge.users or edge is self._root:
            return
        if len(self._leaves) > 2 * self._edges + 64:
            self._leaves = []
            for leaf in self._all():
                if not leaf.children and not leaf.users:
                    self._leaves.append((leaf.used_at, self._pushes, leaf))
                    self._pushes += 1
            heapq.heapify(self._leaves)
            return
        heapq.heappush(self._leaves, (edge.used_at, self._pushes, edge))
        self._pushes += 1

    def _remove(self, edge: _Edge) -> None:
        parent = edge.parent
        assert parent is not None
        del parent.children[int(edge.tokens[0])]
        edge.parent = None
        self._edges -= 1
        self._push(parent)

    def _all(self) -> Iterator[_Edge]:
        waiting = list(self._root.children.values())
        while waiting:
            edge = waiting.pop()
            waiting += edge.children.values()
            yield edge


def _upwards(edge: _Edge) -> Iterator[_Edge]:
    """The edge and those before it, the root excluded."""
    while edge.parent is not None:
        yield edge
        edge = edge.parent


def common_length(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the longest common prefix."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count
