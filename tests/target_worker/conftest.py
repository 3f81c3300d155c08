"""A tiny random Llama, as a checkpoint folder and as transformers' own model."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB_SIZE = 61


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=96,
        initializer_range=0.4,
        eos_token_id=60,
        bos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference_model(checkpoint: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
