"""Triton side of `outrider.kernels.build_tree`, whose definitions hold here.

A program holds one node in every lane and meets the others one by one: entry after entry of selected_index is compared
with the pool index that each lane looks for, and node after node offers itself to its parent and its siblings. These
loads are the same for all lanes and do not wait for each other; tiles of all pairs, with gathers between lanes, took
three times as long.

    _tree_kernel     one program a request, R of its nodes and C columns of the mask: links, positions, mask. The walks
                     along the ancestors read the parents from memory and collect a word of C bits in each lane. Up to
                     64 nodes every program finds the parents of the whole request itself (FUSED).
    _parents_kernel  beyond: the parents, found once by a launch of its own.

Shapes: bs requests, n nodes of a request with its root.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.verification.tree_links import links_of_rows, stretch_of

__all__ = ["launch_build_tree"]

_WORD_BITS = 64
# A full mask's rows begin anywhere and are stored byte by byte: that work is shared by several programs.
_FULL_MASK_COLUMNS = 32
_FULL_MASK_WARPS = 4
_BATCH = tl.constexpr(256)
# Sizes that change from call to call and that no address depends on: a kernel is not compiled anew for each.
_UNSPECIALISED = ("topk", "columns", "depth", "steps", "cells")


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
    requests, nodes = node_outputs[0].shape
    rows = min(max(triton.next_power_of_2(nodes), 16), _WORD_BITS)
    blocks = triton.cdiv(nodes, rows)
    tree = (parent_list.contiguous(), selected_index.contiguous())
    parents = torch.empty(requests, nodes, dtype=torch.int32, device=tree_mask.device)
    sizes = (nodes, topk, parent_list.shape[1])
    if blocks > 1:
        _parents_kernel[(requests, blocks)](*tree, parents, *sizes, R=rows, STRETCH=stretch_of(nodes), num_warps=2)
    columns = min(rows, _FULL_MASK_COLUMNS) if mode == 0 else rows
    _tree_kernel[(requests, blocks, triton.cdiv(nodes, columns))](
        *tree,
        verified_seq_len.contiguous(),
        parents,
        _words(tree_mask),
        *node_outputs,
        *sizes,
        depth,
        min(depth, nodes - 1),
        tree_mask.numel(),
        MODE=int(mode),
        FUSED=blocks == 1,
        R=rows,
        C=columns,
        STRETCH=stretch_of(nodes),
        num_warps=_FULL_MASK_WARPS if mode == 0 else 2,
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
    STRETCH: tl.constexpr,
):
    """[R] int32: the parents of the nodes `rows`, -1 for the root, a missing parent and beyond n."""
    candidate = tl.load(selected_ptr + rows - 1, mask=(rows >= 1) & (rows < nodes), other=-1).to(tl.int64)
    beam = candidate // topk
    listed = (candidate >= 0) & (beam < columns)
    wanted = tl.load(parent_list_ptr + beam, mask=listed, other=-1).to(tl.int64)
    parent = tl.full(rows.shape, -1, tl.int32)
    # As in links_of_rows: backwards, so that the first match stays, in stretches without conditions.
    for done in range(0, nodes - 1, STRETCH):
        first = tl.maximum(nodes - done - STRETCH, 1)
        stretch_ptr = selected_ptr + (first - 1)
        for offset in tl.static_range(STRETCH):
            held = tl.load(stretch_ptr + (STRETCH - 1 - offset)).to(tl.int64)
            parent = tl.where(wanted == held, first + (STRETCH - 1 - offset), parent)
    return tl.where((candidate >= 0) & (beam == 0), 0, tl.where(listed, parent, -1))


@jit(do_not_specialize=_UNSPECIALISED)
def _parents_kernel(
    parent_list_ptr,  # [bs, columns] int
    selected_ptr,  # [bs, n - 1] int
    parents_ptr,  # [bs, n] int32
    nodes,
    topk,
    columns,
    R: tl.constexpr,
    STRETCH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    parent = _find_parents(
        parent_list_ptr + request * columns, selected_ptr + request * (nodes - 1), rows, nodes, topk, columns, STRETCH
    )
    tl.store(parents_ptr + request * nodes + rows, parent, mask=rows < nodes)


@jit(do_not_specialize=_UNSPECIALISED)
def _tree_kernel(
    parent_list_ptr,  # [bs, columns] int
    selected_ptr,  # [bs, n - 1] int
    seq_len_ptr,  # [bs] int
    parents_ptr,  # [bs, n] int32, written first if FUSED
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
    C: tl.constexpr,
    STRETCH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * nodes
    parents_ptr += base
    rows = tl.program_id(1) * R + tl.arange(0, R)
    inside = rows < nodes
    prefix = tl.load(seq_len_ptr + request).to(tl.int64)
    # What the mask needs from memory is asked for before the long part.
    lengths = tl.zeros([_BATCH], tl.int64)
    known = tl.zeros([R], tl.int64)
    if MODE == 0:
        lengths = _lengths_before(seq_len_ptr, request)
    if MODE == 2:
        known = tl.load(mask_ptr + base + rows, mask=inside, other=0).to(tl.int64)
    if FUSED:
        parent = _find_parents(
            parent_list_ptr + request * columns,
            selected_ptr + request * (nodes - 1),
            rows,
            nodes,
            topk,
            columns,
            STRETCH,
        )
        tl.store(parents_ptr + rows, parent, mask=inside)
        tl.debug_barrier()
    else:
        parent = tl.load(parents_ptr + rows, mask=inside, other=-1)
    first_column = tl.program_id(2) * C
    word, visits = _walk(parents_ptr, rows, parent, first_column, depth, steps)
    if first_column == 0:
        child, sibling = links_of_rows(parents_ptr, rows, parent, nodes, STRETCH)
        tl.store(index_ptr + base + rows, (base + rows).to(index_ptr.dtype.element_ty), mask=inside)
        tl.store(next_token_ptr + base + rows, child.to(next_token_ptr.dtype.element_ty), mask=inside)
        tl.store(next_sibling_ptr + base + rows, sibling.to(next_sibling_ptr.dtype.element_ty), mask=inside)
        tl.store(positions_ptr + base + rows, (prefix + visits).to(positions_ptr.dtype.element_ty), mask=inside)
    if MODE == 2:
        tl.store(mask_ptr + base + rows, (word | known).to(mask_ptr.dtype.element_ty), mask=inside)
    else:
        row_cells = (base + rows) * nodes
        if MODE == 0:
            row_cells = nodes * (nodes * request + tl.sum(lengths)) + rows * (prefix + nodes) + prefix
        _store_cells(mask_ptr, word, row_cells, tl.where(inside, nodes, 0), first_column, cells, MODE == 0, C)


@jit
def _lengths_before(seq_len_ptr, request):
    """[_BATCH] int64 that add up to verified_seq_len[:request].sum()."""
    others = tl.arange(0, _BATCH)
    lengths = tl.load(seq_len_ptr + others, mask=others < request, other=0).to(tl.int64)
    for start in range(_BATCH, request, _BATCH):
        lengths += tl.load(seq_len_ptr + start + others, mask=start + others < request, other=0)
    return lengths


@jit
def _store_cells(
    mask_ptr,
    word,  # [R] int64
    row_cells,  # [R] int64, where the tree cells of each row begin
    room,  # [R] int32, cells of each row
    first_column,
    cells,
    CHECKED: tl.constexpr,
    C: tl.constexpr,
):
    """Store the first C bits of the words as bool; if CHECKED, only what lies in [0, cells)."""
    column = tl.arange(0, C)
    wanted = (first_column + column)[None, :] < room[:, None]
    if CHECKED:
        behind = tl.minimum(tl.maximum(cells - row_cells, 0), room).to(tl.int32)
        before = tl.minimum(tl.maximum(-row_cells, 0), room).to(tl.int32)
        wanted = (first_column + column)[None, :] < behind[:, None]
        wanted &= (first_column + column)[None, :] >= before[:, None]
    bit = (word[:, None] >> column[None, :]) & 1
    place = (mask_ptr + row_cells + first_column)[:, None] + column[None, :]
    tl.store(place, bit.to(mask_ptr.dtype.element_ty), mask=wanted)


@jit
def _walk(
    parents_ptr,  # [n] int32, of one request
    rows,  # [R] int32, nodes
    parent,  # [R] int32, their parents
    first_column,
    depth,
    steps,
):
    """[R] int64, the visited nodes from `first_column` on as bits, root included; and [R] int32, how many visits.

    A walk without repeats ends within n - 1 visits: one that is still going then is in a cycle, has seen all of it, and
    would make its `depth` visits.
    """
    word = _bit(rows * 0, first_column) | _bit(rows, first_column)
    node = parent
    visits = (rows > 0).to(tl.int32)
    for _ in range(1, steps):
        walking = node > 0
        word |= tl.where(walking, _bit(node, first_column), 0)
        visits += walking.to(tl.int32)
        # The root's entry is -1, so a walk that has ended stays ended.
        node = tl.load(parents_ptr + tl.maximum(node, 0))
    return word, tl.where(node > 0, depth, visits)


@jit
def _bit(node, first_column):
    """The bit of each node in a word that begins at `first_column`, 0 outside it."""
    place = node - first_column
    within = (place >= 0) & (place < 64)
    return tl.where(within, tl.full(node.shape, 1, tl.int64) << tl.where(within, place, 0).to(tl.int64), 0)
