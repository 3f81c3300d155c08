"""What a checkpoint folder says of its tokens, for a worker that loads no model (torch-free)."""

import json
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2


def ngram_model_info(folder: Path, *, max_model_len: int | None = None) -> common_pb2.ModelInfo:
    """The n-gram source as it introduces itself: the folder's tokenizer, and no numbers of any type.

    Args:
        folder: with tokenizer.json and config.json; weights are not looked at.
        max_model_len: most tokens of a session, of any length here; default what config.json says.

    Raises:
        CheckpointError: a file is missing or lacks an entry that is needed, with what to change.
    """
    path = folder / "config.json"
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    try:
        vocab_size, longest = int(document["vocab_size"]), int(document["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: vocab_size and max_position_embeddings are needed") from error
    return common_pb2.ModelInfo(
        name=f"ngram-{folder.resolve().name}",
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash(folder),
        dtype="none",
        max_model_len=max_model_len or longest,
    )
