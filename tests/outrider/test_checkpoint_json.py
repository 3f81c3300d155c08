"""Checkpoint folders, told by their JSON files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.checkpoint_json import is_eagle_head
from outrider.errors import CheckpointError
from outrider.models import embedded_block_path, embedded_draft_path, embedded_eagle_path, embedded_target_path


def write_folder(folder: Path, config: dict[str, object], *names: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(2) for name in names}, folder / "model.safetensors")
    return folder


def test_heads_are_told_from_models(tmp_path: Path):
    assert is_eagle_head(embedded_eagle_path()) and is_eagle_head(embedded_block_path())
    assert not is_eagle_head(embedded_target_path()) and not is_eagle_head(embedded_draft_path())
    llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    # Those of the first layout call themselves Llama.
    for number, name in enumerate(("fc.weight", "model.fc.weight")):
        assert is_eagle_head(write_folder(tmp_path / str(number), llama, name, "layers.0.mlp.up_proj.weight"))
    small = write_folder(tmp_path / "small", llama, "model.layers.0.mlp.fc.weight", "lm_head.weight")
    assert not is_eagle_head(small)
    # A checkpoint whose weights are still to be loaded.
    (small / "model.safetensors").unlink()
    assert not is_eagle_head(small)
    (small / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    assert is_eagle_head(small)


def test_a_head_may_come_in_shards(tmp_path: Path):
    index = {"weight_map": {"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert is_eagle_head(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": "b.safetensors"}}))
    assert not is_eagle_head(tmp_path)


def test_a_torn_file_is_named(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        is_eagle_head(tmp_path)
