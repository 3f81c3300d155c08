"""A tiny random Llama, as a checkpoint folder and as transformers' own model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(**SIZES, eos_token_id=60, bos_token_id=0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference_model(checkpoint: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose attention has a sliding window."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("windowed")
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).save_pretrained(folder)
    return folder
