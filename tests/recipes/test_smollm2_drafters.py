"""The drafters of SmolLM2 that ship: small enough, in bfloat16, and of the target's sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.models.widen import load_small

DRAFTERS = Path(__file__).resolve().parents[2] / "recipes" / "smollm2" / "drafters"
VOCAB_SIZE = 49152


def config_of(name: str) -> dict[str, Any]:
    return json.loads((DRAFTERS / name / "config.json").read_text())


@pytest.mark.parametrize("name", ["draft", "head", "block"])
def test_they_are_small(name: str) -> None:
    files = list((DRAFTERS / name).glob("*.safetensors"))
    assert 0 < sum(file.stat().st_size for file in files) < 20e6
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert config_of(name)["vocab_size"] == VOCAB_SIZE


def test_every_token_of_the_target_has_a_row_of_the_draft() -> None:
    _, weights = load_small(DRAFTERS / "draft")
    assert weights["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 384)


@pytest.mark.parametrize(("name", "block_size"), [("head", None), ("block", 6)])
def test_heads_read_the_targets_hidden_states(name: str, block_size: int | None) -> None:
    config = config_of(name)
    assert config["hidden_size"] == 576
    assert max(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) < 30
    assert config.get("block_size") == block_size
