"""Models as users name them: a checkpoint folder, a .gguf file, or a name on the Hugging Face Hub (without PyTorch)."""

import difflib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.checkpoint_json import check_family, read_json_object
from outrider.errors import CheckpointError, OutriderError
from outrider.models.gguf import check_architecture, folder_of_gguf

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# What says how a model is built and read; and its weights, of which no other kind is loaded.
_DESCRIPTIONS = ("*.json", "*.jinja")
_WEIGHTS = ("*.safetensors",)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Location of a model."""

    given: str
    name: str  # that clients know it by
    folder: Path | None  # of its checkpoint, which may lack the weights; None while a .gguf file is not converted
    missing: str = ""  # what has to be done before it can be served; empty where nothing has


def find_model(given: str) -> ModelFiles:
    """Look where a model is; of one on the Hub that is not in the cache, the small files are loaded.

    Raises:
        CheckpointError: there is no such file or folder, or its family is not served.
        OutriderError: the Hub does not have it, or cannot be reached.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        return ModelFiles(given=given, name=path.resolve().name, folder=path.resolve())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(_no_such(path, "file"))
        check_architecture(path)
        folder = folder_of_gguf(path)
        done = folder.is_dir()
        missing = "" if done else f"convert {path.name} into a checkpoint of float32 in {folder}"
        return ModelFiles(given=given, name=path.stem, folder=folder if done else None, missing=missing)
    if path.exists():
        raise CheckpointError(f"{path}: neither a checkpoint folder nor a .gguf file")
    if not _HUB_NAME.fullmatch(given):
        raise CheckpointError(_no_such(path, "folder"))
    folder = _snapshot(given, _DESCRIPTIONS)
    check_family(read_json_object(folder / "config.json") or {}, given)
    missing = "" if _has_weights(folder) else f"load the weights of {given} from the Hugging Face Hub"
    return ModelFiles(given=given, name=given, folder=folder, missing=missing)


def complete(model: ModelFiles) -> ModelFiles:
    """Do what is missing, which may take minutes.

    Raises:
        CheckpointError: a file cannot be read as a model, or an extra is needed for it.
        OutriderError: the Hub does not have it, or cannot be reached.
    """
    if not model.missing:
        return model
    if model.folder is None:
        command = [sys.executable, "-m", "outrider.models.gguf", str(Path(model.given).expanduser())]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise CheckpointError((done.stderr.strip().splitlines() or [f"{model.given}: {done.returncode}"])[-1])
    else:
        _snapshot(model.given, (*_DESCRIPTIONS, *_WEIGHTS))
    return find_model(model.given)


def _snapshot(name: str, patterns: tuple[str, ...]) -> Path:
    """The folder of a model of the Hub, from the cache where it has what is asked for."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=True))
        if (folder / "config.json").is_file() and (_WEIGHTS[0] not in patterns or _has_weights(folder)):
            return folder
    except (LocalEntryNotFoundError, ValueError, OSError):
        pass  # it is not in the cache
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of the library, of what it sends requests with, and of the system
        raise OutriderError(
            f"{name}: no folder, no file and no model in the cache is called so, and from the Hugging Face Hub it "
            f"cannot be loaded: {error}"
        ) from error


def _has_weights(folder: Path) -> bool:
    if (folder / _SINGLE).is_file():
        return True
    shards = (read_json_object(folder / _INDEX) or {}).get("weight_map", {})
    return bool(shards) and all((folder / str(shard)).is_file() for shard in set(shards.values()))


def _no_such(path: Path, kind: str) -> str:
    """With the name beside it that is most like it."""
    beside = [own.name for own in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"; did you mean {path.parent / close[0]}?" if close else ""
    return f"{path}: no such {kind}{hint}"
