"""Models to measure: a checkpoint folder, or a large shape whose weights are made where they are needed.

A shape needs no checkpoint on disk: a folder with the embedded target's tokenizer and a config.json of the shape, and a
function from names to tensors. Random weights cost what real ones cost and decide nothing in particular; widened ones
compute what the embedded target computes (docs/embedded-pair.md), so their choices are a language model's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.engine.weight_source import FunctionSource
from outrider.models import embedded_target_path
from outrider.models.widen import SHAPES, load_small
from outrider.models.widened_weights import WidenedLlama

_STD = 0.02
# Far beyond the longest context measured; a rotary embedding is a function of the position.
MAX_POSITIONS = 131_072


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What decides how much a step has to read and to multiply.

    Attributes:
        hidden: N.
        layers: L.
        heads: query heads H.
        kv_heads: key and value heads Hkv.
        head_dim: D.
        intermediate: F.
        vocab: V.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSizes:
        """The sizes that a config.json states."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Of all layers' products; norms are left out."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.intermediate * self.hidden)

    @property
    def head_weights(self) -> int:
        """Of the output layer."""
        return self.vocab * self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Numbers of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchModel:
    """A model as the benchmarks load it.

    Attributes:
        name: in tables.
        folder: its config.json and tokenizer.
        source: makes the weights; None where they lie in the folder.
        sizes: of the architecture.
    """

    name: str
    folder: Path
    source: FunctionSource | None
    sizes: ModelSizes


def folder_model(folder: Path) -> BenchModel:
    """A checkpoint on disk."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return BenchModel(name=folder.name, folder=folder, source=None, sizes=ModelSizes.of(config))


@contextmanager
def shape_model(shape: str, device: torch.device, *, widened: bool) -> Iterator[BenchModel]:
    """A shape of `outrider widen` with weights in memory: random ones, or those that widening makes."""
    small = load_small(embedded_target_path())
    large = WidenedLlama(
        *small,
        SHAPES[shape],
        dtype=torch.bfloat16,
        fill_seed=0 if widened else None,
        max_position_embeddings=MAX_POSITIONS,
    )
    shapes = large.tensor_shapes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(large.config()), encoding="utf-8")
        # Checkpoint folders are known by it; the weights come from the source.
        (folder / "model.safetensors").touch()
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(embedded_target_path() / file, folder / file)
        source = FunctionSource(
            (lambda tensor: large.tensor(tensor).to(device))
            if widened
            else (lambda tensor: random_weight(tensor, shapes[tensor], device)),
            f"{'widened' if widened else 'random'} weights of the {shape} shape",
        )
        yield BenchModel(name=shape, folder=folder, source=source, sizes=ModelSizes.of(large.config()))


def random_weight(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The same bfloat16 numbers for the same name on the same kind of device; norms are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=_STD, generator=generator)
