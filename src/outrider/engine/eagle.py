"""An EAGLE head or block drafter: one layer that drafts from the target's hidden states.

    eagle1   h[i] = layer(fc [embedding(token i+1), f[i]])               logits = target's output(h)
    eagle3   g[i] = fc [features of i], once;  h[i] = layer([norm(embedding(token i+1)), norm(g[i])]) beside g[i]
                                                                        logits = own output(norm(h))

h[i] says what follows token i + 1. Drafting on, it stands where f or g stood: row i + 1 of a drafted token t reads
h[i] and the embedding of t. Row i has position i. `outrider.engine.head_forward` runs it in growth steps.

A block drafter (parallel drafting with masks, as P-EAGLE's) answers for B positions of row i in one pass:

    block    h[i, s] = layer([norm(embedding(token i+1)), norm(g[i] + mask[s])]) beside g[i] + mask[s], at i + s
             logits of what follows a token t, s tokens behind token i + 1 = own output(norm(h[i, s])) + bias(t)

All B rows attend to the rows of position 0 up to i, and to no other position's: with one layer, a mask's keys and
values could tell nothing but the mask. `outrider.engine.head_forward` makes trees of it.

Nothing waits for the device and no shape depends on values, so all of it can be captured in a graph. On CPU tensors the
operators run their references.

Shapes: T rows, R rows whose logits are wanted, N hidden, F features of the target, H and Hkv heads of D, V vocabulary
of the target, Vd of the head.
"""

from pathlib import Path

import torch
from torch.nn import functional

from outrider.engine.attention import TreeAttention
from outrider.engine.eagle_spec import EagleSpec
from outrider.engine.eagle_weights import (
    BlockWeights,
    EagleWeights,
    following_rows,
    load_eagle_weights,
    previous_rows,
)
from outrider.kernels.attention.rotary_store import rotary_store
from outrider.kernels.linear.paired_norm import paired_norm
from outrider.kernels.linear.residual_norm import residual_norm
from outrider.kernels.linear.skinny import Weight, gated_linear, linear, linear_parts
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention


class EagleHead:
    """A loaded head.

    Args:
        final_softcap: bound of the target's logits, where its output layer is used; 0 for none.
    """

    def __init__(
        self,
        spec: EagleSpec,
        weights: EagleWeights,
        *,
        attend: TreeAttention = tree_attention,
        final_softcap: float = 0.0,
    ) -> None:
        self.spec, self.weights, self._attend = spec, weights, attend
        self._softcap = final_softcap if spec.layout == "eagle1" else 0.0
        self.hidden_size, self.vocab_size = spec.hidden_size, spec.layer.vocab_size
        # Its key and value caches are [num_slots, kv_heads, head_dim] each.
        self.kv_heads, self.head_dim = spec.layer.kv_heads, spec.layer.head_dim
        # Where the target's hidden states are read: after so many layers, un-normed, or `LAST_NORM`.
        self.taps = spec.taps
        # [Vd] int64, the target's id of each column of `draft_logits`; None where column i is token i.
        self.target_ids = weights.target_ids

    @torch.inference_mode()
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Project hidden states of the `taps`, [T, F], to the layer's input [T, N].

        Rows that the head has drafted itself enter as `forward` returned them.
        """
        if self.spec.layout == "eagle1":
            return features
        return linear(features, self.weights.fc)

    @torch.inference_mode()
    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        batch: TreeAttentionBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Store the rows' keys and values in their slots; return new rows [T, N], which logits and further rows read.

        Args:
            hidden: [T, N] of `fuse`, or of `forward` for rows that were drafted; not changed.
            token_ids: [T] int32 or int64, the token after each row.
            positions: [T] int32 of the rows.
            write_slots: [T] int64; a row whose slot is out of range stores nothing.
            batch: who sees what.
            key_cache, value_cache: [num_slots, Hkv, D], written.
        """
        spec, weights, eps = self.spec.layer, self.weights, self.spec.layer.norm_eps
        stream, query = self._stored(hidden, token_ids, positions, write_slots, (key_cache, value_cache))
        mixed = self._attend(query, key_cache, value_cache, batch, scale=spec.attention_scale)
        addend = linear_parts(mixed.flatten(1), weights.attention_output)
        rows = residual_norm(stream, addend, weights.feed_forward_norm, eps=eps)
        addend = linear_parts(gated_linear(rows, weights.gate_up, activation=spec.activation), weights.down)
        # Only the sum is wanted, and this is the operator that adds up parts in one launch.
        residual_norm(stream, addend, weights.feed_forward_norm, eps=eps)
        return stream

    @torch.inference_mode()
    def store(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> None:
        """Store the rows' keys and values, as `forward` does, and compute nothing more.

        Args:
            hidden: [T, N] of `fuse`; not changed.
            token_ids: [T] int32 or int64, the token after each row.
            positions: [T] int32 of the rows.
            write_slots: [T] int64; a row whose slot is out of range stores nothing.
            key_cache, value_cache: [num_slots, Hkv, D], written.
        """
        self._stored(hidden, token_ids, positions, write_slots, (key_cache, value_cache))

    @torch.inference_mode()
    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of rows [R, N] of `forward`, in the model's dtype; columns as in `target_ids`."""
        norm = self.weights.final_norm
        rows = hidden if norm is None else residual_norm(hidden, None, norm, eps=self.spec.layer.norm_eps)
        logits = linear(rows, self.weights.output)
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of rows [R, N] of `forward`; -inf for tokens that the head has no row for."""
        return self.spread(self.draft_logits(hidden))

    @torch.inference_mode()
    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of `draft_logits` [R, Vd]; -inf for tokens that the head has no row for."""
        ids = self.target_ids
        if ids is None:
            missing = self.vocab_size - logits.shape[1]
            return functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
        return logits.new_full((len(logits), self.vocab_size), float("-inf")).index_copy_(1, ids, logits)

    def _stored(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the rows' keys and values; return the residual stream [T, N] and the queries [T, H, D]."""
        spec, weights = self.spec.layer, self.weights
        stream, rows = self._enter(hidden, token_ids)
        query = rotary_store(
            linear_parts(rows, weights.qkv),
            weights.rotary_table,
            positions,
            write_slots,
            *caches,
            heads=spec.heads,
            bias=weights.qkv_bias,
            query_dtype=rows.dtype,
        )
        return stream, query

    def _enter(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream [T, N], to be changed, and what the attention reads, [T, N or 2 N]."""
        weights = self.weights
        if weights.hidden_norm is None or weights.embedding_norm is None:
            embedded = functional.embedding(token_ids, weights.embedding)
            stream = linear(torch.cat((embedded, hidden), dim=1), weights.fc)
            if weights.fc_bias is not None:
                stream += weights.fc_bias
            return stream, stream
        return paired_norm(
            hidden,
            token_ids,
            weights.embedding,
            table_weight=weights.embedding_norm,
            hidden_weight=weights.hidden_norm,
            eps=self.spec.layer.norm_eps,
            streams_normed=self.spec.norm_before_residual,
        )


class BlockHead(EagleHead):
    """A loaded block drafter."""

    @property
    def block_size(self) -> int:
        """B, tokens of a block."""
        return self.spec.block_size

    @torch.inference_mode()
    def block_logits(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        slot_table: torch.Tensor,
        key_len: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [n, B, Vd] of B positions behind each of n sessions, without the bias by the token before.

        Args:
            hidden: [n, N] of `fuse`, of the sessions' last rows, whose keys and values are stored.
            token_ids: [n] int32 or int64, the token after each.
            positions: [n] int32 of these rows.
            slot_table: [n, ..] int32, slots of the sessions' rows.
            key_len: [n] int32: how many.
            key_cache, value_cache: [num_slots, Hkv, D], read.
        """
        weights, size, count = self._block, self.block_size, len(hidden)
        number = torch.arange(max(size, count + 1), dtype=torch.int32, device=hidden.device)
        rows = self.forward(
            (hidden[:, None] + weights.masks).flatten(0, 1),
            token_ids.repeat_interleave(size),
            positions=(positions[:, None] + number[:size]).flatten(),
            write_slots=torch.full((count * size,), -1, dtype=torch.int64, device=hidden.device),
            batch=TreeAttentionBatch(
                slot_table=slot_table,
                query_start=number[: count + 1] * size,
                tree_start=key_len,
                prefix_len=key_len.repeat_interleave(size),
                key_len=key_len,
                tree_mask=torch.zeros((count * size, 1), dtype=torch.int64, device=hidden.device),
                max_query_len=size,
                max_key_len=slot_table.shape[1],
            ),
            key_cache=key_cache,
            value_cache=value_cache,
        )
        return self.draft_logits(rows).unflatten(0, (count, size))

    @torch.inference_mode()
    def bias(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The bias [R, Vd] of the logits of what follows each of these tokens [R]."""
        before = functional.embedding(token_ids, self._block.previous_table)
        return linear(before, self._block.following_table)

    @torch.inference_mode()
    def refill(self) -> None:
        """Make the tables of the bias anew, in place, from what the embedding and the output layer hold now.

        No step may be in flight.
        """
        block = self._block
        block.previous_table.copy_(previous_rows(self.weights.embedding, block.previous))
        block.following_table.copy_(following_rows(self.weights.output, block.following))

    @property
    def _block(self) -> BlockWeights:
        block = self.weights.block
        assert block is not None, "weights of a block drafter"
        return block


def load_eagle_head(
    folder: Path | str,
    *,
    embedding: torch.Tensor,
    output: Weight,
    target_layers: int,
    max_positions: int,
    attend: TreeAttention = tree_attention,
    final_softcap: float = 0.0,
) -> EagleHead:
    """The head or block drafter in a checkpoint folder, in the dtype and on the device of the target's embedding.

    Args:
        folder: config.json and safetensors, in either layout.
        embedding: [V, N'] of the target, shared.
        output: [V, N'] the target's output layer, shared where the head has none.
        max_positions: rows of the rotary table: the longest sequence and a tree behind it.
        final_softcap: of the target's logits.

    Raises:
        CheckpointError: a tensor is missing or of a wrong shape, with its name; or the head is another target's.
    """
    spec, weights = load_eagle_weights(
        Path(folder), embedding=embedding, output=output, target_layers=target_layers, max_positions=max_positions
    )
    kind = BlockHead if spec.is_block else EagleHead
    return kind(spec, weights, attend=attend, final_softcap=final_softcap)
