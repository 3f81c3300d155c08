"""Sizes, norms, biases, windows, rotary tables and caps of a decoder, read from its config.

Seven model types are one program with these differences:

    llama, mistral   the plain case; llama may have biases, mistral a window in every layer
    qwen2, qwen3     biases of query, key and value; norms of every query and key head instead; windows by layer
    gemma            norms multiply by 1 + weight, embeddings are scaled, tanh-approximated GELU
    gemma2           further norms of what a block adds, caps of scores and logits, windows by layer
    gemma3_text      further norms, norms of every head, one rotary table for windowed layers and one for the others

What a config leaves out is what transformers takes for it. Its classes are not imported, which takes seconds, but
compared with in tests.

Sources: transformers' configuration and modeling files of these types (read in 5.17 and 5.23).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from outrider.engine.rotary_spec import RotarySpec, read_rotary
from outrider.errors import CheckpointError

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# What a config may leave out, in all families that have it.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
    "rope_theta": 1e4,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Properties that a model type implies and its config does not state."""

    is_gemma: bool = False
    addend_norms: bool = False
    head_norms: bool = False
    windows: Literal["none", "all", "by_layer"] = "none"
    always_qkv_bias: bool = False
    caps_scores: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


SERVED_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "qwen2": _Family(windows="by_layer", always_qkv_bias=True),
    "qwen3": _Family(windows="by_layer", head_norms=True, defaults={"head_dim": 128}),
    "mistral": _Family(windows="all"),
    "gemma": _Family(is_gemma=True, defaults=_GEMMA_DEFAULTS),
    "gemma2": _Family(
        is_gemma=True,
        addend_norms=True,
        windows="by_layer",
        caps_scores=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": _Family(
        is_gemma=True,
        addend_norms=True,
        head_norms=True,
        windows="by_layer",
        defaults={
            **_GEMMA_DEFAULTS,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
}


@dataclass(frozen=True)
class LayerSpec:
    """One layer: tokens a row may look back on (0 for all), and the place of its table in `DecoderSpec.rotaries`."""

    window: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One model's architecture."""

    model_type: str  # as in config.json
    vocab_size: int  # V
    hidden_size: int  # N
    intermediate_size: int  # F
    heads: int  # query heads H
    kv_heads: int  # key and value heads Hkv
    head_dim: int  # D
    max_positions: int  # longest sequence the checkpoint was made for
    layers: tuple[LayerSpec, ...]  # in their order
    rotaries: tuple[RotarySpec, ...]  # the tables that layers refer to
    norm_eps: float  # of every norm
    norm_offset: float  # what is added to a stored norm weight before it multiplies
    addend_norms: bool  # whether what a block adds is normed before it is added
    head_norms: bool  # whether every query and key head is normed before its rotation
    # qkv_bias, output_bias, feed_forward_bias: which projections have biases.
    qkv_bias: bool
    output_bias: bool
    feed_forward_bias: bool
    activation: Activation  # of the gate
    embedding_factor: float  # of the embeddings, before rounding to the model's dtype
    attention_scale: float  # of the scores
    # attention_softcap, final_softcap: bounds of scores and logits; 0 for none.
    attention_softcap: float
    final_softcap: float
    tied_head: bool  # whether the output layer is the embedding

    @classmethod
    def of(cls, document: Mapping[str, Any], place: object = "config.json") -> "DecoderSpec":
        """Return the architecture that a config.json describes.

        Args:
            document: its content.
            place: of it, in errors.

        Raises:
            CheckpointError: it is not complete, or the decoder cannot run it, with what it can run.
        """
        model_type = document.get("model_type")
        family = SERVED_FAMILIES.get(model_type or "")
        if family is None:
            _refuse(place, f"model type {model_type!r}", f"model types {', '.join(SERVED_FAMILIES)}")
        config = {**_DEFAULTS, **family.defaults, **document}
        for name in _SIZES:
            if not isinstance(size := config.get(name), int) or size < 1:
                raise CheckpointError(f"{place}: {name} is {size!r}, a number from 1 on needed")
        try:
            return cls._of(config, family, place)
        except KeyError as error:
            raise CheckpointError(f"{place}: {error.args[0]} is missing") from error
        except (TypeError, ArithmeticError, LookupError) as error:
            raise CheckpointError(f"{place}: a value is of another kind than this model type's: {error}") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any], family: _Family, place: object) -> "DecoderSpec":
        model_type, heads = config["model_type"], config["num_attention_heads"]
        kv_heads = config["num_key_value_heads"] or heads
        head_dim = config["head_dim"] or config["hidden_size"] // heads
        if heads % kv_heads or head_dim % 2:
            _refuse(place, f"{heads} heads of {head_dim} over {kv_heads}",
                    "heads of an even size, a multiple of the key and value heads")  # fmt: skip
        windowed = _windowed_layers(config, family)
        rotaries, rotary_of = _rotaries(config, windowed, head_dim, place)
        attention_bias = config["attention_bias"] and model_type != "mistral"
        query_scalar = config["query_pre_attn_scalar"] if family.addend_norms else head_dim
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=config["max_position_embeddings"],
            layers=tuple(
                LayerSpec((config["sliding_window"] or 0) if is_windowed else 0, rotary)
                for is_windowed, rotary in zip(windowed, rotary_of, strict=True)
            ),
            rotaries=rotaries,
            norm_eps=config["rms_norm_eps"],
            norm_offset=1.0 if family.is_gemma else 0.0,
            addend_norms=family.addend_norms,
            head_norms=family.head_norms,
            qkv_bias=attention_bias or family.always_qkv_bias,
            output_bias=attention_bias and not family.always_qkv_bias,
            feed_forward_bias=model_type == "llama" and config["mlp_bias"],
            activation=_activation(config, family, place),
            embedding_factor=config["hidden_size"] ** 0.5 if family.is_gemma else 1.0,
            attention_scale=query_scalar**-0.5,
            # Gemma 3's config keeps Gemma 2's field, and its attention does not read it.
            attention_softcap=(config["attn_logit_softcapping"] or 0.0) if family.caps_scores else 0.0,
            final_softcap=(config["final_logit_softcapping"] or 0.0) if family.addend_norms else 0.0,
            tied_head=config["tie_word_embeddings"],
        )


def _windowed_layers(config: Mapping[str, Any], family: _Family) -> list[bool]:
    """Return for each layer whether it has the sliding window."""
    layers = range(config["num_hidden_layers"])
    if family.windows != "by_layer":
        return [family.windows == "all" for _ in layers]
    if not family.is_gemma and not config["use_sliding_window"]:
        return [False for _ in layers]
    if (kinds := config["layer_types"]) is not None:
        return [kinds[layer] == "sliding_attention" for layer in layers]
    if family.is_gemma:
        every = config["sliding_window_pattern"] if config["model_type"] == "gemma3_text" else 2
        return [(layer + 1) % every != 0 for layer in layers]
    return [layer >= config["max_window_layers"] for layer in layers]


def _rotaries(
    config: Mapping[str, Any], windowed: list[bool], head_dim: int, place: object
) -> tuple[tuple[RotarySpec, ...], list[int]]:
    """The kinds of rotary embedding, and which of them each layer takes."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if config["model_type"] != "gemma3_text":
        return (_rotary(config, given, config["rope_theta"], head_dim, place),), [0 for _ in windowed]
    by_kind = config.get("rope_parameters") or {}
    # As transformers has it, the old key `type` is not read here, and `truncate` beside the kinds.
    scaling = {"rope_type": "default", **(by_kind.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    scaling["truncate"] = by_kind.get("truncate", True)
    near = by_kind.get("sliding_attention") or {}
    rotaries = (
        _rotary(config, scaling, config["rope_theta"], head_dim, place),
        _rotary(config, near, config["rope_local_base_freq"], head_dim, place),
    )
    return rotaries, [int(is_windowed) for is_windowed in windowed]


def _rotary(
    config: Mapping[str, Any], given: Mapping[str, Any], theta: float, head_dim: int, place: object
) -> RotarySpec:
    parameters = {"rope_theta": theta, "rope_type": given.get("type", "default"), **given}
    if (rotated := config.get("partial_rotary_factor")) is not None:
        parameters.setdefault("partial_rotary_factor", rotated)
    # Some configs have it beside what scales the embedding, where it counts.
    longest = config.get("original_max_position_embeddings")
    if longest is not None or "original_max_position_embeddings" not in parameters:
        parameters["original_max_position_embeddings"] = longest or config["max_position_embeddings"]
    try:
        return read_rotary(parameters, head_dim)
    except ValueError as error:
        raise CheckpointError(f"{place}: {error}") from error


def _activation(config: Mapping[str, Any], family: _Family, place: object) -> Activation:
    given = config.get("hidden_activation") or config["hidden_act"]
    if family.is_gemma and given == "gelu":
        return "gelu_tanh"  # what the first Gemma checkpoints say and do not mean
    if given not in _ACTIVATIONS:
        _refuse(place, f"activation {given!r}", f"{', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[given]


def _refuse(place: object, found: str, served: str) -> NoReturn:
    raise CheckpointError(f"{place}: {found} cannot be served; these can: {served}")
