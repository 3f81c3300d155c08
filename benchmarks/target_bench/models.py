"""Models to measure: a checkpoint folder, or a large shape whose weights are made where they are needed.

A shape needs no checkpoint on disk: a folder with the embedded target's tokenizer and a config.json of the shape, and a
function from names to tensors. Widened weights compute what the embedded target computes (docs/embedded-pair.md), so
their choices are a language model's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.weight_source import FunctionSource
from outrider.models import embedded_target_path
from outrider.models.widen import SHAPES, load_small
from outrider.models.widened_weights import WidenedLlama

# Far beyond the longest context measured; a rotary embedding is a function of the position.
MAX_POSITIONS = 131_072


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchModel:
    """A model as the benchmarks load it.

    Attributes:
        name: in tables.
        folder: its config.json and tokenizer.
        source: makes the weights; None where they lie in the folder.
        vocab_size: tokens that it knows.
    """

    name: str
    folder: Path
    source: FunctionSource | None
    vocab_size: int


def folder_model(folder: Path) -> BenchModel:
    """A checkpoint on disk."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return BenchModel(name=folder.name, folder=folder, source=None, vocab_size=config["vocab_size"])


@contextmanager
def shape_model(shape: str, device: torch.device) -> Iterator[BenchModel]:
    """A shape of `outrider widen`, with the widened weights in memory."""
    large = WidenedLlama(
        *load_small(embedded_target_path()),
        SHAPES[shape],
        dtype=torch.bfloat16,
        fill_seed=0,
        max_position_embeddings=MAX_POSITIONS,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(large.config()), encoding="utf-8")
        # Checkpoint folders are known by it; the weights come from the source.
        (folder / "model.safetensors").touch()
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(embedded_target_path() / file, folder / file)
        source = FunctionSource(lambda tensor: large.tensor(tensor).to(device), f"widened weights of the {shape} shape")
        yield BenchModel(name=shape, folder=folder, source=source, vocab_size=large.config()["vocab_size"])
