"""The embedded pair as shipped: sizes, format, tokenizer, and whether the draft still follows the target."""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models import embedded_draft_path, embedded_target_path, held_out_prompts

MAX_SHARD_BYTES = 12_000_000
MAX_WEIGHT_BYTES = {"target": 24_000_000, "draft": 4_000_000}
PATHS = {"target": embedded_target_path(), "draft": embedded_draft_path()}
PROMPTS_MEASURED = 16


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))


@cache
def log_probabilities(role: str) -> list[torch.Tensor]:
    """Log-softmax rows [T, V] of each measured prompt, float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(PATHS[role], dtype=torch.float32)
    encoded = [torch.tensor([tokenizer().encode(prompt).ids]) for prompt in held_out_prompts()[:PROMPTS_MEASURED]]
    with torch.no_grad():
        return [model(ids).logits[0].log_softmax(-1) for ids in encoded]


@pytest.mark.parametrize("role", PATHS)
def test_checkpoint_has_its_files_within_the_size_limits(role: str) -> None:
    folder = PATHS[role]
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).is_file()
    sizes = [shard.stat().st_size for shard in folder.glob("*.safetensors")]
    assert sizes and max(sizes) <= MAX_SHARD_BYTES
    assert sum(sizes) <= MAX_WEIGHT_BYTES[role]


def test_index_names_exactly_the_shards_that_exist() -> None:
    index = json.loads((PATHS["target"] / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) == {shard.name for shard in PATHS["target"].glob("*.safetensors")}


@pytest.mark.parametrize("role", PATHS)
def test_config_is_a_llama_with_explicit_head_size(role: str) -> None:
    config = AutoConfig.from_pretrained(PATHS[role])
    stored = json.loads((PATHS[role] / "config.json").read_text(encoding="utf-8"))
    assert config.architectures == ["LlamaForCausalLM"]
    assert stored["head_dim"] == 128
    assert config.vocab_size == tokenizer().get_vocab_size() == 8192
    assert config.max_position_embeddings >= 2048
    assert config.eos_token_id == config.bos_token_id == tokenizer().token_to_id("<|endoftext|>")


def test_both_share_one_tokenizer() -> None:
    target, draft = ((path / "tokenizer.json").read_bytes() for path in PATHS.values())
    assert target == draft


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        " ",
        "\t\tif x:\r\n\t\t\treturn\x00\x7f",
        "naïve ☃ 🐍 ß 日本語 👩‍👩‍👧 \u202e\u0301e",
        "x  =  1\n\n\n    # trailing   \n",
        "".join(map(chr, range(0x20, 0x250))),
        "\U0010ffff\ufeff\u2028",
    ],
)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    encoding = tokenizer().encode(text)
    assert encoding.ids[0] == tokenizer().token_to_id("<|endoftext|>")
    assert tokenizer().decode(encoding.ids) == text


def test_every_byte_is_in_the_vocabulary() -> None:
    assert sum(len(token) == 1 for token in tokenizer().get_vocab()) >= 256


def test_prompts_are_many_distinct_and_of_middling_length() -> None:
    prompts = held_out_prompts()
    assert len(prompts) == len(set(prompts)) >= 64
    lengths = [len(tokenizer().encode(prompt).ids) for prompt in prompts]
    assert min(lengths) >= 60 and max(lengths) <= 200
    assert all(prompt == prompt.rstrip() for prompt in prompts)


def test_models_read_held_out_python_well() -> None:
    """Random weights need about 3.4 bits a byte, and zlib 4.1 on texts this short; a trained model far less."""
    prompts = held_out_prompts()[:PROMPTS_MEASURED]
    size = sum(len(prompt.encode()) for prompt in prompts)
    for role, limit in (("target", 1.3), ("draft", 1.6)):
        bits = 0.0
        for prompt, rows in zip(prompts, log_probabilities(role), strict=True):
            labels = torch.tensor(tokenizer().encode(prompt).ids[1:])
            bits -= rows[:-1].gather(-1, labels[:, None]).sum().item() / math.log(2)
        assert bits / size < limit


def test_draft_agrees_with_target() -> None:
    target, draft = torch.cat(log_probabilities("target")), torch.cat(log_probabilities("draft"))
    assert (target.argmax(-1) == draft.argmax(-1)).float().mean() > 0.7
    assert torch.minimum(target.exp(), draft.exp()).sum(-1).mean() > 0.68


def test_paths_need_no_torch() -> None:
    code = "import sys, outrider.models as m; m.held_out_prompts(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
