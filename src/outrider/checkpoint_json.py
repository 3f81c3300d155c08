"""Reading the JSON files of a checkpoint folder, and which folders are served (torch-free)."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError

SERVED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")

# Keys of config.json by which architectures that are not served show what they have.
_FOREIGN_PARTS = {
    "kv_lora_rank": "multi-head latent attention",
    "n_routed_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "linear_num_value_heads": "linear attention",
    "vision_config": "pictures beside text: a checkpoint of its text model alone may be served",
    "is_encoder_decoder": "an encoder",
}


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, None if there is no such file; CheckpointError where it is no JSON object."""
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return document


def is_eagle_head(folder: Path) -> bool:
    """True if a folder holds an EAGLE head, as its configuration or the names of its tensors say.

    Raises:
        CheckpointError: a file is damaged.
    """
    document = read_json_object(folder / "config.json") or {}
    if any("eagle" in str(name).lower() for name in document.get("architectures") or ()):
        return True
    # Heads of the first layout call themselves Llama, but no Llama has a matrix beside its layers.
    return any(name.removeprefix("model.") == "fc.weight" for name in _tensor_names(folder))


def _tensor_names(folder: Path) -> Iterable[str]:
    index, file = read_json_object(folder / "model.safetensors.index.json"), folder / "model.safetensors"
    if index is not None:
        return index.get("weight_map") or ()
    return read_safetensors_header(file) if file.is_file() else ()


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """Return the entries of a file's tensors, by name; CheckpointError where it is damaged."""
    try:
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            return json.loads(content.read(length) if length < file.stat().st_size else b"")
    except (OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{file}: truncated, or no safetensors file; copy it again") from error


def read_served_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint that can be served, as far as its text tells.

    Raises:
        CheckpointError: the folder is not such a checkpoint, with what to change.
    """
    document = read_json_object(folder / "config.json")
    if document is None:
        raise CheckpointError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint")
    if "auto_map" in document:
        raise CheckpointError(f"{folder}: its config.json asks for code of its own (auto_map); remove auto_map if the "
                              f"architecture is one of {', '.join(SERVED_MODEL_TYPES)}")  # fmt: skip
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: no *.safetensors; other weight files can run code and are not read: "
                              "load the model with transformers and save_pretrained it again")  # fmt: skip
    check_family(document, folder)
    if document.get("use_bidirectional_attention"):
        raise CheckpointError(f"{folder}: bidirectional attention is not served: it is no causal language model")
    return document


def check_family(document: Mapping[str, Any], place: object) -> None:
    """Raise CheckpointError unless the model type of a config.json is served."""
    if document.get("model_type") in SERVED_MODEL_TYPES:
        return
    parts = dict.fromkeys(what for key, what in _FOREIGN_PARTS.items() if document.get(key))
    has = f" (it has {', '.join(parts)})" if parts else ""
    raise CheckpointError(f"{place}: model type {document.get('model_type')!r} is not served{has}; these are: "
                          f"{', '.join(SERVED_MODEL_TYPES)}")  # fmt: skip
