"""An EAGLE head's forward pass over the rows that a drafter's pool laid out.

A row of the head is that of a token, as a draft model's is: it reads the token and the hidden row before it, and its
logits say what follows. Where the target has computed that hidden row, it is found by the target's KV slot
(`Features`); below the last committed token it is the head's own, kept by the slot of its key and value.

Shapes: R rows, N sessions as in `outrider.kernels.pool.pack`; L rows with logits, V vocabulary.
"""

import torch

from outrider.engine.eagle import EagleHead
from outrider.engine.kv_memory import KvCaches
from outrider.engine.packed_forward import Features
from outrider.kernels.attention.slot_updates import gather_slot_rows
from outrider.kernels.drafting.entering import enter_rows
from outrider.kernels.pool.pack import Packed
from outrider.kernels.tree_attention import TreeAttentionBatch


class EagleForward:
    """The forward pass of one head with its caches, beside one target; a `ForwardPass`.

    Args:
        head: the model.
        features: of the target.
        target_table: [S, ..] int32, the KV slots of the target's rows.
        caches: KV of the head, written.
        sessions: N of the largest step.
        row_len: columns of the pool's table.
        trims: whether a step is run without padding, which waits for the device.
    """

    def __init__(
        self,
        head: EagleHead,
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
        # The last row is that of padding.
        self._grown = features.by_slot.new_zeros((len(self._caches[0]) + 1, head.hidden_size))
        self._slots = torch.full((sessions, row_len), -1, dtype=torch.int32, device=target_table.device)

    @torch.inference_mode()
    def logits(self, packed: Packed, table: torch.Tensor, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """Store the rows' keys, values and hidden rows, and return the wanted logits.

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
                return self._grown.new_zeros((len(rows), self._head.vocab_size))
        features = self._features.by_slot
        entering = enter_rows(packed, table, self._target_table, features, self._grown, count=count)
        # The first token is no key.
        slots, key_len = self._slots[:sessions], entering.key_len[:sessions]
        gather_slot_rows(table[:, 1:], packed.pool_rows[:sessions], key_len, slots)
        write_slots = packed.slots[:count]
        hidden = self._head.forward(
            entering.hidden,
            packed.tokens[:count],
            positions=entering.positions,
            write_slots=write_slots,
            batch=TreeAttentionBatch(
                slot_table=slots,
                query_start=packed.query_start[: sessions + 1],
                tree_start=entering.tree_start[:sessions],
                prefix_len=entering.prefix_len,
                key_len=key_len,
                tree_mask=packed.tree_mask[:count],
                max_query_len=most,
                max_key_len=slots.shape[1],
            ),
            key_cache=self._caches[0],
            value_cache=self._caches[1],
        )
        self._grown.index_copy_(0, write_slots.long(), hidden)
        return self._head.logits(hidden.index_select(0, rows))
