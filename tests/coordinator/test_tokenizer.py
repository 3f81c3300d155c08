"""Tokenizers and checkpoint folders as a coordinator reads them."""

import json
from pathlib import Path

import pytest
from tests.byte_tokenizer import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from outrider.coordinator.sessions.tokenizer import TextTokenizer, read_model_info
from outrider.errors import CheckpointError
from outrider.tokenizer_hash import tokenizer_hash


def checkpoint(folder: Path, config: object, **files: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


CONFIG = {"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 7}


def test_load_encode_decode(tmp_path: Path) -> None:
    original = byte_tokenizer("<s>")
    original.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    original.enable_truncation(3)
    original.enable_padding(length=50)
    original.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.load(tmp_path)
    # The special token of a prompt is there; what a file says of truncation and padding is not for prompts.
    assert tokenizer.encode("héllo")[0] == 256
    assert len(tokenizer.encode("héllo")) == 7
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    assert tokenizer.vocab_size == 257
    assert tokenizer.piece(256) == b""
    assert tokenizer.piece(5000) == b""
    assert b"".join(map(tokenizer.piece, tokenizer.encode("héllo 🙂\n"))) == "héllo 🙂\n".encode()


def test_every_byte_has_a_piece() -> None:
    tokenizer = TextTokenizer(byte_tokenizer())
    assert sorted(map(tokenizer.piece, range(256))) == [bytes([byte]) for byte in range(256)]


def test_metaspace_pieces() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    pieces = TextTokenizer(tokenizer)
    assert [pieces.piece(token_id) for token_id in (1, 2, 3)] == [b" a", b"b", b" "]
    assert [pieces.leading_space_dropped(token_id) for token_id in (1, 2)] == [True, False]


def test_words_without_a_decoder() -> None:
    tokenizer = TextTokenizer(Tokenizer(models.WordLevel(vocab={"one": 0, "two": 1}, unk_token="one")))
    assert tokenizer.piece(1) == b" two"
    assert tokenizer.leading_space_dropped(1)


def test_longest_token_bounds_the_text_only_where_it_may() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["0123456789"])
    assert TextTokenizer(tokenizer).longest_token_bytes == 10
    tokenizer.normalizer = normalizers.NFC()
    assert TextTokenizer(tokenizer).longest_token_bytes == 30
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    assert TextTokenizer(tokenizer).longest_token_bytes is None


def test_unserved_decoder_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="CTC"):
        TextTokenizer(tokenizer)


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TextTokenizer.load(tmp_path)


def test_model_info(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, CONFIG)
    info = read_model_info(folder)
    assert (info.name, info.vocab_size, info.max_model_len) == (tmp_path.name, 300, 64)
    assert (list(info.eos_token_ids), info.tokenizer_hash, info.dtype) == ([7], "", "")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    assert read_model_info(folder).tokenizer_hash == tokenizer_hash(folder)
    assert read_model_info(folder, max_model_len=32).max_model_len == 32
    with pytest.raises(CheckpointError, match="65 given, the model ends at 64"):
        read_model_info(folder, max_model_len=65)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (CONFIG, {"eos_token_id": [3, 4]}, [3, 4]),
        (CONFIG, {"eos_token_id": 5}, [5]),
        (CONFIG, {}, [7]),
        (CONFIG | {"eos_token_id": None}, {}, []),
    ],
)
def test_end_of_sequence_ids(tmp_path: Path, config: object, generation: object, expected: list[int]) -> None:
    folder = checkpoint(tmp_path, config, generation_config=generation)
    assert list(read_model_info(folder).eos_token_ids) == expected


def test_broken_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024}')
    with pytest.raises(CheckpointError, match="model type 'gpt2' is not served"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="vocab_size"):
        read_model_info(checkpoint(tmp_path, {"max_position_embeddings": 4}))
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_model_info(checkpoint(tmp_path, []))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_model_info(tmp_path)
