"""A .gguf file as an ordinary checkpoint: dequantised once, by transformers, into a cache by the file's hash.

`python -m outrider.deploy.gguf_checkpoint FILE FOLDER` does it, so that who asks for it needs no PyTorch.
"""

import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from outrider.errors import CheckpointError, MissingPackage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# llama is also what Mistral's files say.
_SERVED = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_ARCHITECTURE, _STRING = "general.architecture", 8
# Bytes of a value, by the number of its type; strings and lists have no fixed size.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_TEXT = 1 << 16


def check_architecture(file: Path) -> None:
    """Check that the first bytes of a file name an architecture that is served.

    Raises:
        CheckpointError: they do not.
    """
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise CheckpointError(f"{file}: no GGUF file")
        try:
            found = _read_architecture(content)
        except (struct.error, ValueError) as error:
            raise CheckpointError(f"{file}: its header cannot be read; copy it again") from error
    if found not in _SERVED:
        raise CheckpointError(f"{file}: model type {found!r} is not served; these are: {', '.join(_SERVED)}")


def folder_of(file: Path) -> Path:
    """Return where a file's checkpoint is, or will be: the same for the same content."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "outrider" / "gguf" / digest


def convert(file: Path) -> Path:
    """Make a file's checkpoint where there is none yet; return its folder.

    Raises:
        MissingPackage: what reads these files is not installed.
        CheckpointError: transformers cannot read this one.
    """
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingPackage(f"{file}: reading it takes {' and '.join(absent)}: pip install 'outrider[gguf]'")
    folder = folder_of(file)
    if folder.is_dir():
        return folder
    # Whole or not there, whoever else converts it meanwhile.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        command = [sys.executable, "-m", "outrider.deploy.gguf_checkpoint", str(file.resolve()), str(partial)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckpointError(f"{file}: transformers cannot read it: {last}")
        if not folder.is_dir():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
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


def load(file: Path) -> "PreTrainedModel":
    """Return the model of a file, dequantised to float32."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    # Versions that have it keep weights in their blocks unless they are told otherwise.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)


def main() -> None:
    """Convert the file that the command line names into the folder that it names."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = load(file)
    config = model.config
    # What is left of the file's format would keep transformers from saving the model.
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
