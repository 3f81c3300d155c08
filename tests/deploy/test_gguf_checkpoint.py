"""A .gguf file that the test writes, served as the checkpoint that it is dequantised into."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.deploy import gguf_checkpoint
from outrider.deploy.model_files import complete, find_model
from outrider.errors import CheckpointError, MissingPackage
from outrider.models import embedded_draft_path, embedded_target_path

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TEXT = "def load(path):\n    return"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path) -> None:
    """The embedded draft with its matrices in blocks of 8 bits, as llama.cpp writes a Llama."""
    gguf: Any = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    folder = embedded_draft_path()
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = {**tokenizer["model"]["vocab"], **{own["content"]: own["id"] for own in tokenizer["added_tokens"]}}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {own["content"] for own in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if own in special else gguf.TokenType.NORMAL for own in tokens])
    writer.add_token_merges([own if isinstance(own, str) else " ".join(own) for own in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float()
        for projection, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if projection in name:
                # llama.cpp turns neighbouring channels, transformers the halves of a head.
                shape = (count, 2, len(values) // count // 2, values.shape[1])
                values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        known = {"embed_tokens": "token_embd", "norm": "output_norm"}
        new = known.get(parts[0]) or f"blk.{parts[1]}.{NAMES[parts[2]]}"
        kind = gguf.GGMLQuantizationType.Q8_0 if values.dim() == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values.contiguous().numpy(), kind)
        writer.add_tensor(f"{new}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_becomes_the_checkpoint_that_transformers_reads_in_it(tmp_path: Path, cache: Path):
    file = tmp_path / "small.gguf"
    write_gguf(file)
    found = find_model(str(file))
    assert (found.name, found.folder) == ("small", None)
    assert "convert small.gguf" in found.missing
    made = complete(found)
    assert made.folder is not None
    assert made.folder.is_relative_to(cache)
    assert not made.missing
    # The same content elsewhere is the same checkpoint.
    again = file.rename(tmp_path / "other.gguf")
    assert find_model(str(again)).folder == made.folder

    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    expected_ids = AutoTokenizer.from_pretrained(tmp_path, gguf_file=again.name)(TEXT).input_ids
    assert tokenizer(TEXT).input_ids == expected_ids
    assert expected_ids[0] == tokenizer.bos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi\n"

    ids = torch.tensor([tokenizer(TEXT).input_ids])
    with torch.inference_mode():
        expected = gguf_checkpoint.load(again)(ids).logits
        logits = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)(ids).logits
        unquantised = AutoModelForCausalLM.from_pretrained(embedded_draft_path(), dtype=torch.float32)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    # Blocks of 8 bits say nearly what the weights did: names and orders of channels are right.
    assert (logits - unquantised).abs().max() < 0.05 * unquantised.abs().max()


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
def test_what_is_no_such_file_is_said_at_once(tmp_path: Path, content: bytes, wrong: str):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=wrong):
        find_model(str(file))


def test_the_packages_that_it_takes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_checkpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"gguf and accelerate: pip install 'outrider\[gguf\]'"):
        gguf_checkpoint.convert(embedded_target_path())
