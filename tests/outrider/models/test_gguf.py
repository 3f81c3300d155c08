"""A `.gguf` file becomes a checkpoint that says what the file's model says."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

from outrider.deploy.config import DeployConfig
from outrider.deploy.plan import make_plan
from outrider.errors import CheckpointError, MissingPackage
from outrider.models import gguf as own
from outrider.tokenizer_hash import tokenizer_hash

gguf: Any = pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("accelerate", reason="the extra gguf is not installed")

ROPE_THETA = 20_000.0
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ba"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def tiny_llama(*, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=heads * head_dim, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=128, bos_token_id=0,
        eos_token_id=1, tie_word_embeddings=is_tied, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def in_order_of_gguf(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rotated pairs stand beside each other in a file, and half a head apart in transformers."""
    return weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def write(file: Path, model: LlamaForCausalLM, kind: Any) -> None:
    writer, config = gguf.GGUFWriter(file, "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            count = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            assert count is not None
            weights = in_order_of_gguf(weights, count)
        for theirs, ours in {"model.layers.": "blk.", **_NAMES}.items():
            name = name.replace(theirs, ours)  # noqa: PLW2901
        quantised = kind if weights.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weights, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 16, "is_tied": False},
        {"heads": 3, "kv_heads": 1, "head_dim": 64, "is_tied": True},  # SmolLM2's
    ],
    ids=["two heads a group", "three heads a group"],
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_logits_are_those_that_transformers_gives_of_the_file(tmp_path: Path, kind: str, shape: dict[str, Any]):
    model, file = tiny_llama(**shape), tmp_path / "tiny.gguf"
    write(file, model, getattr(gguf.GGMLQuantizationType, kind))
    folder = own.checkpoint_of_gguf(file, tmp_path / "cache")
    found = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    torch.testing.assert_close(found, logits(theirs), rtol=1e-5, atol=1e-5)
    if kind == "F32":
        torch.testing.assert_close(found, logits(model), rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("some text", add_special_tokens=False)) == "some text"
    assert tokenizer.chat_template == TEMPLATE
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert special == (0, 1, 2, 3)


def test_versions_of_transformers_describe_one_tokenizer_in_one_way(tmp_path: Path):
    """Transformers 5.17 describes a byte-level tokenizer in other words than 5.23."""
    model, file = tiny_llama(heads=4, kv_heads=2, head_dim=16, is_tied=True), tmp_path / "tiny.gguf"
    write(file, model, gguf.GGMLQuantizationType.F32)
    folder = own.checkpoint_of_gguf(file, tmp_path / "cache")
    written = folder / "tokenizer.json"
    document = json.loads(written.read_text(encoding="utf-8"))
    other = Path(shutil.copytree(folder, tmp_path / "other")) / "tokenizer.json"
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    sequence = [{"type": "ByteFallback"}, {"type": "Fuse"}, spaces, document["decoder"]]
    document |= {
        "normalizer": {"type": "Sequence", "normalizers": []},
        "pre_tokenizer": document["pre_tokenizer"] | {"trim_offsets": False},
        "decoder": {"type": "Sequence", "decoders": sequence},
    }
    document["model"] |= {"unk_token": TOKENS[0], "fuse_unk": True, "byte_fallback": True}
    other.write_text(json.dumps(document), encoding="utf-8")
    assert tokenizer_hash(other.parent) != tokenizer_hash(folder)
    own.describe_byte_level(other)
    assert tokenizer_hash(other.parent) == tokenizer_hash(folder)


def test_a_file_is_read_once_and_another_of_its_name_anew(tmp_path: Path):
    model, file = tiny_llama(), tmp_path / "tiny.gguf"
    write(file, model, gguf.GGMLQuantizationType.F32)
    first = own.checkpoint_of_gguf(file, tmp_path / "cache")
    (first / "model.safetensors").write_bytes(b"as it was left")
    assert own.checkpoint_of_gguf(file, tmp_path / "cache") == first
    assert (first / "model.safetensors").read_bytes() == b"as it was left"
    write(file, model, gguf.GGMLQuantizationType.Q8_0)
    assert own.checkpoint_of_gguf(file, tmp_path / "cache") != first
    assert sorted(path.name for path in (tmp_path / "cache/gguf").iterdir() if "." in path.name) == []


def test_what_cannot_be_read_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF and no more")
    with pytest.raises(CheckpointError, match=r"broken\.gguf: no model can be read"):
        own.checkpoint_of_gguf(file, tmp_path / "cache")
    with pytest.raises(CheckpointError, match="cannot be read"):
        own.checkpoint_of_gguf(tmp_path / "missing.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache/gguf").iterdir()) == []
    monkeypatch.setattr(own.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"gguf and accelerate: pip install 'outrider\[gguf\]'"):
        own.checkpoint_of_gguf(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"no model", "no GGUF file"),
        (b"GGUF\x03\0", "its header cannot be read"),
        (
            b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x14" + bytes(7) + b"general.architecture"
            b"\x08\0\0\0" + b"\x05" + bytes(7) + b"mamba",
            "model type 'mamba' is not served",
        ),
    ],
)
def test_what_is_no_model_of_ours_is_said_without_reading_it(tmp_path: Path, content: bytes, wrong: str):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=wrong):
        own.check_architecture(file)


def test_serve_has_it_made_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write(file, tiny_llama(), gguf.GGMLQuantizationType.F32)
    plan = make_plan(DeployConfig(port=0, target_model=str(file)))
    assert [model.missing.partition(" in /")[0] for model in plan.missing] == [
        "convert tiny.gguf into a checkpoint of float32"
    ]
    done = plan.completed()
    assert not done.missing
    assert done.config.target_model == str(own.checkpoint_of_gguf(file))
    assert done.config.served_model_name == ("tiny",)
