"""What an EAGLE head takes on a target's device, known before it is loaded: its target's KV leaves room for it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.eagle_spec import read_eagle_spec
from outrider.engine.eagle_weights import open_head


@dataclass(frozen=True, kw_only=True)
class HeadMemory:
    """Bytes of a head.

    Attributes:
        weights: of what is not the target's.
        per_slot: keys and values of a token.
    """

    weights: int
    per_slot: int


def head_memory(folder: Path, *, target_layers: int, target_hidden: int, dtype: torch.dtype) -> HeadMemory:
    """What the head in a folder will take.

    Args:
        folder: with config.json and safetensors.
        target_layers: of the model that it drafts for.
        target_hidden: its hidden size.
        dtype: of the head's weights and KV.

    Raises:
        CheckpointError: the folder has no head that can be served.
    """
    stored = open_head(folder).names
    spec = read_eagle_spec(folder, target_layers=target_layers, stored=stored)
    layer, hidden = spec.layer, spec.hidden_size
    query, key = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    third = spec.layout == "eagle3"
    width = 2 * hidden if third else hidden
    entering = len(spec.taps) * target_hidden if third else 2 * hidden
    numbers = hidden * (entering + query + 3 * layer.intermediate_size) + (query + 2 * key) * width
    if hidden != target_hidden:
        numbers += layer.vocab_size * hidden
    if third and any(name.endswith("lm_head.weight") for name in stored):
        numbers += spec.draft_vocab_size * hidden
    return HeadMemory(weights=numbers * dtype.itemsize, per_slot=2 * key * dtype.itemsize)
