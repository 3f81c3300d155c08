"""Checkpoint folders: which are served, and what they say of themselves (no code of the checkpoint's own is run)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoint_json import SERVED_MODEL_TYPES, read_json_object, read_served_config
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_spec import SERVED_FAMILIES, DecoderSpec
from outrider.engine.quantization import check_quantization
from outrider.errors import CheckpointError
from outrider.tokenizer_hash import tokenizer_hash

logger = logging.getLogger(__name__)

# Of a config that names none, as transformers has it.
_EOS_TOKEN_IDS = {"llama": 2, "mistral": 2, "gemma": 1, "gemma2": 1, "gemma3_text": 1}

assert SERVED_FAMILIES.keys() == set(SERVED_MODEL_TYPES)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A model as it introduces itself; `ModelInfo` in common.proto says what each means.

    `tokenizer_hash` is empty where the checkpoint has no tokenizer.json.
    """

    name: str
    vocab_size: int
    tokenizer_hash: str
    dtype: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def read_checkpoint(config: EngineConfig) -> tuple[DecoderSpec, ModelCard]:
    """The architecture and the card, without the weights.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be served, with what to change.
    """
    folder = Path(config.model_path)
    document = read_served_config(folder)
    if document.get("quantization_config") is not None:
        check_quantization(folder, document["quantization_config"])
    spec = DecoderSpec.of(document, folder)
    longest = spec.max_positions
    if config.max_model_len is not None and config.max_model_len > longest:
        raise CheckpointError(f"{folder}: max_model_len {config.max_model_len} given, the model ends at {longest}")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if not has_tokenizer:
        logger.warning("%s has no tokenizer.json: its tokenizer cannot be compared with others", folder)
    card = ModelCard(
        name=folder.resolve().name,
        vocab_size=spec.vocab_size,
        tokenizer_hash=tokenizer_hash(folder) if has_tokenizer else "",
        dtype=config.dtype_name,
        max_model_len=config.max_model_len or longest,
        eos_token_ids=_eos_token_ids(folder, document),
    )
    return spec, card


def _eos_token_ids(folder: Path, document: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json."""
    generation = read_json_object(folder / "generation_config.json") or {}
    given = generation.get("eos_token_id")
    if given is None:
        given = document.get("eos_token_id", _EOS_TOKEN_IDS.get(document["model_type"]))
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (int(given),)
