"""Tiny random Llamas, as checkpoint folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "initializer_range": 0.4,
}


def write_llama(folder: Path, *, seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """Write a random Llama and return it; `sizes` are what its configuration has beside or instead of `SIZES`."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).eval()
    model.save_pretrained(folder)
    return model
