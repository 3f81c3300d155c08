"""Small random models of every family, the same prompts and trees for all, and what transformers makes of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.outrider.engine.step_rows import StepBuilder, StepRows, ancestor_masks, node_depths
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

from outrider.engine.kv_slots import SlotTable

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
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
WINDOWED: dict[str, Any] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-bias-yarn": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, **WINDOWED),
    "qwen3": Qwen3Config(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma": GemmaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "gemma2": Gemma2Config(
        **SIZES,
        **WINDOWED,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        attention_bias=True,
    ),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWED, query_pre_attn_scalar=24, final_logit_softcapping=10.0),
}
# 0 is the root; two branches, one of them forking again.
PARENTS = [0, 1, 1, 0, 4, 2]
NODES = [11, 22, 33, 44, 55, 66]
PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (2, 14)).tolist()


def save_random(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start at constants: make every one matter
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def save_large(folder: Path) -> Path:
    """A Llama whose matrices are large enough for GPUs, with key heads for two ranks."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"vocab_size": 4099, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def own_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def path_steps(
    slots: SlotTable, device: torch.device | str = "cpu", prompts: Sequence[list[int]] = PROMPTS
) -> Iterator[StepRows]:
    """The prompts in two chunks, in turns so that their slots interleave; then a chain and a tree in one."""
    rows = range(len(prompts))
    for begin, end in ((0, 5), (5, 12)):
        builder = StepBuilder(slots, device)
        for row, prompt in zip(rows, prompts, strict=True):
            slots.extend(row, end - begin)
            builder.add_chain(row, prompt[begin:end], begin, True)
        yield builder.build()
    builder = StepBuilder(slots, device)
    for row, prompt in zip(rows, prompts, strict=True):
        slots.extend(row, 2 + len(NODES))
        builder.add_chain(row, prompt[12:13], 12, False)
        builder.add_tree(
            row,
            [prompt[13], *NODES],
            tree_start=13,
            positions=[13 + depth for depth in node_depths(PARENTS)],
            masks=ancestor_masks(PARENTS),
            write_indices=range(13, 14 + len(NODES)),
        )
    yield builder.build()


def expected_logits(model: Any) -> torch.Tensor:
    """Return the logits of the last of `path_steps`, [prompts (1 + nodes), V], one forward for each whole path."""
    rows = []
    for prompt in PROMPTS:
        for number in range(len(NODES) + 1):
            path, node = [], number
            while node:
                path.insert(0, NODES[node - 1])
                node = PARENTS[node - 1]
            with torch.inference_mode():
                rows.append(model(torch.tensor([[*prompt, *path]], device=model.device)).logits[0, -1])
    return torch.stack(rows)
