"""A model's forward pass over the rows that a pool's `pack` laid out.

Shapes: R rows, N sessions, W mask words as in `outrider.kernels.pool.pack`; L rows with logits, V vocabulary.
"""

from typing import Any

import torch

from outrider.engine.attention import AttentionStep, TreeAttention
from outrider.engine.decoder import Decoder, DecoderInputs
from outrider.engine.step_program import KvCaches
from outrider.kernels.pool.pack import Packed
from outrider.kernels.slot_updates import gather_slot_rows, store_positions
from outrider.kernels.tree_attention import TreeAttentionBatch


class PackedForward:
    """The forward pass of one model with its caches.

    Args:
        model: the decoder, or transformers' own model.
        caches: its KV, written.
        attend: the attention operator, for transformers' model.
        sessions: N of the largest step.
        row_len: columns of the pool's table.
    """

    def __init__(
        self, model: Decoder | torch.nn.Module, caches: KvCaches, *, attend: TreeAttention, sessions: int, row_len: int
    ) -> None:
        self._model, self._caches, self._attend = model, caches, attend
        # Attention reads it within the step, so all buckets share it.
        self._slots = torch.full((sessions, row_len), -1, dtype=torch.int32, device=caches.positions.device)
        self._windowed = isinstance(model, Decoder) and any(layer.window for layer in model.spec.layers)

    @torch.inference_mode()
    def logits(self, packed: Packed, table: torch.Tensor, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """Store the rows' keys and values, and return the wanted logits.

        Args:
            packed: the step; with the decoder padding takes part, so that launches depend on the bucket alone.
            table: [S, row_len] int32, the pool's KV slots.
            rows: [L] int64, rows of the step.
            most: bound of the rows of one session.

        Returns:
            [L, V] in the model's dtype for the decoder, else float32.
        """
        if isinstance(self._model, Decoder):
            return self._decode(self._model, packed, table, rows, most)
        return self._run_model(self._model, packed, table, rows)

    def _decode(
        self, decoder: Decoder, packed: Packed, table: torch.Tensor, rows: torch.Tensor, most: int
    ) -> torch.Tensor:
        slots = self._slots[: packed.pool_rows.shape[0]]
        gather_slot_rows(table, packed.pool_rows, packed.key_len, slots)
        if self._windowed:
            store_positions(self._caches.positions, packed.slots, packed.positions)
        inputs = DecoderInputs(
            token_ids=packed.tokens,
            positions=packed.positions,
            write_slots=packed.slots,
            batch=TreeAttentionBatch(
                slot_table=slots,
                query_start=packed.query_start,
                tree_start=packed.tree_start,
                prefix_len=packed.prefix_len,
                key_len=packed.key_len,
                tree_mask=packed.tree_mask,
                max_query_len=most,
                max_key_len=slots.shape[1],
                positions=packed.positions,
                slot_positions=self._caches.positions,
            ),
            key_caches=self._caches.keys,
            value_caches=self._caches.values,
        )
        return decoder.logits(decoder.forward(inputs), rows)

    def _run_model(self, model: Any, packed: Packed, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        count, sessions = int(packed.query_start[-1]), int((packed.pool_rows >= 0).sum())
        key_len = packed.key_len[:sessions]
        positions, slots = packed.positions[:count], packed.slots[:count].long()
        self._caches.positions.index_copy_(0, slots, positions)
        slot_table = table[packed.pool_rows[:sessions].long(), : int(key_len.max())]
        query_start = packed.query_start[: sessions + 1]
        step = AttentionStep(
            key_caches=self._caches.keys,
            value_caches=self._caches.values,
            write_slots=slots,
            batch=TreeAttentionBatch(
                slot_table=slot_table,
                query_start=query_start,
                tree_start=packed.tree_start[:sessions],
                prefix_len=packed.prefix_len[:count],
                key_len=key_len,
                tree_mask=packed.tree_mask[:count],
                max_query_len=int(query_start.diff().max()),
                max_key_len=slot_table.shape[1],
                positions=positions,
                slot_positions=self._caches.positions,
            ),
            attend=self._attend,
        )
        inputs = {
            "input_ids": packed.tokens[:count].long()[None],
            "position_ids": positions.long()[None],
            "use_cache": False,
            "step": step,
        }
        if not len(rows):
            model.base_model(**inputs)
            return torch.empty((0, model.config.vocab_size), dtype=torch.float32, device=table.device)
        return model(**inputs, logits_to_keep=rows).logits[0].float()
