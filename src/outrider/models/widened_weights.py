"""The weights of a small Llama inside a larger one that computes the same logits.

    hidden state    [w channels of the small model | 1 constant channel | zeros up to W]
    norm            weight' = weight * sqrt(w / W), eps' = eps * w / W: the mean square is taken over W channels
    attention       heads where the grouping of the large model finds their key/value head, which is there several times
                    if it serves more queries than a group holds; output projections of other heads are zero
    MLP             units of the small model first; `up` of the others reads only channels that are zero
    extra layers    have such other heads and units alone: they add exactly zero
    output rows     past the small vocabulary: read the constant channel alone, logit -49152 / rms(hidden state)

Shapes: W hidden, w hidden of the small model, I intermediate, V vocabulary, D head_dim (never changed: it sets the
rotary frequencies). Matrices are [out, in], as transformers keep them.

A weight that cannot change the function, because what it reads or what reads it is exactly zero, is random by default:
zero operands draw less power, so a GPU that multiplies them keeps a higher clock than on a real model.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# The embedding writes 2^-14 into the constant channel and padding rows read it with -2^14: in the range of float16, as
# the norm's weight between is. Real rows, tied to the embedding, all gain the same: 3 * 2^-14 / rms. The rms was seen
# between 5 and 42 in the embedded pair, and between 18 and 256 in SmolLM2, where it is largest at the first token.
_CONSTANT, _PADDING_READS = 2.0**-14, -(2.0**14)
_UNIT_RMS_PADDING_LOGIT = -49152.0
_CONSTANT_NORM = _UNIT_RMS_PADDING_LOGIT / (_PADDING_READS * _CONSTANT)
_FILL_STD = 0.02
# A prime, so that rows of no width repeat inside a matrix of less than this many.
_NOISE_LENGTH = 16_777_213

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama with tied embeddings, head_dim apart."""

    hidden: int  # W
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key/value heads; each serves heads / kv_heads neighbouring query heads
    intermediate: int  # I
    vocab: int = 128_256  # V

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "LlamaShape":
        """The shape that a config.json states."""
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class HeadPlaces:
    """Positions of the small model's heads in the large one."""

    query: tuple[int, ...]  # `query[h]` is the place of query head h
    kv: tuple[tuple[int, int], ...]  # pairs (place, key/value head that stands there)


def place_heads(small: LlamaShape, large: LlamaShape) -> HeadPlaces:
    """Put every query head into a group whose key/value head is its own; ValueError where too few take the copies."""
    query: list[int] = []
    kv: list[tuple[int, int]] = []
    for head in range(small.kv_heads):
        for first in range(0, small.group, large.group):
            query.extend(len(kv) * large.group + i for i in range(min(large.group, small.group - first)))
            kv.append((len(kv), head))
    if len(kv) > large.kv_heads:
        raise ValueError(f"kv_heads: {large.kv_heads} given, {len(kv)} needed for {small.heads} query heads")
    return HeadPlaces(tuple(query), tuple(kv))


class WidenedLlama:
    """The tensors of the large checkpoint, made one at a time.

    Args:
        fill_seed: seed of the random weights; None leaves zeros.
        max_position_embeddings: longest sequence that the checkpoint promises; default the small model's. Rotary
            embeddings are a function of the position, so any number works.

    Raises:
        ValueError: the architecture is another, or the small model does not fit into the shape, or a length below 1.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        shape: LlamaShape,
        *,
        dtype: torch.dtype,
        fill_seed: int | None,
        max_position_embeddings: int | None = None,
    ) -> None:
        self.small, self.shape, self.dtype = LlamaShape.of(config), shape, dtype
        self.head_dim: int = config["head_dim"]
        self._config, self._weights, self._fill_seed = config, weights, fill_seed
        self.max_positions: int = (
            config["max_position_embeddings"] if max_position_embeddings is None else max_position_embeddings
        )
        self._check()
        self._heads = place_heads(self.small, shape)
        self._norm_scale = math.sqrt(self.small.hidden / shape.hidden)
        # From the first layer to the last: a fault anywhere in the large model shows.
        steps = max(1, self.small.layers - 1)
        self._layers = {layer * (shape.layers - 1) // steps: layer for layer in range(self.small.layers)}
        self._noise = self._make_noise()

    def config(self) -> dict[str, Any]:
        """The config.json of the large model."""
        return {
            **self._config,
            "hidden_size": self.shape.hidden,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "intermediate_size": self.shape.intermediate,
            "vocab_size": self.shape.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self._config["rms_norm_eps"] * self.small.hidden / self.shape.hidden,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, in the order in which a forward reads them."""
        shape = self.shape
        width, query, kv = shape.hidden, shape.heads * self.head_dim, shape.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (width,),
            "self_attn.q_proj": (query, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, query),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (shape.intermediate, width),
            "mlp.up_proj": (shape.intermediate, width),
            "mlp.down_proj": (width, shape.intermediate),
        }
        layers = {f"model.layers.{i}.{part}.weight": size for i in range(shape.layers) for part, size in layer.items()}
        return {"model.embed_tokens.weight": (shape.vocab, width), **layers, "model.norm.weight": (width,)}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint, contiguous, of `dtype`."""
        size = self.tensor_shapes()[name]
        if name == "model.embed_tokens.weight":
            return self._embedding(size)
        if name == "model.norm.weight":
            return self._norm(self._weights[name], constant=_CONSTANT_NORM * self._norm_scale)
        match = _LAYER_NAME.fullmatch(name)
        assert match is not None
        layer = self._layers.get(int(match[1]))
        own = None if layer is None else self._weights[f"model.layers.{layer}.{match[2]}.weight"]
        if match[2].endswith("layernorm"):
            return self._norm(own, constant=0.0)
        return self._matrix(match[2].partition(".")[2], name, size, own)

    def _matrix(self, kind: str, name: str, size: tuple[int, ...], own: torch.Tensor | None) -> torch.Tensor:
        """A projection; `own` is the small model's, None in an extra layer."""
        width, units, dim = self.small.hidden, self.small.intermediate if own is not None else 0, self.head_dim
        # Values of heads that do not count reach the cache, as in a real model; so their way out has to be zero.
        large = torch.zeros(size, dtype=self.dtype) if kind == "o_proj" else self.fill(name, size)
        if kind == "up_proj":
            large[:, :width] = 0
        if kind == "down_proj":
            large[:, :units] = 0
        if own is None:
            return large
        if kind == "o_proj":
            large.unflatten(1, (-1, dim))[:width, list(self._heads.query)] = own.unflatten(1, (-1, dim)).to(self.dtype)
        elif kind == "q_proj":
            large.unflatten(0, (-1, dim))[list(self._heads.query), :, :width] = own.unflatten(0, (-1, dim)).to(
                self.dtype
            )
        elif kind in ("k_proj", "v_proj"):
            for place, head in self._heads.kv:
                large[place * dim : (place + 1) * dim, :width] = own[head * dim : (head + 1) * dim]
        elif kind == "down_proj":
            large[:width, :units] = own
        else:
            large[:units, :width] = own
        return large

    def _norm(self, own: torch.Tensor | None, *, constant: float) -> torch.Tensor:
        width = self.small.hidden
        large = torch.ones(self.shape.hidden)
        large[width] = constant
        if own is not None:
            large[:width] = own.float() * self._norm_scale
        return large.to(self.dtype)

    def _embedding(self, size: tuple[int, ...]) -> torch.Tensor:
        """Embedding and output layer in one: real rows write the constant channel, padding rows read it."""
        width, tokens = self.small.hidden, self.small.vocab
        large = self.fill("model.embed_tokens.weight", size)
        large[:tokens, width:] = 0
        large[:tokens, :width] = self._weights["model.embed_tokens.weight"]
        large[:tokens, width] = _CONSTANT
        large[tokens:, :width] = 0
        large[tokens:, width] = _PADDING_READS
        return large

    def fill(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        """Noise that a tensor's name and the seed decide, or zeros; of `dtype`."""
        if self._noise is None:
            return torch.zeros(size, dtype=self.dtype)
        large = torch.empty(size, dtype=self.dtype)
        flat, length = large.view(-1), len(self._noise)
        digest = hashlib.sha256(f"{self._fill_seed} {name}".encode()).digest()
        start = -(int.from_bytes(digest[:8], "little") % length)
        while start < len(flat):
            stop = min(start + length, len(flat))
            flat[max(start, 0) : stop] = self._noise[max(-start, 0) : stop - start]
            start += length
        return large

    def _make_noise(self) -> torch.Tensor | None:
        """One stretch of noise that tensors copy from different places: drawing 70 billion numbers takes long."""
        if self._fill_seed is None:
            return None
        longest = max(math.prod(size) for size in self.tensor_shapes().values())
        generator = torch.Generator().manual_seed(self._fill_seed)
        noise = torch.randn(min(_NOISE_LENGTH, longest), generator=generator)
        return (noise * _FILL_STD).to(self.dtype)

    def _check(self) -> None:
        config, small, large = self._config, self.small, self.shape
        if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
            raise ValueError(f"model_type, tie_word_embeddings: {config['model_type']!r}, "
                             f"{config['tie_word_embeddings']} given, 'llama' and True needed")  # fmt: skip
        if config["attention_bias"] or config["mlp_bias"]:
            raise ValueError("attention_bias, mlp_bias: True given, False needed")
        if self.max_positions < 1:
            raise ValueError(f"max_position_embeddings: {self.max_positions} given, at least 1 needed")
        if large.heads % large.kv_heads:
            raise ValueError(f"heads: {large.heads} given, a multiple of {large.kv_heads} kv_heads needed")
        if large.hidden % large.heads:  # head_dim does not depend on it, but transformers refuses
            raise ValueError(f"hidden: {large.hidden} given, a multiple of {large.heads} heads needed")
        # One channel is the constant one, and padding rows stand for what the shape is there for.
        for name, least in (
            ("hidden", small.hidden + 1),
            ("layers", small.layers),
            ("intermediate", small.intermediate),
            ("vocab", small.vocab + 1),
        ):
            if getattr(large, name) < least:
                raise ValueError(f"{name}: {getattr(large, name)} given, at least {least} needed")
