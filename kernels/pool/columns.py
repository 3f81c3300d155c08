"""The candidate pool: one token tree a session, as columns on the device of the model.

A row is a session. Its *root* is the last committed token, which is no entry; its *entries* 0 .. count-1 are candidate
tokens, parents before children. Drafters add entries, a target selects which to verify, a draft worker which to expand,
and commits move the root. These operators work on it:

    graft       a round's records: growth joins the pools, row edits (open, close, ..) take effect
    append      children from the drafter that computes here
    select      the best entries over all rows
    pack        the selected entries as rows of a forward pass
    prefill     chunks of prompts: `take_chunks` before select, `pack_chunks` behind pack, in a target's pool
    re_root     committed tokens leave, what hangs below them stays

Each has one CPU implementation, compiled loops that take one entry after the other and serve as the reference, and a
Triton kernel that leaves the same bits in every column up to `count`. None waits for the host.

Invariants after every operator: parents before children; no two entries with the same parent and token; value never
above the parent's; depth = parent's depth + 1; a non-zero id of one place at most once in a row, entries and trail
together; an entry has at least one id; an entry with an id of place d has only ancestors with an id of d.

Shapes, here and in the whole folder: S rows, C entries of a row, D places (workers that draft for a
session), T last committed positions of which ids are remembered. C, D and T are powers of two.
"""

from __future__ import annotations

import enum
from collections import namedtuple
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

__all__ = ["MAX_STOPS", "Columns", "NodeSlots", "Pool", "PoolArrays", "RowState", "arrays_type"]

MAX_STOPS = 64
"""Stop token ids of a session that the device knows."""


class RowState(enum.IntEnum):
    """State of a row's session."""

    EMPTY = 0
    PREFILL = 1
    """In a target's pool: committed tokens before the root have no KV (cached < length - 1)."""
    RUNNING = 2
    HELD = 3
    """As far ahead of its client as it may be (`Pool.allow`)."""
    FINISHED = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Base of what operators read and write: tensors of one device, as a dataclass.

    Attributes:
        KERNELS_ALONE: columns that compiled loops have no use for.
        arrays: on a CPU, all other columns as numpy arrays over the same memory, in the order of the fields. Compiled
            loops get this plain tuple and name its parts themselves (`arrays_type`): numba unpacks it in half the time.
    """

    KERNELS_ALONE: ClassVar[tuple[str, ...]] = ()
    arrays: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in _loop_columns(type(self))]
        if columns[0].device.type == "cpu":
            object.__setattr__(self, "arrays", tuple(column.numpy() for column in columns))


def _loop_columns(columns: type[Columns]) -> list[str]:
    # Annotations are strings here.
    return [
        each.name for each in fields(columns) if each.type == "torch.Tensor" and each.name not in columns.KERNELS_ALONE
    ]


def arrays_type(columns: type[Columns], *more: type[Columns]) -> Any:
    """Return a named tuple with the parts of `Columns.arrays`, called PoolArrays for a `Pool`."""
    names = [name for each in (columns, *more) for name in _loop_columns(each)]
    return namedtuple(f"{columns.__name__}Arrays", names, module=columns.__module__)


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeSlots(Columns):
    """KV slots of entries, for the pool of a drafter that computes here. Free slots are a queue, oldest first.

    Attributes:
        slot: [S, C] int32, KV slot of an expanded entry, else -1.
        expanded: [S, C] bool, whether the entry has KV.
        next_id: [S] int32, the id of the next entry that is appended. Records of the same place begin at 1 << 30.
        free: [N] int32, the queue, N a power of two: entry i stands at i mod N.
        free_head, free_tail: [1] int64, how many slots have ever left the queue and ever joined it.
        released: [S, C] int32, scratch: what an operator frees, row by row, before it joins the queue.
        released_count: [S] int32, scratch.
        released_cached: [S] int32, scratch: slots at the beginning of the row's table that are freed behind those.
    """

    slot: torch.Tensor
    expanded: torch.Tensor
    next_id: torch.Tensor
    free: torch.Tensor
    free_head: torch.Tensor
    free_tail: torch.Tensor
    released: torch.Tensor
    released_count: torch.Tensor
    released_cached: torch.Tensor

    @classmethod
    def allocate(cls, *, sessions: int, capacity: int, slots: int, device: torch.device | str) -> NodeSlots:
        """Return the columns of rows without entries; none of the N = `slots` is free yet."""

        def column(*shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        return cls(
            slot=column(sessions, capacity, fill=-1),
            expanded=column(sessions, capacity, dtype=torch.bool),
            next_id=column(sessions, fill=1),
            free=column(slots, fill=-1),
            free_head=column(1, dtype=torch.int64),
            free_tail=column(1, dtype=torch.int64),
            released=column(sessions, capacity),
            released_count=column(sessions),
            released_cached=column(sessions),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool(Columns):
    """All sessions' candidates and what the operators need to know of the sessions. Build one with `allocate`.

    An index counts tokens of prompt and output together; so does a length.

    Attributes:
        count: [S] int32, entries in use.
        token, parent, depth: [S, C] int32. parent: index of the parent entry, -1 for a child of the root; depth: 1 for
            a child of the root.
        acceptance: [S, C] float32, estimate that the target accepts the entry, given that it accepted the parent.
        value: [S, C] float32, product of the acceptances from the root downwards, multiplied in that order.
        ids: [S, C, D] int32, what each place calls the entry; 0: that place has not got it.
        drafters: [S, C] int8, bit set: which kinds of drafter have proposed the entry.
        stopped: [S, C] bool, whether the entry or an ancestor is a stop token in force.
        length: [S] int32, committed tokens; the root is the token at index length - 1.
        cached: [S] int32, committed tokens with KV of the model that computes here.
        history: [S, max_len] int32, the committed tokens.
        root_ids: [S, T, D] int32, the trail: what each place calls the committed token at index p, at p mod T for the
            last T indices; 0: unknown.
        state: [S] int8, a `RowState`.
        generation: [S] int32, number of the row's current opening, uint32 bits.
        end: [S] int32, the length at which the session ends.
        allow: [S] int32, the length up to which the session may run ahead of its client; 0 holds it.
        table: [S, max_len] int32, KV slots of the row.
        table_len: [S] int32, entries of `table` that are filled.
        lost: [S, D] bool, growth of that place on the committed path has been dropped.
        stops: [S, 64] int32, stop token ids, filled up with -1.
        min_end: [S] int32, the index from which a stop token ends the session.
        max_nodes: [S] int32, entries of the session that a step takes at most; in a draft worker, that may be alive.
        max_depth: [S] int32, depth from which a step takes no entries: a drafter expands none, a target verifies none.
        nodes: KV of entries, where a drafter computes here.
    """

    count: torch.Tensor
    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    acceptance: torch.Tensor
    value: torch.Tensor
    ids: torch.Tensor
    drafters: torch.Tensor
    stopped: torch.Tensor
    length: torch.Tensor
    cached: torch.Tensor
    history: torch.Tensor
    root_ids: torch.Tensor
    state: torch.Tensor
    generation: torch.Tensor
    end: torch.Tensor
    allow: torch.Tensor
    table: torch.Tensor
    table_len: torch.Tensor
    lost: torch.Tensor
    stops: torch.Tensor
    min_end: torch.Tensor
    max_nodes: torch.Tensor
    max_depth: torch.Tensor
    nodes: NodeSlots | None = None
    # Looked at by every call of an operator.
    device: torch.device = field(init=False)
    sessions: int = field(init=False)
    """S."""
    capacity: int = field(init=False)
    """C."""
    places: int = field(init=False)
    """D."""
    trail: int = field(init=False)
    """T."""
    max_len: int = field(init=False)
    """Tokens of the longest session."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {
            "device": self.count.device,
            "sessions": self.token.shape[0],
            "capacity": self.token.shape[1],
            "places": self.ids.shape[2],
            "trail": self.root_ids.shape[1],
            "max_len": self.history.shape[1],
        }
        for name, size in sizes.items():
            object.__setattr__(self, name, size)
        if self.device.type == "cpu":
            nodes = _NO_NODE_SLOTS if self.nodes is None else self.nodes.arrays
            object.__setattr__(self, "arrays", self.arrays + nodes)

    @classmethod
    def allocate(
        cls,
        *,
        sessions: int,
        max_len: int,
        capacity: int = 256,
        places: int = 4,
        trail: int = 64,
        node_slots: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Pool:
        """Return a pool of empty rows.

        Args:
            sessions: S.
            max_len: tokens of the longest session; in a draft worker its table has `capacity` entries more.
            capacity: C, a power of two.
            places: D, a power of two.
            trail: T, a power of two.
            node_slots: N, for the pool of a drafter that computes here: all its KV slots, a power of two; none is free
                yet. None for a target's pool.
            device: of all columns.

        Raises:
            ValueError: a size below 1, or one that has to be a power of two and is not.
        """
        sizes = {"sessions": sessions, "max_len": max_len, "capacity": capacity, "places": places, "trail": trail}
        if node_slots is not None:
            sizes["node_slots"] = node_slots
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: {size} given, at least 1 needed")
            if name in {"capacity", "places", "trail", "node_slots"} and size & (size - 1):
                raise ValueError(f"{name}: {size} given, a power of two needed")

        def column(*shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> torch.Tensor:
            return torch.full((sessions, *shape), fill, dtype=dtype, device=device)

        nodes = None
        if node_slots is not None:
            nodes = NodeSlots.allocate(sessions=sessions, capacity=capacity, slots=node_slots, device=device)
        return cls(
            count=column(),
            token=column(capacity),
            parent=column(capacity),
            depth=column(capacity),
            acceptance=column(capacity, dtype=torch.float32),
            value=column(capacity, dtype=torch.float32),
            ids=column(capacity, places),
            drafters=column(capacity, dtype=torch.int8),
            stopped=column(capacity, dtype=torch.bool),
            length=column(),
            cached=column(),
            history=column(max_len),
            root_ids=column(trail, places),
            state=column(dtype=torch.int8),
            generation=column(),
            end=column(),
            allow=column(),
            table=column(max_len if nodes is None else max_len + capacity, fill=-1),
            table_len=column(),
            lost=column(places, dtype=torch.bool),
            stops=column(MAX_STOPS, fill=-1),
            min_end=column(),
            max_nodes=column(fill=capacity),
            max_depth=column(fill=capacity),
            nodes=nodes,
        )


PoolArrays = arrays_type(Pool, NodeSlots)
"""`Pool.arrays`: its columns and behind them those of its `NodeSlots`."""

# A target's pool has no slots of entries: arrays of their types, of no size.
_NO_NODE_SLOTS = NodeSlots.allocate(sessions=0, capacity=0, slots=0, device="cpu").arrays
