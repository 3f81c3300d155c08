"""A draft head with its KV, and how it goes over one level of trees after the other.

Shapes: T rows, N hidden, S sessions, k nodes of a level, M slots of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.eagle import EagleHead
from outrider.engine.kv_slots import SlotTable
from outrider.errors import CheckpointError
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.target_worker.sessions import Session


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadLayer:
    """A head and what it has in every slot.

    Attributes:
        head: the draft head.
        keys, values: [num_slots, Hkv, D].
    """

    head: EagleHead
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, head: EagleHead, num_slots: int) -> HeadLayer:
        """With empty caches, on the head's device.

        Raises:
            CheckpointError: the device has no room.
        """
        like = head.weights.embedding
        shape = (num_slots, head.kv_heads, head.head_dim)
        try:
            # Zeros, not empty: what lies in a slot never written is multiplied by a weight of 0, and 0 * NaN is NaN.
            keys, values = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        # torch's own OutOfMemoryError is a RuntimeError, but on a CPU it is none.
        except RuntimeError as error:
            size = 2 * num_slots * head.kv_heads * head.head_dim * like.dtype.itemsize / 1e9
            raise CheckpointError(
                f"no room on {like.device} for the KV of the resident draft's head: {num_slots} slots take "
                f"{size:.2f} GB. Lower kv_cache_memory_fraction, kv_bytes or num_slots"
            ) from error
        return cls(head=head, keys=keys, values=values)

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        batch: TreeAttentionBatch,
    ) -> torch.Tensor:
        """`EagleHead.forward` over these caches."""
        return self.head.forward(
            hidden,
            token_ids,
            positions=positions,
            write_slots=write_slots,
            batch=batch,
            key_cache=self.keys,
            value_cache=self.values,
        )

    def store(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, *, positions: torch.Tensor, write_slots: torch.Tensor
    ) -> None:
        """`EagleHead.store` in these caches."""
        self.head.store(
            hidden,
            token_ids,
            positions=positions,
            write_slots=write_slots,
            key_cache=self.keys,
            value_cache=self.values,
        )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Kept:
    """What a session keeps of a forward: `rows` of it, whose slots stand at `first_index` and on."""

    session: Session
    rows: Sequence[int]
    first_index: int

    @property
    def end(self) -> int:
        """Keys of the session with these."""
        return self.first_index + len(self.rows)

    @property
    def tokens(self) -> Sequence[int]:
        """The token after each row."""
        return self.session.tokens[self.first_index + 1 : self.end + 1]

    def last(self, count: int) -> Kept:
        """Of the rows the last ones, at most so many."""
        rows = self.rows[-count:]
        return Kept(session=self.session, rows=rows, first_index=self.end - len(rows))


def kept_columns(kept: Sequence[Kept], slots: SlotTable) -> npt.NDArray[np.int64]:
    """[4, T] of each kept row: its number in the forward, the token after it, its position and its slot.

    Args:
        kept: all of them keep some rows, whose slots are reserved.
        slots: of the target.
    """
    counts = np.array([len(part.rows) for part in kept])
    # Of each session's first row, and then of every row.
    firsts = np.array([part.first_index for part in kept]) - counts.cumsum() + counts
    positions = firsts.repeat(counts) + np.arange(counts.sum())
    write_slots = slots.table[np.array([part.session.row for part in kept]).repeat(counts), positions]
    assert (write_slots >= 0).all(), "a row writes to a slot that was not reserved"
    rows = np.concatenate([part.rows for part in kept])
    tokens = np.concatenate([part.tokens for part in kept])
    return np.stack([rows, tokens, positions, write_slots], dtype=np.int64)


class TreeLevels:
    """What each row of a level sees, and where it stores.

    Args:
        layer: the head.
        slot_table: [S, at least roots + M] int32, slots of every session and behind them of its tree.
        roots: [S] int32, keys of each session before its tree.
        tree_slots: [S, M] int64, those of the tree.
        top_k: k.
    """

    def __init__(
        self,
        layer: HeadLayer,
        slot_table: torch.Tensor,
        roots: torch.Tensor,
        tree_slots: torch.Tensor,
        *,
        top_k: int,
    ) -> None:
        self._layer, self._table, self._roots, self._slots, self._top_k = layer, slot_table, roots, tree_slots, top_k
        self._prefix = roots.repeat_interleave(top_k)
        self._starts = torch.arange(roots.shape[0] + 1, dtype=torch.int32, device=roots.device) * top_k

    def step(self, level: int, hidden: torch.Tensor, tokens: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """See `resident_trees.Step`."""
        end = level * self._top_k
        batch = TreeAttentionBatch(
            slot_table=self._table,
            query_start=self._starts,
            tree_start=self._roots,
            prefix_len=self._prefix,
            key_len=self._roots + end,
            tree_mask=masks,
            max_query_len=self._top_k,
            max_key_len=self._table.shape[1],
        )
        return self._layer.forward(
            hidden,
            tokens,
            # The entry of a token stands one before it.
            positions=self._prefix + (level - 1),
            write_slots=self._slots[:, end - self._top_k : end].flatten(),
            batch=batch,
        )
