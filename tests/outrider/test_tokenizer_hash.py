"""Dependence of a tokenizer's hash on its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CheckpointError
from outrider.tokenizer_hash import tokenizer_hash

DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 3, "content": "<eos>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
    "post_processor": None,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def hash_of(folder: Path, **changes: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps({**DOCUMENT, **changes}))
    return tokenizer_hash(folder)


def test_layout_and_what_surrounds_a_prompt_do_not_matter(tmp_path: Path) -> None:
    same = hash_of(tmp_path)
    assert len(same) == 64
    (tmp_path / "tokenizer.json").write_text(json.dumps(DOCUMENT, indent=2, sort_keys=True))
    assert tokenizer_hash(tmp_path) == same
    assert hash_of(tmp_path, truncation={"max_length": 5}, padding={"length": 5}, post_processor={"type": "x"}) == same
    assert hash_of(tmp_path, model=DOCUMENT["model"] | {"merges": ["a b"]}) == same


@pytest.mark.parametrize(
    "changes",
    [
        {"model": DOCUMENT["model"] | {"vocab": {"b": 0, "a": 1, "ab": 2}}},
        {"model": DOCUMENT["model"] | {"merges": []}},
        {"added_tokens": []},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"decoder": None},
    ],
)
def test_content_matters(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert hash_of(tmp_path, **changes) != hash_of(tmp_path)


@pytest.mark.parametrize(("text", "message"), [(None, "no tokenizer"), ("{", "not JSON"), ("[]", "not a tokenizer")])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        tokenizer_hash(tmp_path)
