"""Every family's forward over chunks and trees against transformers' own, path by path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.outrider.engine.step_rows import Steps, ancestor_masks, node_depths
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.errors import CheckpointError

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama3-rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma": GemmaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "gemma2": Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        sliding_window=6,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
# 0 is the root; two branches, one of them forking again.
PARENTS = [0, 1, 1, 0, 4, 2]


def save_random(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start at constants: make every one matter
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def own_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def own_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_tree_equal_every_path_alone(family: str, tmp_path: Path) -> None:
    folder = save_random(FAMILIES[family], tmp_path)
    runner = ModelRunner(EngineConfig(model_path=folder, num_slots=64, max_num_seqs=3, torch_threads=1))
    prompts = np.random.default_rng(1).integers(0, 97, (2, 14)).tolist()
    nodes = [11, 22, 33, 44, 55, 66]
    steps, rows = Steps(runner), range(len(prompts))
    # Sessions extended in turns, so that their slots interleave.
    for chunk in (slice(0, 5), slice(5, 12)):
        builder = steps.builder()
        for row, prompt in zip(rows, prompts, strict=True):
            runner.slots.extend(row, chunk.stop - chunk.start)
            builder.add_chain(row, prompt[chunk], chunk.start, False)
        assert steps.logits(builder.build()).shape == (0, 97)
    # The last chunk shares its forward with the root (the prompt's last token) and the tree.
    builder = steps.builder()
    depths = node_depths(PARENTS)
    for row, prompt in zip(rows, prompts, strict=True):
        runner.slots.extend(row, 2 + len(nodes))
        builder.add_chain(row, prompt[12:13], 12, False)
        builder.add_tree(
            row,
            [prompt[13], *nodes],
            tree_start=13,
            positions=[13 + depth for depth in depths],
            masks=ancestor_masks(PARENTS),
            write_indices=range(13, 14 + len(nodes)),
        )
    logits = steps.logits(builder.build()).reshape(len(prompts), 1 + len(nodes), -1)
    model = own_model(folder)
    for session, prompt in enumerate(prompts):
        for number in range(len(nodes) + 1):
            path, node = [], number
            while node:
                path.insert(0, nodes[node - 1])
                node = PARENTS[node - 1]
            expected = own_logits(model, [*prompt, *path])[-1]
            torch.testing.assert_close(logits[session, number], expected, rtol=1e-4, atol=2e-4)


def test_bfloat16_stays_near_float32_and_gives_float32_logits(tmp_path: Path) -> None:
    folder = save_random(FAMILIES["llama"], tmp_path)
    runner = ModelRunner(EngineConfig(model_path=folder, dtype="bfloat16", num_slots=32, torch_threads=1))
    steps, prompt = Steps(runner), [3, 1, 4, 1, 5, 9, 2, 6]
    runner.slots.extend(0, len(prompt))
    builder = steps.builder()
    builder.add_chain(0, prompt, 0, True)
    logits = steps.logits(builder.build())
    assert logits.dtype == torch.float32
    expected = own_logits(own_model(folder), prompt)[-1:]
    assert (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory")])
def test_kv_that_does_not_fit_says_how_much_and_what_to_change(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(FAMILIES["llama"], tmp_path)

    def zeros(*_shape: object, **_options: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(
        CheckpointError, match=r"1000000 slots take \d+\.\d\d GB\. Lower kv_cache_memory_fraction, kv_b"
    ):
        ModelRunner(EngineConfig(model_path=folder, num_slots=1_000_000, max_num_seqs=1))
