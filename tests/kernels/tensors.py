"""Tensors of kernel tests: strided columns, outputs that show what was written, and trees as retrieve links."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

POISON = -7
"""Content of outputs before the operator writes them."""


def recorded(name: str) -> Any:
    """The content of a file of recorded cases."""
    return json.loads((Path(__file__).parent / "vectors" / f"{name}.json").read_text())


def poisoned(shape: int | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full((shape,) if isinstance(shape, int) else shape, POISON, dtype=dtype, device=device)


def strided_columns(device: torch.device, dtype: torch.dtype, *columns: list[Any]) -> list[torch.Tensor]:
    """Columns on a device, int ones of `dtype`, each a strided view of a larger tensor."""
    tensors = [torch.tensor(column, device=device) for column in columns]
    tensors = [tensor if tensor.dtype == torch.bool else tensor.to(dtype) for tensor in tensors]
    return [tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in tensors]


def links_of(parents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Retrieve links of trees given by their nodes' parents (the root's is -1)."""
    requests, nodes = len(parents), len(parents[0])
    child = torch.full((requests, nodes), -1)
    sibling = torch.full((requests, nodes), -1)
    for request, tree in enumerate(parents):
        for node in range(nodes - 1, 0, -1):
            sibling[request, node] = child[request, tree[node]]
            child[request, tree[node]] = node
    return torch.arange(requests * nodes).view(requests, nodes), child, sibling


def walk_outputs(requests: int, nodes: int, path: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Poisoned `predicts`, `accept_index` and `accept_token_num`."""
    shapes = ((requests * nodes,), (requests, path), (requests,))
    return tuple(poisoned(shape, device, torch.int32) for shape in shapes)


def first_path(candidates: list[int], parents: list[int], targets: list[int], path_nodes: int) -> list[int]:
    """The nodes that a greedy walk accepts of one well-formed tree, root first."""
    path = [0]
    while len(path) < path_nodes:
        matching = [i for i in range(1, len(parents)) if parents[i] == path[-1] and candidates[i] == targets[path[-1]]]
        if not matching:
            break
        path.append(matching[0])
    return path


def pieces(ends: list[float]) -> list[tuple[float, float]]:
    """(a point inside, length) of each piece of [0, 1) between `ends`."""
    cuts = sorted({0.0, 1.0, *(min(max(end, 0.0), 1.0) for end in ends)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(cuts) if high - low > 1e-7]


_OF_ENTRIES = {"token", "parent", "depth", "acceptance", "value", "ids", "drafters", "stopped", "slot", "expanded"}
_SCRATCH = {"released", "limit", "keys", "ordered"}


def assert_same_columns(mine: Any, theirs: Any, used: torch.Tensor | None = None) -> None:
    """Hold two dataclasses of tensors to the same bits, of a pool's entries those that are in use."""
    for column in fields(mine):
        ours: Any = getattr(mine, column.name, None)
        other: Any = getattr(theirs, column.name, None)
        if isinstance(ours, torch.Tensor) and column.name not in _SCRATCH:
            if used is not None and column.name in _OF_ENTRIES:
                ours, other = ours[used], other.cpu()[used]
            assert torch.equal(ours, other.cpu()), column.name
