"""Large Llama shapes whose random weights every rank makes in its own GPU's memory, part by part."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.function_source import FunctionSource

from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import tensor_shapes, weight_bytes
from outrider.models.widen import SHAPES

_VOCAB = 128_256
_POSITIONS = 8192
_STD = 0.02


@dataclass(frozen=True)
class RandomWeights:
    """The tensor of a name: the same numbers on every rank, wherever it runs.

    Args:
        shapes: of all tensors, by name.
    """

    shapes: dict[str, tuple[int, ...]]

    def __call__(self, name: str) -> torch.Tensor:
        """Return random weights on the process's current GPU."""
        return random_weight(name, self.shapes[name], torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True)
class BenchModel:
    """A shape.

    Attributes:
        name: in tables.
        folder: its config.json.
        spec: its architecture.
    """

    name: str
    folder: Path
    spec: DecoderSpec

    @classmethod
    def of(cls, shape: str, folder: Path, *, layers: int | None = None) -> BenchModel:
        """A shape of `outrider widen`, with fewer layers where asked for."""
        sizes = SHAPES[shape] if layers is None else replace(SHAPES[shape], layers=layers)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "intermediate_size": sizes.intermediate,
            "vocab_size": _VOCAB,
            "max_position_embeddings": _POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        # A folder without weights is no checkpoint; these are made, and never read.
        (folder / "model.safetensors").touch()
        return cls(shape, folder, DecoderSpec.of(config, folder))

    def source(self) -> FunctionSource:
        """Return the source of the weights, which can be pickled."""
        return FunctionSource(RandomWeights(tensor_shapes(self.spec)), f"random weights of the {self.name} shape")

    def read_bytes(self, dtype: torch.dtype, ranks: int) -> int:
        """Bytes of weights that a step reads on each of so many ranks: all but the embedding."""
        embedding = self.spec.vocab_size * self.spec.hidden_size * dtype.itemsize
        return weight_bytes(self.spec, dtype, world_size=ranks) - embedding


def random_weight(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The same bfloat16 numbers for the same name on the same kind of device; norms are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=_STD, generator=generator)
