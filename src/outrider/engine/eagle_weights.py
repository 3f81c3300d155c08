"""An EAGLE head's weights, from the key names of published checkpoints.

    eagle1   fc.weight [N, 2 N], fc.bias (some have it)
             layers.0.{self_attn.*, post_attention_layernorm, mlp.*}
    eagle3   fc.weight [N, taps N'], norm.weight
             midlayer.{hidden_norm, input_layernorm, self_attn.*, post_attention_layernorm, mlp.*}, or layers.0.*
             lm_head.weight [Vd, N], d2t [Vd]: target id = draft id + d2t[draft id]
    block    as eagle3, and mask_embedding.weight [B, N], previous.weight [K, N], following.weight [N, K]

A name may begin with "model.". Embedding and output layer are the target's where the head has none, or may have none.

Shapes: N hidden of the head, N' of the target, H and Hkv heads of D, F feed-forward, V vocabulary, Vd of the head; B
positions of a block, K rank of its bias.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.eagle_spec import EagleSpec, read_eagle_spec
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError
from outrider.kernels.linear.skinny import Weight, linear

_LAYER_PREFIXES = ("midlayer.", "layers.0.")


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockWeights:
    """Weights of a block drafter beside those of a head."""

    masks: torch.Tensor  # [B, N], added to what enters at each position
    previous: torch.Tensor  # [K, N], reads the embedding of the token before
    following: torch.Tensor  # [N, K], between that and the output layer
    previous_table: torch.Tensor  # [V, K], product of the embedding and `previous`
    # [Vd, K], product of the output layer and `following`. A token's bias is its product with the row that
    # `previous_table` has for the token before.
    following_table: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class EagleWeights:
    """All weights of a head."""

    embedding: torch.Tensor  # [V, N], the target's unless the head is of another width
    fc: torch.Tensor  # [N, 2 N] or [N, taps N']
    fc_bias: torch.Tensor | None  # [N] or None
    # embedding_norm, hidden_norm: [N] before the attention, or None in the layout without them.
    embedding_norm: torch.Tensor | None
    hidden_norm: torch.Tensor | None
    qkv: torch.Tensor  # [(H + 2 Hkv) D, N or 2 N]
    qkv_bias: torch.Tensor | None  # [(H + 2 Hkv) D] or None
    attention_output: torch.Tensor  # [N, H D]
    feed_forward_norm: torch.Tensor  # [N]
    gate_up: torch.Tensor  # [2 F, N]
    down: torch.Tensor  # [N, F]
    final_norm: torch.Tensor | None  # [N] before the output layer, or None
    output: Weight  # [Vd, N]
    # [Vd] int64, the target's id of each row of `output`; None where row i is token i.
    target_ids: torch.Tensor | None
    rotary_table: torch.Tensor  # [positions, 2, D / 2] float32
    block: BlockWeights | None  # of a block drafter, or None


def load_eagle_weights(
    folder: Path, *, embedding: torch.Tensor, output: Weight, target_layers: int, max_positions: int
) -> tuple[EagleSpec, EagleWeights]:
    """A head's architecture and weights, of the dtype and on the device of `embedding`.

    Args:
        embedding: [V, N'] of the target.
        output: [V, N'] of the target.
        max_positions: rows of the rotary table.

    Raises:
        CheckpointError: a tensor is missing or of a wrong shape, with its name; the head is another target's, or does
            not fit on the device.
    """
    source = open_head(folder)
    spec = read_eagle_spec(folder, target_layers=target_layers, stored=source.names)
    try:
        return spec, _Loader(source, spec, embedding, output).load(max_positions)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{folder}: the head's weights do not fit on {embedding.device} beside the target: lower "
            "kv_cache_memory_fraction, kv_bytes or num_slots, or free the memory that others hold"
        ) from error


def open_head(folder: Path) -> SafetensorsSource:
    """Open a head's tensors; CheckpointError where there is no safetensors file, or it is torn."""
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: no *.safetensors; other weight files can run code and are not read: "
                              "load them with torch and save them with safetensors again")  # fmt: skip
    return SafetensorsSource(folder)


def previous_rows(embedding: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Return `previous_table` [V, K] of the embedding [V, N] and `previous` [K, N]."""
    return linear(embedding, previous)


def following_rows(output: Weight, following: torch.Tensor) -> torch.Tensor:
    """Return `following_table` [Vd, K] of the output layer [Vd, N] and `following` [N, K]."""
    return linear(following.mT.contiguous(), output).mT.contiguous()


class _Loader:
    def __init__(self, source: SafetensorsSource, spec: EagleSpec, embedding: torch.Tensor, output: Weight) -> None:
        self._source, self._spec, self._embedding, self._output = source, spec, embedding, output
        self._is_third = spec.layout == "eagle3"
        self._prefix = next((p for p in _LAYER_PREFIXES if any(p in name for name in source.names)), _LAYER_PREFIXES[0])

    def load(self, max_positions: int) -> EagleWeights:
        spec, layer, third = self._spec, self._spec.layer, self._is_third
        hidden, target_hidden = layer.hidden_size, self._embedding.shape[1]
        if layer.vocab_size != self._embedding.shape[0]:
            raise CheckpointError(f"{self._source.place}: vocab_size is {layer.vocab_size}, the target has "
                                  f"{self._embedding.shape[0]}: is it a head of this target?")  # fmt: skip
        if not third and hidden != target_hidden:
            raise CheckpointError(f"{self._source.place}: hidden_size is {hidden}, that of the target "
                                  f"({target_hidden}) needed in this layout")  # fmt: skip
        query, key = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        attention, feed_forward = f"{self._prefix}self_attn.", f"{self._prefix}mlp."
        width = 2 * hidden if third else hidden
        output, target_ids = self._output_layer()
        embedding = self._own_embedding()
        return EagleWeights(
            embedding=embedding,
            fc=self._tensor("fc.weight", (hidden, len(spec.taps) * target_hidden if third else 2 * hidden)),
            fc_bias=None if third else self._optional("fc.bias", (hidden,)),
            embedding_norm=self._tensor(f"{self._prefix}input_layernorm.weight", (hidden,)) if third else None,
            hidden_norm=self._tensor(f"{self._prefix}hidden_norm.weight", (hidden,)) if third else None,
            qkv=torch.cat([self._tensor(f"{attention}{name}_proj.weight", (rows, width))
                           for name, rows in (("q", query), ("k", key), ("v", key))]),
            qkv_bias=self._qkv_bias(attention, query, key),
            attention_output=self._tensor(f"{attention}o_proj.weight", (hidden, query)),
            feed_forward_norm=self._tensor(f"{self._prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=torch.cat([self._tensor(f"{feed_forward}{name}_proj.weight", (layer.intermediate_size, hidden))
                               for name in ("gate", "up")]),
            down=self._tensor(f"{feed_forward}down_proj.weight", (hidden, layer.intermediate_size)),
            final_norm=self._tensor("norm.weight", (hidden,)) if third else None,
            output=output,
            target_ids=target_ids,
            rotary_table=layer.rotaries[0].table(max_positions).to(self._embedding.device),
            block=self._block(embedding, output) if spec.is_block else None,
        )  # fmt: skip

    def _block(self, embedding: torch.Tensor, output: Weight) -> BlockWeights:
        """Masks and matrices, and the tables that are made of them."""
        hidden, rank = self._spec.hidden_size, self._spec.block_rank
        previous = self._tensor("previous.weight", (rank, hidden))
        following = self._tensor("following.weight", (hidden, rank))
        return BlockWeights(
            masks=self._tensor("mask_embedding.weight", (self._spec.block_size, hidden)),
            previous=previous,
            following=following,
            previous_table=previous_rows(embedding, previous),
            following_table=following_rows(output, following),
        )

    def _own_embedding(self) -> torch.Tensor:
        """The target's: heads that carry one carry a copy of it."""
        vocab, hidden = self._spec.layer.vocab_size, self._spec.hidden_size
        if self._embedding.shape[1] == hidden:
            return self._embedding
        return self._tensor("embed_tokens.weight", (vocab, hidden))

    def _output_layer(self) -> tuple[Weight, torch.Tensor | None]:
        spec, vocab = self._spec, self._spec.layer.vocab_size
        if not self._is_third:
            return self._output, None
        fits = spec.draft_vocab_size == vocab and self._output.shape[1] == spec.hidden_size
        shape = (spec.draft_vocab_size, spec.hidden_size)
        output = self._output if fits and not spec.has_output else self._tensor("lm_head.weight", shape)
        return output, self._target_ids()

    def _target_ids(self) -> torch.Tensor | None:
        count, vocab, place = self._spec.draft_vocab_size, self._spec.layer.vocab_size, self._source.place
        name = self._find("d2t")
        if name is None:
            if count == vocab:
                return None
            raise CheckpointError(f"{place}: d2t is missing: {count} of {vocab} tokens have rows, and it says which")
        offsets = self._source.tensor(name)
        if tuple(offsets.shape) != (count,) or offsets.is_floating_point():
            raise CheckpointError(f"{place}: {name}: {list(offsets.shape)} {offsets.dtype} given, "
                                  f"[{count}] whole numbers needed")  # fmt: skip
        ids = offsets.long() + torch.arange(count)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < count:
            raise CheckpointError(f"{place}: {name} names tokens twice, or outside the {vocab} of the target")
        return ids.to(self._embedding.device) if bool(offsets.any()) else None

    def _qkv_bias(self, attention: str, query: int, key: int) -> torch.Tensor | None:
        parts = [self._optional(f"{attention}{name}_proj.bias", (rows,)) for name, rows in
                 (("q", query), ("k", key), ("v", key))]  # fmt: skip
        found = [part for part in parts if part is not None]
        if not found:
            return None
        if len(found) < len(parts):
            raise CheckpointError(f"{self._source.place}: {attention}: biases of some of q_proj, k_proj and v_proj are "
                                  "missing; copy or save the checkpoint again")  # fmt: skip
        return torch.cat(found)

    def _optional(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        return None if self._find(name) is None else self._tensor(name, shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._find(name) or name
        self._source.check({found: shape})
        return self._source.tensor(found).to(self._embedding.device, self._embedding.dtype).contiguous()

    def _find(self, name: str) -> str | None:
        return next((full for full in (name, f"model.{name}") if self._source.stores(full)), None)
