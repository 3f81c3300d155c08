"""Memory that a checkpoint's weights and KV will take, from the headers of its files (without PyTorch)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from outrider.checkpoint_json import read_safetensors_header
from outrider.errors import CheckpointError

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """The memory that a checkpoint asks for."""

    weights: int  # bytes of all of them
    kv: int  # bytes of one token's keys and values
    longest: int  # most tokens of a session
    vocab_size: int  # entries of the vocabulary

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], *, number_bytes: int, kv_number_bytes: int) -> Self:
        """Read them.

        Args:
            number_bytes: of a weight once it is loaded; 1 rounds matrices to 8 bits.
            kv_number_bytes: of a key's or a value's number.

        Raises:
            CheckpointError: a file is damaged, or config.json lacks an entry.
        """
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            kv = 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim * kv_number_bytes
            longest, vocab_size = int(config["max_position_embeddings"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}/config.json: {error} is missing or no number") from error
        weights = sum(_loaded_bytes(file, number_bytes) for file in folder.glob("*.safetensors"))
        return cls(weights=weights, kv=kv, longest=longest, vocab_size=vocab_size)


def _loaded_bytes(file: Path, number_bytes: int) -> int:
    header = read_safetensors_header(file)
    try:
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        return sum(
            math.prod(entry["shape"]) * (1 if entry["dtype"] in _EIGHT_BITS else number_bytes) for entry in tensors
        )
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{file}: truncated, or no safetensors file; copy it again") from error
