"""From a `.gguf` file to an ordinary checkpoint: weights dequantised, tokenizer and chat template beside them.

A file is read once: what comes of it stays in a cache folder, under the file's own hash.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError, MissingPackage

_NEEDED = ("gguf", "accelerate")
_CHUNK_BYTES = 1 << 22


def cache_folder() -> Path:
    """Return where checkpoints of `.gguf` files are kept: $OUTRIDER_CACHE, else the user's cache folder."""
    own = os.environ.get("OUTRIDER_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


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
    try:
        digest = _digest(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    folder = (cache or cache_folder()) / "gguf" / f"{file.stem}-{digest[:16]}"
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


def _digest(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def _write(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {"gguf_file": file.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
    except Exception as error:  # what the library raises for a broken file is of any kind
        raise CheckpointError(f"{file}: no model can be read from it: {' '.join(str(error).split())[:300]}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
