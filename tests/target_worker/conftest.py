"""A tiny random Llama, as a checkpoint folder and as transformers' own model."""

from pathlib import Path

import pytest
import torch
from tests.tiny_llama import SIZES, write_llama
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_llama(folder, seed=3, eos_token_id=60, bos_token_id=0)
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
