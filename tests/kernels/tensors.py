"""Tensors of kernel tests: strided columns, outputs that show what was written, and trees as retrieve links."""

from __future__ import annotations

import json
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
