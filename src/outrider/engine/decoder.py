"""A model's forward as a program of fused operators: what a CUDA graph of a step captures.

    hidden = embedding[token_ids] * factor
    every layer:
        rows    = norm(hidden)
        qkv     = rows qkv^T
        query   = rotary(qkv), its keys and values into their slots
        addend  = attention(query) output^T
        rows    = norm(hidden += addend)
        addend  = (act(rows gate^T) * rows up^T) down^T       added with the next layer's norm
    hidden rows = norm(hidden += addend)
    logits      = softcap(rows head^T)

Nothing waits for the device and no shape depends on values, so a forward can be captured. On CPU tensors the operators
run their references, and logits equal those of transformers' own model code. Weights of 8 bits change the products
alone (`outrider.kernels.linear.skinny`).

Shapes: T rows, R rows whose logits are wanted, V vocabulary, N hidden, H query heads and Hkv key/value heads of D, P
partial sums of a product whose reduction was split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.engine.attention import TreeAttention
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import DecoderWeights, LayerWeights
from outrider.kernels.attention.rotary_store import rotary_store
from outrider.kernels.linear.gated_activation import gated_activation
from outrider.kernels.linear.residual_norm import residual_norm
from outrider.kernels.linear.skinny import Weight, gated_linear, linear, linear_parts
from outrider.kernels.tree_attention import TreeAttentionBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderInputs:
    """The work of one forward pass."""

    token_ids: torch.Tensor  # [T] int32 or int64
    positions: torch.Tensor  # [T] int32
    write_slots: torch.Tensor  # [T] int64; a row whose slot is out of range stores nothing
    batch: TreeAttentionBatch  # who sees what
    # key_caches, value_caches: per layer [num_slots, Hkv / world_size, D], written.
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    # Whose hidden states are wanted: i is the residual stream after i layers, 0 the embeddings, -1 what the last norm
    # returns.
    feature_layers: tuple[int, ...] = ()
    # [T, len(feature_layers) * N] written with them, one layer's columns after another's; None where there are none.
    features: torch.Tensor | None = None

    def note(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep the hidden states [T, N] after this many layers, where they are wanted."""
        if self.features is None:
            return
        width = hidden.shape[1]
        for place, wanted in enumerate(self.feature_layers):
            # A head of a small target may name one layer twice.
            if wanted == layer:
                self.features[:, place * width : (place + 1) * width].copy_(hidden)


class Decoder:
    """One rank's part of a model.

    Args:
        all_reduce: [P, T, N] of this rank to [P', T, N] whose parts add up to the sum over all ranks; needed with more
            than one rank.
        sum_norm: `residual_norm` of an addend [P, T, N] of this rank whose sum over all ranks is meant.
        gather_logits: [R, v] of this rank to [R, v * world_size] of all, in their order; needed with more than one
            rank.
        fixed: every product in one order for all T, so that a row's bits do not depend on the other rows.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        attend: TreeAttention,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        sum_norm: Callable[..., torch.Tensor] | None = None,
        gather_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        fixed: bool = False,
    ) -> None:
        assert weights.world_size == 1 or (all_reduce is not None and gather_logits is not None)
        self.spec, self.weights = spec, weights
        self._attend, self._all_reduce, self._gather_logits, self._fixed = attend, all_reduce, gather_logits, fixed
        self._heads = spec.heads // weights.world_size
        # A bias is added once, to the sum.
        biased = any(layer.output_bias is not None or layer.down_bias is not None for layer in weights.layers)
        self._sum_norm = sum_norm if weights.world_size > 1 and not biased else None
        # transformers keeps the factor in the model's dtype.
        self._embedding_factor = torch.tensor(spec.embedding_factor).to(weights.embedding.dtype).item()

    @torch.inference_mode()
    def forward(self, inputs: DecoderInputs) -> torch.Tensor:
        """Store the rows' keys and values in their slots and return the last norm's rows, [T, N]."""
        eps = self.spec.norm_eps
        hidden = functional.embedding(inputs.token_ids, self.weights.embedding)
        if self._embedding_factor != 1:
            hidden *= self._embedding_factor
        addend = addend_norm = None
        for index, layer in enumerate(self.weights.layers):
            rows = self._norm(hidden, addend, layer.attention_norm, eps=eps, addend_weight=addend_norm)
            inputs.note(index, hidden)
            mixed = self._attention(index, layer, rows, inputs)
            addend = self._addend(mixed, layer.output, layer.output_bias)
            rows = self._norm(
                hidden, addend, layer.feed_forward_norm, eps=eps, addend_weight=layer.attention_addend_norm
            )
            addend = self._addend(self._gated(rows, layer), layer.down, layer.down_bias)
            addend_norm = layer.feed_forward_addend_norm
        rows = self._norm(hidden, addend, self.weights.final_norm, eps=eps, addend_weight=addend_norm)
        inputs.note(len(self.weights.layers), hidden)
        inputs.note(-1, rows)
        return rows

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype of the rows `logit_rows` [R] of what `forward` returned."""
        logits = linear(hidden.index_select(0, logit_rows), self.weights.head, fixed=self._fixed)
        if self._gather_logits is not None and self.weights.world_size > 1:
            # The last rank's rows are filled up past the vocabulary.
            logits = self._gather_logits(logits)[:, : self.spec.vocab_size]
        cap = self.spec.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        eps: float,
        addend_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """`residual_norm`, over all ranks."""
        norm = residual_norm if addend is None or self._sum_norm is None else self._sum_norm
        return norm(hidden, addend, weight, eps=eps, addend_weight=addend_weight)

    def _attention(self, index: int, layer: LayerWeights, rows: torch.Tensor, inputs: DecoderInputs) -> torch.Tensor:
        """The heads' results side by side, [T, H D]."""
        spec, place = self.spec, self.spec.layers[index]
        key_cache, value_cache = inputs.key_caches[index], inputs.value_caches[index]
        query = rotary_store(
            linear_parts(rows, layer.qkv, fixed=self._fixed),
            self.weights.rotary_tables[place.rotary],
            inputs.positions,
            inputs.write_slots,
            key_cache,
            value_cache,
            heads=self._heads,
            bias=layer.qkv_bias,
            q_norm=layer.query_norm,
            k_norm=layer.key_norm,
            eps=spec.norm_eps,
            query_dtype=rows.dtype,
        )
        mixed = self._attend(
            query,
            key_cache,
            value_cache,
            inputs.batch,
            scale=spec.attention_scale,
            sliding_window=place.window,
            softcap=spec.attention_softcap,
        )
        return mixed.flatten(1)

    def _addend(self, rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a block's output in parts [P, T, N], summed over ranks unless the next norm does that."""
        addend = linear_parts(rows, weight, fixed=self._fixed)
        if self._all_reduce is not None and self.weights.world_size > 1 and self._sum_norm is None:
            addend = self._all_reduce(addend)
        if bias is not None:
            addend[0].add_(bias)
        return addend

    def _gated(self, rows: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """[T, f]."""
        if layer.gate_up_bias is None:
            return gated_linear(rows, layer.gate_up, activation=self.spec.activation, fixed=self._fixed)
        gate_up = linear(rows, layer.gate_up, fixed=self._fixed) + layer.gate_up_bias
        return gated_activation(gate_up, activation=self.spec.activation)
