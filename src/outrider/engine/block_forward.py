"""A block drafter's forward pass over the rows that a drafter's pool laid out, and the trees that it gives.

One pass answers for the B positions behind the root of each session that has something new: committed tokens enter with
the target's hidden rows, as those of a head do, and store keys and values; the root's row is computed B times, once a
position. The logits stay by row of the pool. A node at depth d, and the root at depth 0, has as logits those of
position d and the bias by its own token. So a tree grows level by level, and its further levels need no pass (`read`).

Shapes: R rows, N sessions as in `outrider.kernels.pool.pack`; S rows of the pool, L rows with logits, V vocabulary, Vd
of the drafter.
"""

import torch

from outrider.engine.eagle import BlockHead
from outrider.engine.kv_memory import KvCaches
from outrider.engine.packed_forward import Features
from outrider.kernels.attention.slot_updates import gather_slot_rows
from outrider.kernels.drafting.entering import enter_rows
from outrider.kernels.pool.pack import Packed


class BlockForward:
    """The forward pass of one block drafter with its caches, beside one target; a `ForwardPass`.

    Args:
        head: the model.
        features: of the target.
        target_table: [S, ..] int32, the KV slots of the target's rows.
        caches: KV of the drafter, written.
        sessions: N of the largest step.
        row_len: columns of the pool's table.
        trims: whether a step is run without padding, which waits for the device.
    """

    def __init__(
        self,
        head: BlockHead,
        features: Features,
        target_table: torch.Tensor,
        caches: KvCaches,
        *,
        sessions: int,
        row_len: int,
        trims: bool,
    ) -> None:
        self._head, self._features, self._target_table, self._trims = head, features, target_table, trims
        self._caches = caches.keys[0], caches.values[0]
        self._slots = torch.full((sessions, row_len), -1, dtype=torch.int32, device=target_table.device)
        # The last one is that of padding.
        self._blocks = features.by_slot.new_zeros((len(target_table) + 1, head.block_size, head.spec.draft_vocab_size))

    @torch.inference_mode()
    def logits(self, packed: Packed, table: torch.Tensor, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """Compute the block of every session with committed rows in the step, and return the wanted logits.

        Args:
            packed: the step.
            table: [S, row_len] int32, the pool's KV slots.
            rows: [L] int64, rows of the step.
            most: bound of the rows of one session.

        Returns:
            [L, V] in the model's dtype.
        """
        count, sessions = None, packed.pool_rows.shape[0]
        if self._trims:
            count, sessions = int(packed.query_start[-1]), int((packed.pool_rows >= 0).sum())
            if not count:
                return self._blocks.new_zeros((len(rows), self._head.vocab_size))
        entering = enter_rows(packed, table, self._target_table, self._features.by_slot, None, count=count)
        tokens, pool_rows = packed.tokens[:count], packed.pool_rows[:sessions]
        caches = {"key_cache": self._caches[0], "value_cache": self._caches[1]}
        self._head.store(
            entering.hidden, tokens, positions=entering.positions, write_slots=packed.slots[:count], **caches
        )
        # A session's committed rows stand before its nodes. The first token is no key.
        first = packed.query_start[:sessions].long().clamp(max=len(tokens) - 1)
        own = packed.tree_start[:sessions] - packed.positions[first]
        last, key_len = (first + own - 1).clamp(0, len(tokens) - 1), entering.tree_start[:sessions]
        slots = self._slots[:sessions]
        gather_slot_rows(table[:, 1:], pool_rows, key_len, slots)
        blocks = self._head.block_logits(
            entering.hidden[last],
            tokens[last],
            positions=entering.positions[last],
            slot_table=slots,
            key_len=key_len,
            **caches,
        )
        is_new = (own > 0) & (pool_rows >= 0)
        self._blocks.index_copy_(0, torch.where(is_new, pool_rows, len(self._blocks) - 1).long(), blocks)
        return self.read(packed, rows)

    @torch.inference_mode()
    def read(self, packed: Packed, rows: torch.Tensor) -> torch.Tensor:
        """Return the wanted logits of a step whose sessions all have their blocks: [L, V] of rows [L] int64."""
        pool_rows = packed.pool_rows[packed.sessions[rows].clamp(min=0)]
        # The prefix of a node ends with the root.
        depth = (packed.positions[rows] + 1 - packed.prefix_len[rows]).clamp(0, self._head.block_size - 1)
        return self._head.spread(self._blocks[pool_rows, depth] + self._head.bias(packed.tokens[rows]))
