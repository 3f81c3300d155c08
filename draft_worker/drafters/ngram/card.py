"""Model info of a worker that has only the n-gram drafter, from a checkpoint folder without weights (torch-free)."""

from pathlib import Path

from outrider.checkpoint_json import read_json_object
from outrider.errors import CheckpointError
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2


def ngram_model_info(folder: Path, *, max_model_len: int | None = None) -> common_pb2.ModelInfo:
    """Return the info with which the worker registers: the folder's tokenizer, and no dtype.

    Args:
        folder: has tokenizer.json and config.json.
        max_model_len: most tokens of a session; default the limit in config.json.

    Raises:
        CheckpointError: a file or an entry is missing, with what to change.
    """
    config = read_json_object(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint")
    try:
        vocab_size, longest = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json: vocab_size and max_position_embeddings are needed") from error
    return common_pb2.ModelInfo(
        name=f"ngram-{folder.resolve().name}",
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash(folder),
        dtype="none",
        max_model_len=max_model_len or longest,
    )
