"""The embedded target's EAGLE-3 head or block drafter, widened together with the target: the same logits.

    features        of the widened target: at every tap [w channels | constant channel | zeros]
    fc              reads the w channels of every tap; the constant channel of the first goes on as it is
    layer           as a layer of the target (`outrider.models.widened_weights`); queries, keys and values read two
                    halves, normed embedding and normed stream, which are widened one by one
    output layer    rows for the small vocabulary, then padding rows that read the constant channel alone, up to as many
                    as published heads have, or one at least; row i stands for token i
    block           masks and both matrices of the bias stand in the w channels

Shapes: W hidden, w hidden of the small head, V vocabulary, Vd rows of the output layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.models.widened_weights import LlamaShape, WidenedLlama

DRAFT_VOCAB = 32_000
"""Rows of the output layer of published heads."""

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
_LAYER = "model.layers.0."
# A multiple of rows that matrix units like.
_ROWS = 128
# Of a block drafter, with the side of each that has the w channels.
_BLOCK_TENSORS = {"mask_embedding.weight": 1, "previous.weight": 1, "following.weight": 0}
_ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class WidenedEagle:
    """The tensors of the large head, made one at a time.

    Args:
        weights: its tensors by name, in the layout of EAGLE-3.
        embedding: [v, w] of the small target, which is its output layer too.
        shape: of the large target; the head gets its hidden size, heads and feed-forward units.
        fill_seed: seed of the random weights; None leaves zeros.
        max_position_embeddings: longest sequence that the checkpoint promises; default the small head's.
        draft_vocab: Vd, at most V; the next multiple of 128 where the small vocabulary is not smaller.

    Raises:
        ValueError: the head has another layout, or does not fit into the shape.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        target: Mapping[str, Any],
        embedding: torch.Tensor,
        shape: LlamaShape,
        dtype: torch.dtype,
        fill_seed: int | None,
        max_position_embeddings: int | None = None,
        draft_vocab: int = DRAFT_VOCAB,
    ) -> None:
        if "midlayer.hidden_norm.weight" not in weights or "d2t" in weights:
            raise ValueError("weights: those of an EAGLE-3 head with the target's whole vocabulary needed")
        self.dtype, self._config, self._weights, self._target_shape = dtype, config, weights, shape
        if draft_vocab <= config["vocab_size"]:
            draft_vocab = (config["vocab_size"] // _ROWS + 1) * _ROWS
        self.shape = replace(shape, layers=1, vocab=min(draft_vocab, shape.vocab))
        one_layer = {**config, "tie_word_embeddings": True, "num_hidden_layers": 1}
        layer = {name.replace("midlayer.", _LAYER): tensor for name, tensor in weights.items()}
        layer |= {
            "model.norm.weight": weights["norm.weight"],
            "model.embed_tokens.weight": weights.get("lm_head.weight", embedding),
        }
        # What reads the embedding, and what reads the stream.
        norms = weights["midlayer.input_layernorm.weight"], weights["midlayer.hidden_norm.weight"]
        width = config["hidden_size"]
        self._halves = [
            WidenedLlama(
                one_layer,
                {
                    **layer,
                    f"{_LAYER}input_layernorm.weight": norm,
                    **{f"{_LAYER}{part}.weight": layer[f"{_LAYER}{part}.weight"][:, begin : begin + width]
                       for part in _ATTENTION_INPUTS},
                },
                self.shape,
                dtype=dtype,
                fill_seed=fill_seed,
                max_position_embeddings=max_position_embeddings,
            )
            for begin, norm in zip((0, width), norms, strict=True)
        ]  # fmt: skip
        self.max_positions = self._halves[0].max_positions
        self.taps = _wide_taps(config["eagle_config"][TAPS_KEY], target["num_hidden_layers"], shape.layers)

    def config(self) -> dict[str, Any]:
        """The config.json of the large head."""
        return {
            **self._halves[0].config(),
            "tie_word_embeddings": False,
            "vocab_size": self._target_shape.vocab,
            "draft_vocab_size": self.shape.vocab,
            "eagle_config": {**self._config["eagle_config"], TAPS_KEY: list(self.taps)},
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint."""
        width = self.shape.hidden
        of_layer = self._halves[0].tensor_shapes()
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(self.taps) * width)}
        shapes |= {f"midlayer.{name}.weight": (width,) for name in ("hidden_norm", "input_layernorm")}
        for part in _ATTENTION_INPUTS:
            shapes[f"midlayer.{part}.weight"] = (of_layer[f"{_LAYER}{part}.weight"][0], 2 * width)
        for name, size in of_layer.items():
            if name.startswith(_LAYER):
                shapes.setdefault(name.replace(_LAYER, "midlayer."), size)
        vocab = self._target_shape.vocab
        return {
            **shapes,
            "norm.weight": (width,),
            "lm_head.weight": (self.shape.vocab, width),
            "d2t": (self.shape.vocab,),
            "t2d": (vocab,),
            **{name: self._block_shape(name) for name in _BLOCK_TENSORS if name in self._weights},
        }

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint, contiguous; of `dtype` but for the maps between the vocabularies."""
        embedding_half, stream_half = self._halves
        made = {
            "d2t": lambda: torch.zeros(self.shape.vocab, dtype=torch.int64),
            "t2d": lambda: torch.arange(self._target_shape.vocab) < self.shape.vocab,
            "fc.weight": self._fc,
            "norm.weight": lambda: embedding_half.tensor("model.norm.weight"),
            "lm_head.weight": lambda: embedding_half.tensor("model.embed_tokens.weight"),
            "midlayer.hidden_norm.weight": lambda: stream_half.tensor(f"{_LAYER}input_layernorm.weight"),
        }
        if name in made:
            return made[name]()
        if name in _BLOCK_TENSORS:
            small = self._weights[name]
            large = torch.zeros(self._block_shape(name), dtype=self.dtype)
            large[: small.shape[0], : small.shape[1]] = small
            return large
        inner = name.replace("midlayer.", _LAYER)
        if any(part in name for part in _ATTENTION_INPUTS):
            return torch.cat([half.tensor(inner) for half in self._halves], dim=1)
        return embedding_half.tensor(inner)

    def _block_shape(self, name: str) -> tuple[int, ...]:
        sizes = list(self._weights[name].shape)
        sizes[_BLOCK_TENSORS[name]] = self.shape.hidden
        return tuple(sizes)

    def _fc(self) -> torch.Tensor:
        own, width, wide = self._weights["fc.weight"], self._config["hidden_size"], self.shape.hidden
        large = self._halves[0].fill("fc.weight", (wide, len(self.taps) * wide))
        for place, block in enumerate(own.unflatten(1, (-1, width)).unbind(1)):
            begin = place * wide
            # Every other column reads zeros alone.
            large[:, begin : begin + width + 1] = 0
            large[:width, begin : begin + width] = block
        large[width, width] = 1
        return large


def _wide_taps(taps: list[int], small_layers: int, large_layers: int) -> tuple[int, ...]:
    """After so many layers of the large target its stream is what it is after `taps` layers of the small one."""
    steps = max(1, small_layers - 1)
    return tuple((tap - 1) * (large_layers - 1) // steps + 1 if tap else 0 for tap in taps)
