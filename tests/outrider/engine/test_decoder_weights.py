"""Weights fused and sharded as the decoder reads them, and what is said where they cannot be loaded."""

import weakref
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.function_source import FunctionSource
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig

from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import (
    TREE_POSITIONS,
    DecoderWeights,
    LayerWeights,
    load_decoder_weights,
    tensor_shapes,
    weight_bytes,
)
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError
from outrider.kernels.linear.packed_weight import PackedWeight, can_pack
from outrider.kernels.linear.skinny import Weight

SIZES: dict[str, Any] = {
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
LLAMA = DecoderSpec.of(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True).to_dict())
GEMMA = DecoderSpec.of(Gemma2Config(**{**SIZES, "tie_word_embeddings": True}).to_dict())


def random_tensors(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(spec).items()}


class Recorded(FunctionSource):
    """Notes which parts of which tensors were asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors.__getitem__)
        self.asked: dict[str, Any] = {}

    def tensor(self, name: str) -> torch.Tensor:
        self.asked[name] = "all"
        return super().tensor(name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        rows = super().rows(name, start, stop)
        self.asked[name] = ("rows", start, stop)
        return rows

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        columns = super().columns(name, start, stop)
        self.asked[name] = ("columns", start, stop)
        return columns


def load(
    spec: DecoderSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> DecoderWeights:
    return load_decoder_weights(FunctionSource(tensors.__getitem__), spec, "cpu", dtype, **options)


class HeldMatrices(FunctionSource):
    """Notes the most layers' matrices that live at a time: those it has handed out, and nobody has dropped."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(self._hand_out)
        self._tensors = tensors
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most = 0

    def _hand_out(self, name: str) -> torch.Tensor:
        made = self._tensors[name].clone()
        if name.endswith("down_proj.weight"):
            self._alive.add(made)
            self.most = max(self.most, len(self._alive))
        return made


def plain(weight: Weight) -> torch.Tensor:
    """A weight that is not of 8 bits."""
    assert isinstance(weight, torch.Tensor)
    return weight


def test_a_rank_reads_its_part_only() -> None:
    tensors = random_tensors(LLAMA)
    source = Recorded(tensors)
    weights = load_decoder_weights(source, LLAMA, "cpu", torch.float32, rank=1, world_size=2)
    layer = {name.removeprefix("model.layers.0."): part for name, part in source.asked.items() if ".layers.0." in name}
    rows = {"q": (4, 8), "k": (2, 4), "v": (2, 4)}
    assert layer == {
        **{
            f"self_attn.{name}_proj.{kind}": ("rows", *part)
            for name, part in rows.items()
            for kind in ("weight", "bias")
        },
        "self_attn.o_proj.weight": ("columns", 4, 8),
        **{f"mlp.{name}_proj.{kind}": ("rows", 6, 12) for name in ("gate", "up") for kind in ("weight", "bias")},
        "mlp.down_proj.weight": ("columns", 6, 12),
        **dict.fromkeys(("self_attn.o_proj.bias", "mlp.down_proj.bias"), "all"),
        **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), "all"),
    }
    assert source.asked["lm_head.weight"] == ("rows", 5, 9)
    assert torch.equal(plain(weights.layers[0].qkv)[4:6], tensors["model.layers.0.self_attn.k_proj.weight"][2:4])
    assert torch.equal(plain(weights.layers[0].down), tensors["model.layers.0.mlp.down_proj.weight"][:, 6:])
    # Five rows of the vocabulary's nine a rank: the second rank's last one is filled up.
    assert torch.equal(plain(weights.head), torch.cat([tensors["lm_head.weight"][5:], torch.zeros(1, 8)]))


def test_what_is_whole_already_is_not_copied() -> None:
    tensors = random_tensors(LLAMA)
    weights = load(LLAMA, tensors)
    for loaded, name in (
        (weights.embedding, "model.embed_tokens.weight"),
        (weights.head, "lm_head.weight"),
        (weights.layers[0].output, "model.layers.0.self_attn.o_proj.weight"),
        (weights.layers[0].down, "model.layers.0.mlp.down_proj.weight"),
    ):
        assert plain(loaded).data_ptr() == tensors[name].data_ptr()


def test_a_tied_output_layer_is_a_view_of_the_embedding() -> None:
    weights = load(GEMMA, random_tensors(GEMMA))
    assert plain(weights.head).data_ptr() == weights.embedding.data_ptr()
    first = load(GEMMA, random_tensors(GEMMA), world_size=2)
    assert plain(first.head).data_ptr() == first.embedding.data_ptr()
    assert first.head.shape == (5, 8)


@pytest.mark.parametrize("differs", [True, False])
def test_an_output_layer_beside_a_tied_embedding_counts_where_it_differs(tmp_path: Path, differs: bool) -> None:
    folder, config = tmp_path, LlamaConfig(**{**SIZES, "tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + float(differs)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    weights = load_decoder_weights(SafetensorsSource(folder), DecoderSpec.of(config.to_dict()), "cpu", torch.float32)
    assert torch.equal(plain(weights.head), AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
    assert (plain(weights.head).data_ptr() == weights.embedding.data_ptr()) == (not differs)


def test_gemmas_norms_are_the_factors_as_applied() -> None:
    tensors = random_tensors(GEMMA)
    weights = load(GEMMA, tensors, torch.bfloat16)
    layer = weights.layers[0]
    for norm, name in (
        (layer.attention_norm, "layers.0.input_layernorm"),
        (layer.attention_addend_norm, "layers.0.post_attention_layernorm"),
        (layer.feed_forward_norm, "layers.0.pre_feedforward_layernorm"),
        (layer.feed_forward_addend_norm, "layers.0.post_feedforward_layernorm"),
        (weights.final_norm, "norm"),
    ):
        assert norm is not None and norm.dtype == torch.float32
        assert torch.equal(norm, 1 + tensors[f"model.{name}.weight"].bfloat16().float())
    assert load(LLAMA, random_tensors(LLAMA), torch.bfloat16).final_norm.dtype == torch.bfloat16


def test_rotary_tables_reach_past_the_longest_sequence() -> None:
    tensors = random_tensors(LLAMA)
    assert load(LLAMA, tensors).rotary_tables[0].shape == (16 + TREE_POSITIONS, 2, 1)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bytes_announced_are_those_taken(world_size: int, quantized: bool) -> None:
    spec = DecoderSpec.of(LlamaConfig(**{**SIZES, "vocab_size": 10}).to_dict())
    weights = load(spec, random_tensors(spec), torch.bfloat16, world_size=world_size, quantized=quantized)
    taken = [weights.embedding, weights.final_norm, weights.head]
    taken += [getattr(layer, field.name) for layer in weights.layers for field in fields(LayerWeights)]
    announced = weight_bytes(spec, torch.bfloat16, world_size=world_size, quantized=quantized)
    assert announced == sum(t.nbytes for t in taken if t is not None)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    config: PretrainedConfig = LlamaConfig(**{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 8})
    spec = DecoderSpec.of(config.to_dict())
    with pytest.raises(CheckpointError, match=r"--tensor-parallel-size 8 given; .* this model takes 1, 2, 4$"):
        load(spec, random_tensors(spec), world_size=8)


def test_a_full_device_says_what_is_needed() -> None:
    tensors = random_tensors(LLAMA)

    def make(name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise torch.OutOfMemoryError("Tried to allocate")
        return tensors[name]

    with pytest.raises(
        CheckpointError, match=r"do not fit on cpu: they take 0\.00 GB in float32.*tensor-parallel-size"
    ):
        load_decoder_weights(FunctionSource(make), LLAMA, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("model.layers.1.self_attn.k_proj.weight", torch.zeros(5, 8)),
        ("model.layers.1.self_attn.k_proj.weight", torch.zeros(2, 8)),
        ("model.layers.0.mlp.down_proj.weight", torch.zeros(12, 8)),
        ("model.norm.weight", torch.zeros(8, dtype=torch.int64)),
    ],
)
def test_a_function_that_makes_other_tensors(name: str, given: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=f"the weights: {name}: "):
        load(LLAMA, {**random_tensors(LLAMA), name: given})


def test_a_checkpoint_is_checked_before_it_is_read(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 weights are missing, model\.layers\.1\.mlp\.up_proj\.bias first"):
        load_decoder_weights(SafetensorsSource(tmp_path), LLAMA, "cpu", torch.float32)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch packs nothing")
def test_packing_holds_one_layer_twice_not_the_model():
    tensors = random_tensors(LLAMA)
    left_plain, packed = HeldMatrices(tensors), HeldMatrices(tensors)
    weights = load_decoder_weights(left_plain, LLAMA, "cpu", torch.float32)
    packed_weights = load_decoder_weights(packed, LLAMA, "cpu", torch.float32, packed=True)
    assert (left_plain.most, packed.most) == (2, 1)
    rows = torch.randn(3, LLAMA.intermediate_size, generator=torch.Generator().manual_seed(1))
    for layer, packed_layer in zip(weights.layers, packed_weights.layers, strict=True):
        assert isinstance(packed_layer.down, PackedWeight)
        torch.testing.assert_close(packed_layer.down.product(rows), rows @ plain(layer.down).T)
