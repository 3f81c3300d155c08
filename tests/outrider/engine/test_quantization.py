"""Weights of 8 bits: what is computed is the dequantised model; layouts, shards, refusals."""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.outrider.engine.step_rows import Steps
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.decoder_loading import check_eight_bits
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import load_decoder_weights
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError
from outrider.kernels.linear.scaled_weight import ScaledWeight
from outrider.kernels.linear.skinny import Weight

# Projections of 64 columns are stored in another order, those of 80 are not.
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    initializer_range=0.3,
    attention_bias=True,
)
SPEC = DecoderSpec.of(CONFIG.to_dict())
PROMPTS = [[5, 7, 90, 3, 41, 11, 2, 66, 8], [1, 2, 3], [44]]
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {**FLOAT, "strategy": "channel", "dynamic": False, "observer": "minmax"},
    "input_activations": {**FLOAT, "strategy": "token", "dynamic": True},
    "output_activations": None,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "sparsity_config": {},
}
PER_TENSOR = {
    **COMPRESSED,
    "config_groups": {"group_0": {**GROUP, "weights": {**GROUP["weights"], "strategy": "tensor"}}},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
# What a checkpoint says, the shape of its factors, and their dtype.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Sequence[int]], torch.dtype]] = {
    "channel": (COMPRESSED, lambda weight: (len(weight), 1), torch.bfloat16),
    "tensor": (PER_TENSOR, lambda _: (1,), torch.float32),
    "fp8": (FP8, lambda _: (), torch.float32),
}

Tensors = dict[str, torch.Tensor]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def rounded(weight: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as a checkpoint has it: numbers of 8 bits and factors of a shape."""
    largest = weight.float().abs()
    factors = (largest.amax(dim=1) if len(shape) == 2 else largest.max()).reshape(shape) / 448
    return (weight.float() / factors).to(torch.float8_e4m3fn), factors


def write(folder: Path, tensors: Tensors, quantization_config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    CONFIG.architectures = ["LlamaForCausalLM"]
    document = CONFIG.to_dict() | ({"quantization_config": quantization_config} if quantization_config else {})
    (folder / "config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(CONFIG).bfloat16()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return write(tmp_path_factory.mktemp("whole") / "model", tensors)


def quantise_file(
    folder: Path,
    whole: Path,
    config: dict[str, Any],
    *,
    scale_of: Callable[[torch.Tensor], Sequence[int]],
    chosen: Callable[[str], bool] = is_projection,
    dtype: torch.dtype = torch.float32,
) -> tuple[Path, Path]:
    """The checkpoint with matrices of 8 bits, and the float32 one of what they stand for."""
    tensors = load_file(whole / "model.safetensors")
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    for name in filter(chosen, list(tensors)):
        values, factors = rounded(tensors[name], scale_of(tensors[name]))
        tensors[name], tensors[f"{name}_scale"] = values, factors.to(dtype)
        plain[name] = values.float() * tensors[f"{name}_scale"].float()
    return write(folder / "quantised", tensors, config), write(folder / "dequantised", plain)


def expected_logits(folder: Path) -> torch.Tensor:
    """[prompts, V] by transformers' own code in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])


def logits(folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> torch.Tensor:
    runner = ModelRunner(EngineConfig(model_path=folder, num_slots=2048, **options))
    steps = Steps(runner, sessions=len(prompts))
    builder = steps.builder()
    for row, prompt in enumerate(prompts):
        runner.slots.extend(row, len(prompt))
        builder.add_chain(row, prompt, 0, True)
    return steps.logits(builder.build()).float().cpu()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_checkpoint_computes_what_its_numbers_stand_for(whole: Path, tmp_path: Path, layout: str) -> None:
    config, shape, dtype = LAYOUTS[layout]
    folder, plain = quantise_file(tmp_path, whole, config, scale_of=shape, dtype=dtype)
    expected = expected_logits(plain)
    torch.testing.assert_close(logits(folder), expected, rtol=1e-5, atol=1e-5)
    # The rounding itself is no small thing: were it not there, this would be seen.
    assert (expected_logits(whole) - expected).abs().max() > 1e-2


def test_the_option_rounds_every_row_of_the_layers(whole: Path, tmp_path: Path) -> None:
    _, plain = quantise_file(tmp_path, whole, COMPRESSED, scale_of=lambda weight: (len(weight), 1))
    given = logits(whole, quantization="fp8")
    torch.testing.assert_close(given, expected_logits(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "deterministic", "refused"), [((8, 0), True, True), ((8, 9), True, False), ((8, 0), False, False)]
)
def test_deterministic_steps_with_8_bits_need_a_gpu_that_reads_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], deterministic: bool, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = EngineConfig(model_path="folder", device="cuda", quantization="fp8", deterministic=deterministic)
    words = r"folder: deterministic with weights of 8 bits needs .* 8.9 or more, not 8.0 \(cuda\): leave one"
    with pytest.raises(CheckpointError, match=words) if refused else contextlib.nullcontext():
        check_eight_bits(config, torch.device("cuda"))


def dequantised(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, ScaledWeight)
    return weight.dequantised(torch.float32)


@pytest.mark.parametrize("stored", [True, False])
def test_ranks_have_parts_of_the_same_model(whole: Path, tmp_path: Path, stored: bool) -> None:
    folder = whole
    if stored:
        folder, _ = quantise_file(tmp_path, whole, COMPRESSED, scale_of=lambda weight: (len(weight), 1))
    every, first, second = (
        load_decoder_weights(
            SafetensorsSource(folder), SPEC, "cpu", torch.bfloat16, rank=rank, world_size=ranks, quantized=not stored
        ).layers[1]
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    for name in ("output", "down"):
        parts = [dequantised(getattr(layer, name)) for layer in (first, second)]
        assert torch.equal(torch.cat(parts, dim=1), dequantised(getattr(every, name)))
    query, key, value = dequantised(every.qkv).split([64, 32, 32])
    gate, up = dequantised(every.gate_up).chunk(2)
    for number, layer in enumerate((first, second)):
        wanted = torch.cat([part.chunk(2)[number] for part in (query, key, value)])
        assert torch.equal(dequantised(layer.qkv), wanted)
        assert torch.equal(dequantised(layer.gate_up), torch.cat([gate.chunk(2)[number], up.chunk(2)[number]]))


def test_matrices_of_one_input_stay_whole_where_one_of_them_is(whole: Path, tmp_path: Path) -> None:
    folder, plain = quantise_file(
        tmp_path, whole, COMPRESSED, scale_of=lambda _: (1,), chosen=lambda name: name.endswith("q_proj.weight")
    )
    qkv = load_decoder_weights(SafetensorsSource(folder), SPEC, "cpu", torch.float32).layers[0].qkv
    assert isinstance(qkv, torch.Tensor)
    stored = load_file(plain / "model.safetensors")
    assert torch.equal(qkv, torch.cat([stored[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]))


def test_an_output_layer_of_8_bits_keeps_them(whole: Path, tmp_path: Path) -> None:
    folder, plain = quantise_file(
        tmp_path, whole, COMPRESSED, scale_of=lambda weight: (len(weight), 1), chosen=lambda name: "lm_head" in name
    )
    head = load_file(plain / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(logits(folder), expected_logits(plain), rtol=1e-5, atol=1e-5)
    weights = load_decoder_weights(SafetensorsSource(folder), SPEC, "cpu", torch.float32, rank=1, world_size=2)
    # 49 rows of the vocabulary's 97 a rank: the second rank's last one is filled up.
    assert torch.equal(dequantised(weights.head), torch.cat([head[49:], torch.zeros(1, 64)]))
    assert isinstance(weights.layers[0].qkv, torch.Tensor)


def test_an_embedding_of_8_bits_is_what_it_stands_for(whole: Path, tmp_path: Path) -> None:
    folder, plain = quantise_file(
        tmp_path, whole, COMPRESSED, scale_of=lambda weight: (len(weight), 1), chosen=lambda name: "embed" in name
    )
    torch.testing.assert_close(logits(folder), expected_logits(plain), rtol=1e-5, atol=1e-5)


def changed(*path: str, value: Any, of: dict[str, Any] = COMPRESSED) -> dict[str, Any]:
    """A quantization_config with one entry changed."""
    document = json.loads(json.dumps(of))
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return document


GROUP_0 = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        (changed("format", value="pack-quantized"), "format 'pack-quantized'"),
        (changed(*GROUP_0, "weights", "num_bits", value=4), "weights of num_bits 4"),
        (changed(*GROUP_0, "weights", "type", value="int"), "weights of type 'int'"),
        (changed(*GROUP_0, "weights", "strategy", value="block"), "weights of strategy 'block'"),
        (changed(*GROUP_0, "weights", "symmetric", value=False), "weights of symmetric False"),
        (changed(*GROUP_0, "input_activations", "dynamic", value=False), "input_activations of dynamic False"),
        (changed(*GROUP_0, "input_activations", value=None), "input_activations None"),
        (changed(*GROUP_0, "output_activations", value=FLOAT), "output_activations {"),
        (changed("kv_cache_scheme", value=FLOAT), "a kv_cache_scheme"),
        (changed("transform_config", value={"config_groups": {"u": {}}}), "a transform_config"),
        (changed("config_groups", value={}), "config_groups {}"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({**FP8, "weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\]"),
        ("fp8", "quantization_config 'fp8'"),
    ],
)
def test_other_quantised_checkpoints_are_told_what_works(whole: Path, tmp_path: Path, config: Any, found: str) -> None:
    folder = write(tmp_path / "model", load_file(whole / "model.safetensors"), config)
    with pytest.raises(CheckpointError, match=rf"quantised weights with {found}.* these are: .*float-quantized.*fp8 "):
        read_checkpoint(EngineConfig(model_path=folder))


def test_a_configuration_that_is_null_is_none(whole: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", load_file(whole / "model.safetensors"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": None}))
    torch.testing.assert_close(logits(folder), expected_logits(whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("_scale", None, "is F8_E4M3 without model.layers.0.mlp.up_proj.weight_scale"),
        ("_scale", torch.ones(79, 1), r"up_proj.weight_scale is F32 of shape \[79, 1\]"),
        ("_scale", torch.ones(1, dtype=torch.int32), r"up_proj.weight_scale is I32 of shape \[1\]"),
        ("", torch.zeros(80, 64, dtype=torch.float8_e5m2), "up_proj.weight is F8_E5M2"),
    ],
)
def test_numbers_of_8_bits_need_their_factors(
    whole: Path, tmp_path: Path, name: str, given: torch.Tensor | None, message: str
) -> None:
    folder, _ = quantise_file(tmp_path, whole, COMPRESSED, scale_of=lambda weight: (len(weight), 1))
    tensors = load_file(folder / "model.safetensors")
    full = f"model.layers.0.mlp.up_proj.weight{name}"
    tensors.pop(full)
    tensors |= {} if given is None else {full: given}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        logits(folder)


def relative(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given - wanted).norm() / wanted.norm())


@pytest.mark.gpu
@needs_cuda
def test_the_gpu_computes_the_dequantised_model(whole: Path, tmp_path: Path) -> None:
    folder, plain = quantise_file(tmp_path, whole, COMPRESSED, scale_of=lambda weight: (len(weight), 1))
    expected = expected_logits(plain)
    exact = logits(folder, device="cuda", dtype="float32", enforce_eager=False)
    torch.testing.assert_close(exact, expected, rtol=1e-3, atol=1e-3)
    # In bfloat16 this model is off by 1 to 4 %, whether its weights have 8 bits or stand for them.
    assert relative(logits(plain, device="cuda"), expected) < 0.05
    kinds: list[dict[str, Any]] = [{}, {"deterministic": True}, {"enforce_eager": True}]
    for options in kinds:
        assert relative(logits(folder, device="cuda", **options), expected) < 0.05, options
    # Many rows are rounded to 8 bits too, which is seen in a random model, unless all numbers of rows are to be alike.
    many = PROMPTS * 8
    assert 0.05 < relative(logits(folder, many, device="cuda")[:3], expected) < 0.4
    assert relative(logits(folder, many, device="cuda", deterministic=True)[:3], expected) < 0.05


@pytest.mark.gpu
@needs_cuda
def test_deterministic_bits_do_not_depend_on_the_number_of_rows(whole: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "quantization": "fp8", "deterministic": True}
    alone = logits(whole, PROMPTS[:1], **options)
    assert torch.equal(logits(whole, PROMPTS, **options)[:1], alone)
    assert torch.equal(logits(whole, PROMPTS * 10, **options)[:1], alone)
