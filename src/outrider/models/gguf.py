"""From a `.gguf` file to an ordinary checkpoint: weights dequantised, tokenizer and chat template beside them.

A file is read once: what comes of it stays in a cache folder, under the file's own hash. Who needs the folder alone
needs no PyTorch: `python -m outrider.models.gguf FILE` makes it.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import CheckpointError, MissingPackage, OutriderError

_NEEDED = ("gguf", "accelerate")
# llama is also what Mistral's files say.
_SERVED = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_ARCHITECTURE, _STRING = "general.architecture", 8
# Bytes of a value, by the number of its type; strings and lists have no fixed size.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_TEXT = 1 << 16
# Of what is written: another number makes folders anew.
_FORMAT = 2
# What a tokenizer's special tokens are called: by transformers, and in a file.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Of GPT-2's tokenizer and those like it: any text is bytes, and every byte has a token.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL_MODEL = {
    "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
    "byte_fallback": False,
}  # fmt: skip


def cache_folder() -> Path:
    """Return where checkpoints of `.gguf` files are kept: $OUTRIDER_CACHE, else the user's cache folder."""
    own = os.environ.get("OUTRIDER_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def check_architecture(file: Path) -> None:
    """Raise CheckpointError unless the first bytes of a file name an architecture that is served."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise CheckpointError(f"{file}: no GGUF file")
        try:
            found = _read_architecture(content)
        except (struct.error, ValueError) as error:
            raise CheckpointError(f"{file}: its header cannot be read; copy it again") from error
    if found not in _SERVED:
        raise CheckpointError(f"{file}: model type {found!r} is not served; these are: {', '.join(_SERVED)}")


def folder_of_gguf(file: Path, cache: Path | None = None) -> Path:
    """Return where the checkpoint of a file is, or will be; CheckpointError where the file cannot be read."""
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return (cache or cache_folder()) / "gguf" / f"{file.stem}-{digest[:16]}-{_FORMAT}"


def checkpoint_of_gguf(file: Path, cache: Path | None = None) -> Path:
    """Return the folder of a checkpoint with the file's model; it is made where there is none yet.

    Weights are stored as float32, exactly what the file's blocks stand for.

    Args:
        file: with one model of a family that is served.
        cache: default `cache_folder()`.

    Raises:
        MissingPackage: gguf or accelerate is not installed.
        CheckpointError: the file cannot be read, or its model is none that transformers knows.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise MissingPackage(f"{file}: reading it needs {' and '.join(missing)}: pip install 'outrider[gguf]'")
    folder = folder_of_gguf(file, cache)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    unfinished.chmod(0o755)
    try:
        _write(file, unfinished)
        # Whoever was quicker has written the same.
        if not folder.exists():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _read_architecture(content: BinaryIO) -> str | None:
    """The value of its key, if it stands before the first list."""
    _, _, entries = struct.unpack("<IQQ", content.read(20))
    for _ in range(entries):
        key = _read_text(content)
        (kind,) = struct.unpack("<I", content.read(4))
        if kind == _STRING:
            value = _read_text(content)
            if key == _ARCHITECTURE:
                return value
        elif kind in _SIZES:
            content.read(_SIZES[kind])
        else:
            break
    return None


def _read_text(content: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", content.read(8))
    if length > _MOST_TEXT:
        raise ValueError(f"a text of {length} bytes")
    return content.read(length).decode("utf-8")


def _write(file: Path, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {"gguf_file": file.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            **place,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            use_safetensors=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **place, trust_remote_code=False)
        fields = gguf.GGUFReader(file).fields
        _take_special_tokens(tokenizer, fields)
    except Exception as error:  # what the library raises for a broken file is of any kind
        raise CheckpointError(f"{file}: no model can be read from it: {' '.join(str(error).split())[:300]}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind = fields.get("tokenizer.ggml.model")
    if kind is not None and kind.contents() == "gpt2":
        describe_byte_level(folder / "tokenizer.json")


def describe_byte_level(file: Path) -> None:
    """Write a tokenizer like GPT-2's, such as SmolLM2's, as its kind is published, whatever has converted it.

    Some versions of transformers give it SentencePiece's ways with bytes and spaces, and a draft and a target of one
    model then seem to have different tokenizers. One with ways of its own to split texts stays as it is.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    if (document["pre_tokenizer"] or {}).get("type") != "ByteLevel":
        return
    if document["normalizer"] == {"type": "Sequence", "normalizers": []}:
        document["normalizer"] = None
    document |= {"pre_tokenizer": _BYTE_LEVEL | {"add_prefix_space": False}, "decoder": _BYTE_LEVEL}
    document["model"] |= _BYTE_LEVEL_MODEL
    file.write_text(json.dumps(document, ensure_ascii=False, indent=2), encoding="utf-8")


def _take_special_tokens(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Give the tokenizer the special tokens that the file names.

    Some versions of transformers put the tokenizer class's own in their place: with 5.17 SmolLM2's turns would end with
    the token that begins them.
    """
    for name, in_file in _SPECIAL.items():
        field = fields.get(f"tokenizer.ggml.{in_file}_token_id")
        if field is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(field.contents())))
            # Those versions would also write the number of the one before.
            tokenizer.init_kwargs.pop(f"{name}_id", None)


if __name__ == "__main__":
    try:
        checkpoint_of_gguf(Path(sys.argv[1]))
    except (OutriderError, OSError) as error:
        sys.exit(str(error))
