"""Folders that are served, and the errors of those that are not."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.tiny_llama import write_llama

from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.errors import CheckpointError


def save(folder: Path, **sizes: Any) -> Path:
    tiny = {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }
    write_llama(folder, **tiny | sizes, eos_token_id=3, bos_token_id=0)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


def test_the_card_says_what_the_files_say(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[3, 5])
    _, card = read_checkpoint(EngineConfig(model_path=folder, dtype="bfloat16", max_model_len=20))
    assert (card.vocab_size, card.dtype, card.max_model_len) == (16, "bfloat16", 20)
    assert card.eos_token_ids == (3, 5)
    assert card.name == folder.name
    assert card.tokenizer_hash == ""


def test_the_card_needs_no_weights(folder: Path) -> None:
    config = EngineConfig(model_path=folder)
    card = ModelRunner(config).info
    (folder / "model.safetensors").write_bytes(b"")
    spec, read = read_checkpoint(config)
    assert read == card
    assert spec.model_type == "llama"


def test_end_of_sequence_falls_back_to_the_model_configuration(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_checkpoint(EngineConfig(model_path=folder))[1].eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "auto_map"),
        ({"model_type": "gpt2"}, "'gpt2' is not served; these are: llama"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 256},
            r"'deepseek_v3' is not served \(it has multi-head latent attention, a mixture of experts\); these are: ",
        ),
        (
            {"model_type": "gemma3", "vision_config": {"x": 1}},
            r"its text model alone may be served\); these are: llama",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_configurations_that_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        ModelRunner(EngineConfig(model_path=folder))


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors.*save_pretrained"):
        ModelRunner(EngineConfig(model_path=folder))


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot load it"):
        ModelRunner(EngineConfig(model_path=folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        ModelRunner(EngineConfig(model_path=folder))


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing.*up_proj"):
        ModelRunner(EngineConfig(model_path=folder))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_checkpoint(EngineConfig(model_path=tmp_path))


def test_lengths_and_memory_that_cannot_be(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="the model ends at 32"):
        read_checkpoint(EngineConfig(model_path=folder, max_model_len=33))
    with pytest.raises(CheckpointError, match="hold no token, 64 needed for each"):
        ModelRunner(EngineConfig(model_path=folder, kv_bytes=63))


def test_kv_memory_is_what_is_asked_for_or_needed(folder: Path) -> None:
    assert ModelRunner(EngineConfig(model_path=folder, kv_bytes=6400)).slots.num_slots == 100
    # Two sessions of 32 tokens and 4 nodes never need more.
    assert ModelRunner(EngineConfig(model_path=folder, max_num_seqs=2, max_tree_nodes=4)).slots.num_slots == 72


def test_kv_memory_that_the_system_refuses(tmp_path: Path) -> None:
    folder = save(tmp_path, head_dim=1 << 14)
    with pytest.raises(CheckpointError, match=r"4194304 slots take 549.76 GB.*\. Lower .* num_slots"):
        ModelRunner(EngineConfig(model_path=folder, num_slots=1 << 22))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what a process holds")
def test_kv_takes_memory_where_it_is_written(tmp_path: Path) -> None:
    folder = save(tmp_path, head_dim=1 << 14)
    held = resident_bytes()
    runner = ModelRunner(EngineConfig(model_path=folder, num_slots=1 << 14))
    assert resident_bytes() - held < 1 << 30, "of 2 GiB"
    runner.close()
