"""A name for what a tokenizer does: with equal hashes every token id stands for the same text (torch-free)."""

import hashlib
import json
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError

# What decides which text an id stands for and which ids a text becomes. Truncation, padding and the post-processor
# (special tokens around a prompt) do not, and differ between checkpoints of one family.
_CONTENT = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")


def tokenizer_hash(checkpoint: str | Path) -> str:
    """Return SHA-256 (hex) over the canonical content of a tokenizer.json; CheckpointError where it is none."""
    path = Path(checkpoint) / "tokenizer.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: no tokenizer.json; save the tokenizer in its fast form") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise CheckpointError(f"{path}: not a tokenizer of the tokenizers library (no `model`)")
    content = {name: document.get(name) for name in _CONTENT}
    content["model"] = _canonical_model(document["model"])
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _canonical_model(model: dict[str, Any]) -> dict[str, Any]:
    """Merges as pairs: files of older versions hold them as one string with a space."""
    merges = model.get("merges")
    if not merges:
        return model
    return model | {"merges": [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in merges]}
