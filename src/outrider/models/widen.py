"""Writes a small checkpoint as one of a larger shape that computes the same: real acceptance at real cost.

The folder is an ordinary Hugging Face Llama checkpoint in shards. Memory holds one shard at a time, and the folder
appears under its name only when all is written and checked.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.engine.weight_source import SafetensorsSource
from outrider.models.widened_eagle import WidenedEagle
from outrider.models.widened_weights import LlamaShape, WidenedLlama

# With heads of 128 channels.
SHAPES = {
    "160m": LlamaShape(hidden=768, layers=12, heads=6, kv_heads=6, intermediate=3072),
    "1b": LlamaShape(hidden=2048, layers=16, heads=16, kv_heads=4, intermediate=8192),
    # As many weights as 1b in more layers, for small models that are deep.
    "1b-deep": LlamaShape(hidden=2048, layers=30, heads=16, kv_heads=4, intermediate=3584),
    "8b": LlamaShape(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336),
    "70b": LlamaShape(hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672),
}

_HEAD_DIM = 128


def shape_with_heads_of(name: str, head_dim: int) -> LlamaShape:
    """Return a shape of SHAPES with so many channels a head, and as many heads as leave all matrices their sizes.

    Raises:
        ValueError: heads of this size do not divide the matrices.
    """
    shape = SHAPES[name]
    heads, rest = divmod(shape.heads * _HEAD_DIM, head_dim)
    kv_heads, kv_rest = divmod(shape.kv_heads * _HEAD_DIM, head_dim)
    if rest or kv_rest:
        raise ValueError(f"head_dim: {head_dim} given, a divisor of {shape.kv_heads * _HEAD_DIM} needed")
    return replace(shape, heads=heads, kv_heads=kv_heads)


INDEX_FILE = "model.safetensors.index.json"
# Those of them that the small checkpoint has.
_COPIED_FILES = ("generation_config.json", "tokenizer.json", "chat_template.jinja")
_TOKENIZER_CONFIG = "tokenizer_config.json"
# config.json, index and the headers of the shards are far below this.
_SMALL_FILES_BYTES = 4 << 20


def load_small(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and all tensors of a checkpoint that fits into memory."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "num_attention_heads" in config:
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    source = SafetensorsSource(folder)
    return config, {name: source.tensor(name) for name in sorted(source.names)}


@dataclass(frozen=True)
class CheckpointPlan:
    """The files that will be written."""

    shards: tuple[tuple[str, ...], ...]  # names of the tensors of each file
    weight_bytes: int
    disk_bytes: int  # the whole folder needs at most


WidenedModel = WidenedLlama | WidenedEagle
"""Both give the tensors of a checkpoint, made one at a time."""


def plan_checkpoint(model: WidenedModel, source: Path, *, max_shard_bytes: int) -> CheckpointPlan:
    """Tensors in their order, so many to a shard as `max_shard_bytes` allows, at least one."""
    shards: list[list[str]] = []
    total, in_shard = 0, max_shard_bytes + 1
    for name, size in model.tensor_shapes().items():
        tensor_bytes = torch.Size(size).numel() * model.dtype.itemsize
        if in_shard + tensor_bytes > max_shard_bytes:
            shards.append([])
            in_shard = 0
        shards[-1].append(name)
        in_shard += tensor_bytes
        total += tensor_bytes
    copied = sum(path.stat().st_size for path in _copied(source))
    return CheckpointPlan(tuple(map(tuple, shards)), total, total + copied + _SMALL_FILES_BYTES)


def check_destination(folder: Path, plan: CheckpointPlan) -> None:
    """Check that a checkpoint can be written to `folder`, before anything is.

    Raises:
        FileExistsError: something of this name is there already.
        OSError: the folder around it is missing, or its disk has less room than the checkpoint needs.
    """
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} exists already: give a new folder, or remove it")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent}: no such folder")
    free = shutil.disk_usage(folder.parent).free
    if free < plan.disk_bytes:
        raise OSError(f"{folder.parent}: the checkpoint needs {_gb(plan.disk_bytes)}, {_gb(free)} are free")


def write_checkpoint(
    model: WidenedModel,
    source: Path,
    folder: Path,
    plan: CheckpointPlan,
    *,
    before_publishing: Callable[[Path], None],
    on_written: Callable[[int], None],
) -> None:
    """Write the checkpoint next to `folder` under another name and rename it when it is complete.

    Args:
        source: checkpoint folder of the small model; its tokenizer, chat template and generation settings are kept.
        folder: must not exist.
        plan: of `plan_checkpoint`.
        before_publishing: called with the complete folder under its temporary name; what it raises stops the renaming.
        on_written: called after each shard with its bytes.

    Raises:
        OSError: as `check_destination`, or the disk failed; nothing is left behind.
    """
    check_destination(folder, plan)
    with _temporary_neighbour(folder) as partial:
        _write_json(partial / "config.json", model.config())
        files = {}
        for number, names in enumerate(plan.shards, start=1):
            file = f"model-{number:05}-of-{len(plan.shards):05}.safetensors"
            on_written(_write_shard(model, names, partial / file))
            # safetensors keeps its files to the user; whoever may read the configuration may read the weights.
            shutil.copymode(partial / "config.json", partial / file)
            files |= dict.fromkeys(names, file)
        _write_json(partial / INDEX_FILE, {"metadata": {"total_size": plan.weight_bytes}, "weight_map": files})
        for path in _copied(source):
            shutil.copyfile(path, partial / path.name)
        if (source / _TOKENIZER_CONFIG).is_file():
            tokenizer = json.loads((source / _TOKENIZER_CONFIG).read_text(encoding="utf-8"))
            _write_json(partial / _TOKENIZER_CONFIG, tokenizer | {"model_max_length": model.max_positions})
        before_publishing(partial)
        check_destination(folder, CheckpointPlan((), 0, 0))
        partial.rename(folder)


def _copied(source: Path) -> list[Path]:
    return [path for name in _COPIED_FILES if (path := source / name).is_file()]


def _write_shard(model: WidenedModel, names: tuple[str, ...], path: Path) -> int:
    tensors = {name: model.tensor(name) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def _temporary_neighbour(folder: Path) -> Iterator[Path]:
    """A new folder on the same disk, removed with all in it unless it was renamed."""
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
