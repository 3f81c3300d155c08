"""Retrieve links from parents: the first child and the next sibling of every node of a tree.

    next_token[i]   = smallest k with parent[k] == i, -1 if none
    next_sibling[i] = smallest k > i with parent[k] == parent[i], -1 if none or if parent[i] == -1

parent[i] is -1 for the root (node 0) and for a node whose parent is missing; neither is linked to. What makes parents
differs (`outrider.kernels.build_tree`, `outrider.kernels.tree_mask`), what follows from them does not.

Shapes: bs requests, n nodes of a request with its root, R nodes of a program.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl

__all__ = ["first_marked", "links_of_parents", "links_of_rows", "stretch_of"]


def stretch_of(nodes: int) -> int:
    """How many nodes a kernel's loop over all nodes but the root takes at a time; less than n, but for n = 1."""
    return next(stretch for stretch in (16, 4, 1) if stretch < max(nodes, 2))


def links_of_parents(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(next_token, next_sibling)`, both [bs, n] int64, of `parents` [bs, n] int64; in plain torch."""
    nodes = parents.shape[1]
    number = torch.arange(nodes, device=parents.device)
    is_child = parents[:, None, :] == number[:, None]
    related = (parents[:, None, :] == parents[:, :, None]) & (parents[:, :, None] >= 0)
    return first_marked(is_child), first_marked(related & (number[None, :] > number[:, None]))


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
