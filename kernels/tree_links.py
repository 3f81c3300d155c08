"""Retrieve links from parents: the first child and the next sibling of every node of a tree.

    next_token[i]   = smallest k with parent[k] == i, -1 if none
    next_sibling[i] = smallest k > i with parent[k] == parent[i], -1 if none or if parent[i] == -1

parent[i] is -1 for the root (node 0) and for a node whose parent is missing; neither is linked to. What makes parents
differs (`outrider.kernels.build_tree`, `outrider.kernels.tree_mask`), what follows from them does not.

Shapes: bs requests, n nodes of a request with its root; inside kernels N is n rounded up, R the rows of a program.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl

__all__ = ["first_children", "first_marked", "links_of_parents", "next_siblings"]


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
def first_children(
    parent,  # [N] int32
    rows,  # [R] int32
    N: tl.constexpr,
):
    """[R] int32: next_token of the nodes `rows`."""
    columns = tl.arange(0, N)
    first = tl.min(tl.where(parent[None, :] == rows[:, None], columns[None, :], N), axis=1)
    return tl.where(first < N, first, -1)


@jit
def next_siblings(
    parent,  # [N] int32
    rows,  # [R] int32
    row_parent,  # [R] int32, the parents of the nodes `rows`
    N: tl.constexpr,
):
    """[R] int32: next_sibling of the nodes `rows`."""
    columns = tl.arange(0, N)
    later = (parent[None, :] == row_parent[:, None]) & (columns[None, :] > rows[:, None])
    first = tl.min(tl.where(later & (row_parent >= 0)[:, None], columns[None, :], N), axis=1)
    return tl.where(first < N, first, -1)
