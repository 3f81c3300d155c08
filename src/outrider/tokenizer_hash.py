"""A name for what a tokenizer's ids stand for (torch-free)."""

import hashlib
import json
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError


def tokenizer_hash(checkpoint: str | Path) -> str:
    """Return SHA-256 (hex) over the tokens of a tokenizer.json and their ids.

    With equal hashes every id is the same token. How a text is split into tokens is left out: a coordinator alone does
    that, and two conversions of one GGUF file describe it in different words.

    Raises:
        CheckpointError: there is no such file, or it is no tokenizer.
    """
    path = Path(checkpoint) / "tokenizer.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: no tokenizer.json; save the tokenizer in its fast form") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(model := document.get("model"), dict) or "vocab" not in model:
        raise CheckpointError(f"{path}: not a tokenizer of the tokenizers library (no vocabulary)")
    added = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
    text = json.dumps(_ids(model["vocab"]) | added, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _ids(vocab: Any) -> dict[str, int]:
    """Ids by token; a Unigram model lists its tokens in their order, each with a score."""
    return vocab if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
