"""Reading of a config: properties of some families alone, rotary tables, and configs that are refused."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from outrider.engine.checkpoint import SERVED_MODEL_TYPES
from outrider.engine.decoder_spec import DecoderSpec
from outrider.errors import CheckpointError

LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
# What checkpoints come with, and what their makers say to set for longer texts.
ROTARIES: dict[str, dict[str, Any]] = {
    "short": {"rope_type": "default", "rope_theta": 1e4},
    "long": {"rope_type": "default", "rope_theta": 1000000},
    "linear": LINEAR,
    "llama 3.1": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama 3.2": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": {**YARN, "rope_theta": 1000000, "original_max_position_embeddings": 32768},
    "yarn, its scaling given": {**YARN, "attention_factor": 0.9, "beta_fast": 24.0, "beta_slow": 2.0},
    "yarn of two scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
    "in part of the channels": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
CLASSES: dict[type[PretrainedConfig], Any] = {
    LlamaConfig: LlamaRotaryEmbedding,
    Qwen2Config: Qwen2RotaryEmbedding,
    Qwen3Config: Qwen3RotaryEmbedding,
    MistralConfig: MistralRotaryEmbedding,
    GemmaConfig: GemmaRotaryEmbedding,
    Gemma2Config: Gemma2RotaryEmbedding,
}


CONFIGS: tuple[type[PretrainedConfig], ...] = (*CLASSES, Gemma3TextConfig)


def spec_of(config: PretrainedConfig) -> DecoderSpec:
    return DecoderSpec.of(config.to_dict())


def windows(config: PretrainedConfig) -> list[int]:
    return [layer.window for layer in spec_of(config).layers]


def test_windows_by_layer() -> None:
    assert windows(LlamaConfig(**LAYERS)) == [0] * 4
    assert windows(MistralConfig(**LAYERS, sliding_window=6)) == [6] * 4
    assert windows(MistralConfig(**LAYERS, sliding_window=None)) == [0] * 4
    qwen: dict[str, Any] = {**LAYERS, "sliding_window": 6, "max_window_layers": 3}
    assert windows(Qwen3Config(**qwen, use_sliding_window=True)) == [0, 0, 0, 6]
    assert windows(Qwen3Config(**qwen)) == [0] * 4
    assert windows(Gemma2Config(**LAYERS, sliding_window=6)) == [6, 0, 6, 0]


def test_biases_by_family() -> None:
    def biases(config: PretrainedConfig) -> tuple[bool, bool, bool]:
        spec = spec_of(config)
        return spec.qkv_bias, spec.output_bias, spec.feed_forward_bias

    assert biases(LlamaConfig(**LAYERS)) == (False, False, False)
    assert biases(LlamaConfig(**LAYERS, attention_bias=True)) == (True, True, False)
    assert biases(LlamaConfig(**LAYERS, mlp_bias=True)) == (False, False, True)
    assert biases(Qwen2Config(**LAYERS)) == (True, False, False)
    assert biases(Qwen3Config(**LAYERS, attention_bias=True)) == (True, True, False)


def test_gemma_has_factors_caps_and_further_norms() -> None:
    gemma = spec_of(GemmaConfig(**LAYERS))
    assert (gemma.embedding_factor, gemma.norm_offset, gemma.activation) == (8.0, 1.0, "gelu_tanh")
    assert (gemma.addend_norms, gemma.head_norms, gemma.attention_scale) == (False, False, 0.25)
    gemma2 = spec_of(Gemma2Config(**LAYERS, query_pre_attn_scalar=64))
    assert (gemma2.attention_softcap, gemma2.final_softcap, gemma2.attention_scale) == (50.0, 30.0, 0.125)
    assert (gemma2.addend_norms, gemma2.head_norms) == (True, False)
    gemma3 = spec_of(Gemma3TextConfig(**LAYERS, attn_logit_softcapping=50.0))
    assert (gemma3.attention_softcap, gemma3.final_softcap) == (0.0, 0.0)
    assert (gemma3.addend_norms, gemma3.head_norms) == (True, True)
    llama = spec_of(LlamaConfig(**LAYERS))
    assert (llama.embedding_factor, llama.norm_offset, llama.activation) == (1.0, 0.0, "silu")


def test_heads_may_be_wider_or_narrower_than_the_hidden_size() -> None:
    assert spec_of(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)).head_dim == 16
    assert spec_of(Qwen3Config(**{**LAYERS, "head_dim": 128})).head_dim == 128


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.model_type)
def test_frequencies_are_those_of_transformers_classes(family: Any, name: str, head_dim: int) -> None:
    sizes: dict[str, Any] = {**LAYERS, "head_dim": head_dim, "max_position_embeddings": 131072}
    config = family(**sizes, rope_parameters=dict(ROTARIES[name]))
    (rotary,) = spec_of(config).rotaries
    expected = CLASSES[family](config)
    assert rotary.frequencies == tuple(expected.inv_freq.tolist())
    assert rotary.scaling == expected.attention_scaling


@pytest.mark.parametrize("name", ROTARIES)
def test_frequencies_of_gemma3_are_those_of_transformers_class(name: str) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **{**LAYERS, "head_dim": 256},
        max_position_embeddings=131072,
        layer_types=kinds,
        rope_parameters={"full_attention": dict(ROTARIES[name]), "sliding_attention": dict(ROTARIES["short"])},
    )
    spec, expected = spec_of(config), Gemma3RotaryEmbedding(config)
    for layer, kind in zip(spec.layers, kinds, strict=True):
        rotary = spec.rotaries[layer.rotary]
        assert rotary.frequencies == tuple(getattr(expected, f"{kind}_inv_freq").tolist())
        assert rotary.scaling == getattr(expected, f"{kind}_attention_scaling")


@pytest.mark.parametrize("family", [*CLASSES, Gemma3TextConfig], ids=lambda family: family.model_type)
def test_frequencies_of_a_family_by_default_are_those_of_transformers_class(family: type[PretrainedConfig]) -> None:
    config = family()
    found = sorted(rotary.frequencies for rotary in spec_of(config).rotaries)
    buffers = dict({**CLASSES, Gemma3TextConfig: Gemma3RotaryEmbedding}[family](config).named_buffers())
    assert found == sorted(tuple(value.tolist()) for name, value in buffers.items() if "original" not in name)


@pytest.mark.parametrize("rope_parameters", [None, LINEAR, YARN, LLAMA3])
def test_rotary_tables_are_transformers(rope_parameters: dict[str, Any] | None) -> None:
    config = LlamaConfig(**LAYERS, rope_parameters=rope_parameters)
    (rotary,) = spec_of(config).rotaries
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(700)[None])
    table = rotary.table(700)
    assert table.shape == (700, 2, 8)
    for half in (slice(0, 8), slice(8, 16)):
        torch.testing.assert_close(table[:, 0], cos[0, :, half], rtol=0, atol=1e-6)
        torch.testing.assert_close(table[:, 1], sin[0, :, half], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "model type 'gpt2' cannot be served; these can: model types llama, qwen2"),
        (LlamaConfig(**LAYERS, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
        (LlamaConfig(**LAYERS, rope_parameters={"rope_type": "mrope", "rope_theta": 1e4}), "rope type 'mrope'"),
        (LlamaConfig(**LAYERS, hidden_act="relu"), "activation 'relu' cannot be served; these can: silu"),
        (LlamaConfig(**{**LAYERS, "num_key_value_heads": 3}), "4 heads of 16 over 3"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(config)


def test_longrope_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    config = LlamaConfig(**LAYERS, rope_parameters={**rope, "original_max_position_embeddings": 512})
    with pytest.raises(CheckpointError, match="'longrope', which depends on the length"):
        spec_of(config)


def test_every_served_model_type_has_a_spec() -> None:
    assert {spec_of(config(**LAYERS)).model_type for config in CONFIGS} == set(SERVED_MODEL_TYPES)


SIZES: dict[str, Any] = {
    **LAYERS,
    "num_hidden_layers": 14,
    "vocab_size": 97,
    "intermediate_size": 48,
    "max_position_embeddings": 8192,
}
# What config.json of older and newer checkpoints says, or leaves out.
WRITTEN: dict[str, dict[str, Any]] = {
    "sizes alone": {},
    "no size of heads": {"head_dim": None},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama 3": {
        "rope_theta": 5e5,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    },
    "yarn": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "no scaling": {"rope_scaling": None},
    "window": {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 5},
    "window not used": {"sliding_window": 512, "use_sliding_window": False},
    "no window": {"sliding_window": None},
    "pattern": {"sliding_window_pattern": 3},
    "theta of windows": {"rope_local_base_freq": 2e4},
    "tied": {"tie_word_embeddings": True},
    "not tied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "scale": {"query_pre_attn_scalar": 144},
    "first gemma": {"hidden_act": "gelu", "hidden_activation": None},
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("family", CONFIGS, ids=lambda family: family.model_type)
def test_a_document_is_read_as_transformers_reads_it(family: type[PretrainedConfig], written: str) -> None:
    document = {**SIZES, **WRITTEN[written], "model_type": family.model_type}
    if written == "first gemma" and family is not GemmaConfig:
        pytest.skip("its activation was never another one's")
    if written == "no size of heads":
        del document["head_dim"]
    assert DecoderSpec.of(document) == spec_of(family.from_dict(copy.deepcopy(document)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "folder: hidden_size is None, a number from 1 on needed"),
        ({"vocab_size": "many"}, "folder: vocab_size is 'many', a number"),
        ({"rope_scaling": {"rope_type": "linear"}}, "folder: factor is missing"),
        ({"rope_theta": "x"}, "folder: a value is of another kind"),
    ],
)  # fmt: skip
def test_documents_that_are_not_complete(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DecoderSpec.of({**SIZES, "model_type": "llama", **changes}, "folder")
