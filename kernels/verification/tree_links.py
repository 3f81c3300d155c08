"""Retrieve links, the first child and the next sibling of every node of a tree: from parents, and checks of them.

    next_token[i]   = smallest k with parent[k] == i, -1 if none
    next_sibling[i] = smallest k > i with parent[k] == parent[i], -1 if none or if parent[i] == -1

parent[i] is -1 for the root (node 0) and for a node whose parent is missing; neither is linked to. What makes parents
differs (`outrider.kernels.build_tree`, `outrider.kernels.tree_mask`), what follows from them does not.

Shapes: bs requests, n nodes of a request with its root, R nodes of a program.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator

import torch

from outrider.kernels.argument_checks import INDEX_DTYPES, check_at_least, check_dtype, check_place, check_tensors
from outrider.kernels.backend import jit, tl

__all__ = ["check_walk", "children_of", "first_marked", "link_views", "links_of_parents", "links_of_rows", "stretch_of"]


def check_walk(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    *,
    rows: int | None = None,
) -> None:
    """Check what an operator that walks down trees [bs, n] writes and the trees themselves.

    `predicts` holds `rows` tokens, bs * n by default.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or an output too small, naming the argument.
    """
    check_tensors(
        candidates=(candidates, ("bs", "n"), INDEX_DTYPES),
        retrive_index=(retrive_index, ("bs", "n"), INDEX_DTYPES),
        retrive_next_token=(retrive_next_token, ("bs", "n"), INDEX_DTYPES),
        retrive_next_sibling=(retrive_next_sibling, ("bs", "n"), INDEX_DTYPES),
        accept_index=(accept_index, ("rows", "S"), INDEX_DTYPES),
        accept_token_num=(accept_token_num, ("size",), INDEX_DTYPES),
        predicts=(predicts, tuple(predicts.shape), INDEX_DTYPES),
    )
    requests = candidates.shape[0]
    check_at_least("predicts size", predicts.numel(), candidates.numel() if rows is None else rows)
    check_at_least("accept_index rows", accept_index.shape[0], requests)
    check_at_least("accept_index columns", accept_index.shape[1], 1)
    check_at_least("accept_token_num size", accept_token_num.shape[0], requests)


def link_views(
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    *,
    shape: tuple[int, int],
    like: torch.Tensor,
    owner: str,
) -> list[torch.Tensor]:
    """Return views [bs, n] of what an operator writes of trees, for writing; each is given so, or larger, or flat.

    Raises:
        ValueError: a tensor that is too small, of no index type or not beside `like`, the argument called `owner`.
    """
    outputs = {
        "positions": positions,
        "retrive_index": retrive_index,
        "retrive_next_token": retrive_next_token,
        "retrive_next_sibling": retrive_next_sibling,
    }
    for name, tensor in outputs.items():
        check_dtype(name, tensor)
        check_place(name, tensor, like.device, owner)
    return [_node_view(name, tensor, *shape) for name, tensor in outputs.items()]


def _node_view(name: str, tensor: torch.Tensor, requests: int, nodes: int) -> torch.Tensor:
    if tensor.dim() == 1:
        check_at_least(f"{name} size", tensor.shape[0], requests * nodes)
        return tensor[: requests * nodes].view(requests, nodes)
    if tensor.dim() != 2:
        shapes = f"[{requests}, {nodes}] or [{requests * nodes}]"
        raise ValueError(f"{name}: shape {list(tensor.shape)} given, {shapes} needed")
    check_at_least(f"{name} rows", tensor.shape[0], requests)
    check_at_least(f"{name} columns", tensor.shape[1], nodes)
    return tensor[:requests, :nodes]


def stretch_of(nodes: int) -> int:
    """Return the nodes of one iteration of a kernel's loop over all but the root; less than n, except for n = 1."""
    return next(stretch for stretch in (16, 4, 1) if stretch < max(nodes, 2))


def links_of_parents(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(next_token, next_sibling)`, both [bs, n] int64, of `parents` [bs, n] int64; in plain torch."""
    nodes = parents.shape[1]
    number = torch.arange(nodes, device=parents.device)
    is_child = parents[:, None, :] == number[:, None]
    related = (parents[:, None, :] == parents[:, :, None]) & (parents[:, :, None] >= 0)
    return first_marked(is_child), first_marked(related & (number[None, :] > number[:, None]))


def children_of(first: int, siblings: list[int]) -> Iterator[int]:
    """A node's children in sibling order, at most n: its first child, then by every node's next sibling."""
    for _ in siblings:
        if not 0 <= first < len(siblings):
            return
        yield first
        first = siblings[first]


def first_marked(marked: torch.Tensor) -> torch.Tensor:
    """[..., n] bool -> [...] int64: the first marked column of each row, -1 where there is none; in plain torch."""
    return torch.where(marked.any(-1), marked.to(torch.uint8).argmax(-1), -1)


@jit
def links_of_rows(
    parents_ptr,  # [n] int32, of one request
    rows,  # [R] int32, nodes
    parent,  # [R] int32, their parents
    nodes,
    STRETCH: tl.constexpr,  # what `stretch_of` says
):
    """`(next_token, next_sibling)`, both [R] int32, of the nodes `rows`."""
    child = tl.full(rows.shape, -1, tl.int32)
    sibling = tl.full(rows.shape, -1, tl.int32)
    # From the last node to the first, so that the smallest stays; the root is nobody's child. The last stretch begins
    # at node 1 and may repeat nodes, which changes nothing: without conditions the loads of a stretch go out at once.
    for done in range(0, nodes - 1, STRETCH):
        first = tl.maximum(nodes - done - STRETCH, 1)
        stretch_ptr = parents_ptr + first
        for offset in tl.static_range(STRETCH):
            above = tl.load(stretch_ptr + (STRETCH - 1 - offset))
            node = first + (STRETCH - 1 - offset)
            child = tl.where(above == rows, node, child)
            sibling = tl.where((above == parent) & (node > rows), node, sibling)
    return child, tl.where(parent >= 0, sibling, -1)
