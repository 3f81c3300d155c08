"""What the decoder must know of a model: sizes, norms, biases, windows, rotary tables and caps, read from its config.

Seven model types are one program with these differences:

    llama, mistral   the plain case; llama may have biases, mistral a window in every layer
    qwen2, qwen3     biases of query, key and value; norms of every query and key head instead; windows by layer
    gemma            norms multiply by 1 + weight, embeddings are scaled, tanh-approximated GELU
    gemma2           further norms of what a block adds, caps of scores and logits, windows by layer
    gemma3_text      further norms, norms of every head, one rotary table for windowed layers and one for the others

Sources: transformers' modeling files of these types (read in 5.17 and 5.23). What scales frequencies is transformers'
own code; the rotary classes around it are not imported, which takes seconds, but compared with in tests.
"""

from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import CheckpointError

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# Their frequencies depend on the longest sequence of the batch: no table can hold them.
_LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")
_SERVED_ROTARY = "default, linear, llama3 and yarn"


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a model type fixes and its config does not say."""

    is_gemma: bool = False
    addend_norms: bool = False
    head_norms: bool = False
    windows: Literal["none", "all", "by_layer"] = "none"
    always_qkv_bias: bool = False
    caps_scores: bool = False


SERVED_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "qwen2": _Family(windows="by_layer", always_qkv_bias=True),
    "qwen3": _Family(windows="by_layer", head_norms=True),
    "mistral": _Family(windows="all"),
    "gemma": _Family(is_gemma=True),
    "gemma2": _Family(
        is_gemma=True,
        addend_norms=True,
        windows="by_layer",
        caps_scores=True,
    ),
    "gemma3_text": _Family(
        is_gemma=True,
        addend_norms=True,
        head_norms=True,
        windows="by_layer",
    ),
}


@dataclass(frozen=True)
class RotarySpec:
    """One kind of rotary embedding.

    Attributes:
        frequencies: D / 2 of them, float32 values.
        scaling: factor of cosine and sine.
    """

    frequencies: tuple[float, ...]
    scaling: float

    def table(self, positions: int) -> torch.Tensor:
        """Cosines and sines of the positions from 0 on, [positions, 2, D / 2] float32 on the CPU."""
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * torch.tensor(self.frequencies)
        table = torch.empty((positions, 2, len(self.frequencies)))
        torch.cos(angles, out=table[:, 0])
        torch.sin(angles, out=table[:, 1])
        return table if self.scaling == 1 else table.mul_(self.scaling)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: tokens a row may look back on (0 for all), and the place of its table in `DecoderSpec.rotaries`."""

    window: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One model's architecture.

    Attributes:
        model_type: as in config.json.
        vocab_size: V.
        hidden_size: N.
        intermediate_size: F.
        heads: query heads H.
        kv_heads: key and value heads Hkv.
        head_dim: D.
        max_positions: longest sequence the checkpoint was made for.
        layers: in their order.
        rotaries: the tables that layers refer to.
        norm_eps: of every norm.
        norm_offset: what is added to a stored norm weight before it multiplies.
        addend_norms: whether what a block adds is normed before it is added.
        head_norms: whether every query and key head is normed before its rotation.
        qkv_bias, output_bias, feed_forward_bias: which projections have biases.
        activation: of the gate.
        embedding_factor: of the embeddings, before rounding to the model's dtype.
        attention_scale: of the scores.
        attention_softcap, final_softcap: bounds of scores and logits; 0 for none.
        tied_head: whether the output layer is the embedding.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[RotarySpec, ...]
    norm_eps: float
    norm_offset: float
    addend_norms: bool
    head_norms: bool
    qkv_bias: bool
    output_bias: bool
    feed_forward_bias: bool
    activation: Activation
    embedding_factor: float
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    tied_head: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> "DecoderSpec":
        """The architecture that a config describes.

        Raises:
            CheckpointError: the decoder cannot run it, with what it can run.
        """
        family = SERVED_FAMILIES.get(config.model_type)
        if family is None:
            _refuse(config, f"model type {config.model_type!r}", f"model types {', '.join(SERVED_FAMILIES)}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if config.num_attention_heads % config.num_key_value_heads or head_dim % 2:
            _refuse(config, f"{config.num_attention_heads} heads of {head_dim} over {config.num_key_value_heads}",
                    "heads of an even size, a multiple of the key and value heads")  # fmt: skip
        rotaries, rotary_of = _rotaries(config, head_dim)
        attention_bias = bool(getattr(config, "attention_bias", False)) and config.model_type != "mistral"
        query_scalar = config.query_pre_attn_scalar if family.addend_norms else head_dim
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            max_positions=config.max_position_embeddings,
            layers=tuple(
                LayerSpec(_window(config, family, index), rotary_of[index]) for index in range(config.num_hidden_layers)
            ),
            rotaries=rotaries,
            norm_eps=config.rms_norm_eps,
            norm_offset=1.0 if family.is_gemma else 0.0,
            addend_norms=family.addend_norms,
            head_norms=family.head_norms,
            qkv_bias=attention_bias or family.always_qkv_bias,
            output_bias=attention_bias and not family.always_qkv_bias,
            feed_forward_bias=config.model_type == "llama" and config.mlp_bias,
            activation=_activation(config, family),
            embedding_factor=config.hidden_size**0.5 if family.is_gemma else 1.0,
            attention_scale=query_scalar**-0.5,
            # Gemma 3's config keeps Gemma 2's field, and its attention does not read it.
            attention_softcap=(config.attn_logit_softcapping or 0.0) if family.caps_scores else 0.0,
            final_softcap=(config.final_logit_softcapping or 0.0) if family.addend_norms else 0.0,
            tied_head=bool(config.tie_word_embeddings),
        )


def _rotaries(config: PretrainedConfig, head_dim: int) -> tuple[tuple[RotarySpec, ...], tuple[int, ...]]:
    """The kinds of rotary embedding, and which of them each layer takes."""
    layers: int = config.num_hidden_layers
    by_layer_type = config.model_type == "gemma3_text"
    kinds: list[str | None] = sorted(set(config.layer_types[:layers])) if by_layer_type else [None]
    specs = tuple(_rotary(config, kind, head_dim) for kind in kinds)
    rotary_of = [kinds.index(config.layer_types[index]) for index in range(layers)] if by_layer_type else [0] * layers
    return specs, tuple(rotary_of)


def _rotary(config: PretrainedConfig, kind: str | None, head_dim: int) -> RotarySpec:
    """That of the layers of type `kind`, or of all layers."""
    parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
    rope_type = parameters["rope_type"]
    if rope_type in _LENGTH_DEPENDENT_ROTARY:
        _refuse(config, f"rope type {rope_type!r}, which depends on the length of the text", _SERVED_ROTARY)
    if rope_type == "default":
        even = torch.arange(0, head_dim, 2, dtype=torch.float32)
        frequencies, scaling = 1.0 / (parameters["rope_theta"] ** (even / head_dim)), 1.0
    elif rope_type in ROPE_INIT_FUNCTIONS:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, layer_type=kind)
    else:
        _refuse(config, f"rope type {rope_type!r}", _SERVED_ROTARY)
    if len(frequencies) != head_dim // 2:
        _refuse(config, f"a rotary embedding of {2 * len(frequencies)} of {head_dim} channels", "that of all")
    return RotarySpec(tuple(frequencies.float().tolist()), float(scaling))


def _window(config: PretrainedConfig, family: _Family, index: int) -> int:
    windowed = family.windows == "all" or (
        family.windows == "by_layer" and config.layer_types[index] == "sliding_attention"
    )
    return (config.sliding_window or 0) if windowed else 0


def _activation(config: PretrainedConfig, family: _Family) -> Activation:
    given = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if family.is_gemma and given == "gelu":
        return "gelu_tanh"  # what the first Gemma checkpoints say and do not mean
    if given not in _ACTIVATIONS:
        _refuse(config, f"activation {given!r}", f"{', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[given]


def _refuse(config: PretrainedConfig, found: str, served: str) -> NoReturn:
    place = getattr(config, "name_or_path", "") or config.model_type
    raise CheckpointError(f"{place}: {found} cannot be served; these can: {served}")
