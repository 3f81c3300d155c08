"""Triton side of `outrider.kernels.build_tree`, whose definitions hold here.

    _tree_kernel     one program a request and R of its nodes: links, positions and mask rows of these nodes. It needs
                     the parents of all nodes; up to 128 nodes it finds them itself, all pairs at once in registers,
                     and the walks along the ancestors never leave the registers (tl.gather).
    _parents_kernel  beyond 128 nodes: the parents, found once by a launch of its own.

Shapes: bs requests, n nodes of a request with its root, N is n rounded up to a power of two, R the rows of a program.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, N806, PLR0917

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.tree_links import first_children, next_siblings

__all__ = ["launch_build_tree"]

_FUSED_NODES = 128


def launch_build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    node_outputs: Sequence[torch.Tensor],
    topk: int,
    depth: int,
    mode: int,
) -> None:
    """The arguments of `outrider.kernels.build_tree.build_tree_reference`, outputs contiguous."""
    positions, retrive_index, retrive_next_token, retrive_next_sibling = node_outputs
    requests, nodes = positions.shape
    N = max(triton.next_power_of_2(nodes), 16)
    tree = (parent_list.contiguous(), selected_index.contiguous())
    sizes = (nodes, topk, parent_list.shape[1])
    fused = nodes <= _FUSED_NODES
    parents = retrive_index
    if not fused:
        parents = torch.empty(requests, nodes, dtype=torch.int32, device=positions.device)
        rows = 32
        _parents_kernel[(requests, triton.cdiv(nodes, rows))](*tree, parents, *sizes, R=rows, N=128, num_warps=4)
    rows = max(4096 // N, 4) if not fused else min(N, 2048 // N)
    _tree_kernel[(requests, triton.cdiv(nodes, rows))](
        *tree,
        verified_seq_len.contiguous(),
        parents,
        _words(tree_mask),
        positions,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        *sizes,
        depth,
        min(depth, nodes - 1),
        tree_mask.numel(),
        MODE=int(mode),
        FUSED=fused,
        R=rows,
        N=N,
        num_warps=4,
    )


def _words(tree_mask: torch.Tensor) -> torch.Tensor:
    """The mask in a dtype that kernels take; bits stay as they are."""
    signed = {torch.bool: torch.uint8, torch.uint16: torch.int16, torch.uint32: torch.int32}
    return tree_mask.view(signed.get(tree_mask.dtype, tree_mask.dtype))


@jit
def _find_parents(
    parent_list_ptr,  # [columns] int, of one request
    selected_ptr,  # [n - 1] int, of one request
    rows,  # [R] int32, nodes
    nodes,
    topk,
    columns,
    N: tl.constexpr,
):
    """[R] int32: the parents of the nodes `rows`, -1 for the root, a missing parent and beyond n."""
    candidate = tl.load(selected_ptr + rows - 1, mask=(rows >= 1) & (rows < nodes), other=-1).to(tl.int64)
    beam = candidate // topk
    listed = (candidate >= 0) & (beam >= 1) & (beam < columns)
    wanted = tl.load(parent_list_ptr + beam, mask=listed, other=-1).to(tl.int64)
    place = tl.full(rows.shape, 0x7FFFFFFF, tl.int32)
    for start in range(0, nodes, N):
        others = start + tl.arange(0, N)
        selected = (others >= 1) & (others < nodes)
        held = tl.load(selected_ptr + others - 1, mask=selected, other=-1).to(tl.int64)
        holds = (wanted[:, None] == held[None, :]) & listed[:, None] & selected[None, :]
        place = tl.minimum(place, tl.min(tl.where(holds, others[None, :], 0x7FFFFFFF), axis=1))
    parent = tl.where(place < nodes, place, -1)
    return tl.where((candidate >= 0) & (beam == 0), 0, parent)


@jit
def _parents_kernel(
    parent_list_ptr,  # [bs, columns] int
    selected_ptr,  # [bs, n - 1] int
    parents_ptr,  # [bs, n] int32
    nodes,
    topk,
    columns,
    R: tl.constexpr,
    N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    parent = _find_parents(
        parent_list_ptr + request * columns, selected_ptr + request * (nodes - 1), rows, nodes, topk, columns, N
    )
    tl.store(parents_ptr + request * nodes + rows, parent, mask=rows < nodes)


@jit
def _tree_kernel(
    parent_list_ptr,  # [bs, columns] int
    selected_ptr,  # [bs, n - 1] int
    seq_len_ptr,  # [bs] int
    parents_ptr,  # [bs, n] int32, read unless FUSED
    mask_ptr,  # [cells] uint8 or words
    positions_ptr,  # [bs, n] int
    index_ptr,  # [bs, n] int
    next_token_ptr,  # [bs, n] int
    next_sibling_ptr,  # [bs, n] int
    nodes,
    topk,
    columns,
    depth,
    steps,
    cells,
    MODE: tl.constexpr,
    FUSED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * nodes
    numbers = tl.arange(0, N)
    prefix = tl.load(seq_len_ptr + request).to(tl.int64)
    if FUSED:
        parent = _find_parents(
            parent_list_ptr + request * columns, selected_ptr + request * (nodes - 1), numbers, nodes, topk, columns, N
        )
    else:
        parent = tl.load(parents_ptr + base + numbers, mask=numbers < nodes, other=-1)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    inside = rows < nodes
    row_parent = tl.gather(parent, rows, 0)
    child = first_children(parent, rows, N)
    sibling = next_siblings(parent, rows, row_parent, N)
    tl.store(index_ptr + base + rows, (base + rows).to(index_ptr.dtype.element_ty), mask=inside)
    tl.store(next_token_ptr + base + rows, child.to(next_token_ptr.dtype.element_ty), mask=inside)
    tl.store(next_sibling_ptr + base + rows, sibling.to(next_sibling_ptr.dtype.element_ty), mask=inside)

    # A walk without repeats ends within n - 1 visits: one that is still going then is in a cycle, has seen all of it,
    # and would make its `depth` visits.
    node = rows
    visits = tl.zeros([R], tl.int32)
    visited = (numbers[None, :] == 0) | (numbers[None, :] == rows[:, None])
    for _ in range(steps):
        visited |= numbers[None, :] == node[:, None]
        visits += (node > 0).to(tl.int32)
        node = tl.where(node > 0, tl.gather(parent, tl.maximum(node, 0), 0), node)
    visits = tl.where(node > 0, depth, visits)
    tl.store(positions_ptr + base + rows, (prefix + visits).to(positions_ptr.dtype.element_ty), mask=inside)
    _store_mask(mask_ptr, visited, seq_len_ptr, request, rows, nodes, prefix, cells, MODE, N)


@jit
def _store_mask(
    mask_ptr,
    visited,  # [R, N] int1
    seq_len_ptr,  # [bs] int
    request,
    rows,  # [R] int32
    nodes,
    prefix,
    cells,
    MODE: tl.constexpr,
    N: tl.constexpr,
):
    numbers = tl.arange(0, N)
    if MODE == 2:
        words = tl.sum(tl.where(visited, tl.full([1, N], 1, tl.int64) << numbers[None, :], 0), axis=1)
        place = mask_ptr + request * nodes + rows
        words |= tl.load(place, mask=rows < nodes, other=0).to(tl.int64)
        tl.store(place, words.to(mask_ptr.dtype.element_ty), mask=rows < nodes)
    else:
        inside = (rows < nodes)[:, None] & (numbers < nodes)[None, :]
        if MODE == 1:
            cell = (request * nodes + rows)[:, None] * nodes + numbers[None, :]
        else:
            before = tl.zeros([256], tl.int64)
            for start in range(0, request, 256):
                others = start + tl.arange(0, 256)
                before += tl.load(seq_len_ptr + others, mask=others < request, other=0)
            begin = nodes * (nodes * request + tl.sum(before)) + prefix
            cell = begin + (rows * (prefix + nodes))[:, None] + numbers[None, :]
            inside &= (cell >= 0) & (cell < cells)
        tl.store(mask_ptr + cell, visited.to(mask_ptr.dtype.element_ty), mask=inside)
