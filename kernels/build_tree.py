"""Token trees from draft scores: retrieve links, positions and attention mask of the nodes that a draft selected.

The draft's pool of candidates is flat, in "topk-squared" order. Level 0: s = c, the root's c-th child, c < topk. Level
i >= 1: s = topk + (i-1) * topk^2 + p * topk + c, the c-th child of the p-th beam that enters level i. Node i of a
request is the candidate selected_index[i-1], node 0 the root, the last committed token.

    q = s // topk;  parent(s) = the root where q == 0, else the node that holds parent_list[q]
    positions       = verified_seq_len + depth in the tree
    mask cell (t,j) = j == t, or j an ancestor of t, or j the root

Order does not matter and malformed input does no harm. A parent is searched, first match, among the n-1 selected
entries; it is missing where nobody holds it, where q lies outside parent_list and where s < 0. A node whose own parent
is missing stays out of the links, every other one is linked to its direct parent. The walk along the ancestors visits
the node itself, then parent after parent, until it has visited a child of the root, meets a missing parent, or has
made `depth` visits (in a cycle, repeats count); the mask holds the root and every node visited, and the position is
verified_seq_len plus the number of visits.

Shapes: bs requests, n nodes of a request with its root.
Source: EAGLE-2, arXiv 2406.16858; operator of the same name in SGLang's kernel library, whose spelling "retrive" stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch

from outrider.kernels.argument_checks import (
    INDEX_DTYPES,
    check_at_least,
    check_dtype,
    check_place,
    check_tensors,
    write_back,
)
from outrider.kernels.backend import check_shape, uses_triton
from outrider.kernels.verification.build_tree_kernels import launch_build_tree
from outrider.kernels.verification.tree_links import first_marked, link_views, links_of_parents

__all__ = ["MAX_TREE_NODES", "TreeMaskMode", "build_tree_kernel_efficient", "build_tree_reference"]

MAX_TREE_NODES = 1024
_WORD_BITS = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.int64: 64}


class TreeMaskMode(IntEnum):
    """Format of the mask that `build_tree_kernel_efficient` writes."""

    FULL = 0
    """Flat bool; request b starts at n*n*b + n*sum(verified_seq_len[:b]), row t has verified_seq_len[b] + n cells."""
    TREE_ONLY = 1
    """Bool [bs, n, n]."""
    PACKED = 2
    """One word per node, bit j of word t is cell (t, j)."""


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: TreeMaskMode | int,
) -> None:
    """Write links, positions and mask of the trees; buffers may be larger than needed.

    Args:
        parent_list: [bs, topk * (depth - 1) + 1] int, the pool indices of the beams; [bs, 0] at depth 1.
        selected_index: [bs, n - 1] int, the pool indices of the nodes.
        verified_seq_len: [bs] int, committed tokens before the root.
        tree_mask: written. FULL: flat bool of n * (n * bs + sum(verified_seq_len)) cells, of which the prefix cells
            are left alone. TREE_ONLY: bool [bs, n, n] or flat. PACKED: words [bs, n] or flat, uint8 for n <= 8,
            uint16 for n <= 16, uint32 for n <= 32 or int64 for n <= 64; the bits are added to those already there.
        positions: [bs, n] or flat int, written.
        retrive_index: [bs, n] int, written: b * n + i.
        retrive_next_token: [bs, n] int, written: the first child, -1 for none.
        retrive_next_sibling: [bs, n] int, written: the next child of the same parent, -1 for none.
        topk: children of a beam.
        depth: levels of the pool.
        draft_token_num: n, at most 1024.
        tree_mask_mode: a `TreeMaskMode` or its number.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed. The size that FULL
            needs depends on verified_seq_len and is checked on the CPU; on CUDA, stores past the end are left out.
    """
    if tree_mask_mode not in tuple(TreeMaskMode):
        raise ValueError(f"tree_mask_mode: {tree_mask_mode} given, 0, 1 or 2 needed")
    mode, nodes = TreeMaskMode(tree_mask_mode), draft_token_num
    _check_tree(parent_list, selected_index, verified_seq_len, topk, depth, nodes)
    requests = selected_index.shape[0]
    outputs = link_views(
        positions, retrive_index, retrive_next_token, retrive_next_sibling,
        shape=(requests, nodes), like=selected_index, owner="selected_index",
    )  # fmt: skip
    _check_mask(tree_mask, verified_seq_len, requests, nodes, mode)
    if requests == 0:
        return
    written = [output.contiguous() for output in outputs]
    cells = tree_mask.contiguous().view(-1)
    run = launch_build_tree if uses_triton(selected_index) else build_tree_reference
    run(parent_list, selected_index, verified_seq_len, cells, written, topk, depth, mode)
    write_back((*outputs, tree_mask), (*written, cells))


def _check_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    topk: int,
    depth: int,
    nodes: int,
) -> None:
    check_at_least("topk", topk, 1)
    check_at_least("depth", depth, 1)
    if not 1 <= nodes <= MAX_TREE_NODES:
        raise ValueError(f"draft_token_num: {nodes} given, 1 to {MAX_TREE_NODES} needed")
    check_tensors(
        selected_index=(selected_index, ("bs", nodes - 1), INDEX_DTYPES),
        parent_list=(parent_list, ("bs", "topk * (depth - 1) + 1"), INDEX_DTYPES),
        verified_seq_len=(verified_seq_len, ("bs",), INDEX_DTYPES),
    )
    if parent_list.shape[1] > 0 or depth > 1:
        check_at_least("parent_list columns", parent_list.shape[1], topk * (depth - 1) + 1)


def _check_mask(
    tree_mask: torch.Tensor, verified_seq_len: torch.Tensor, requests: int, nodes: int, mode: TreeMaskMode
) -> None:
    check_place("tree_mask", tree_mask, verified_seq_len.device, "selected_index")
    most = max(_WORD_BITS.values())
    if mode == TreeMaskMode.PACKED and nodes > most:
        raise ValueError(f"draft_token_num: {nodes} given, at most {most} fit a packed mask")
    row = (nodes,) if mode == TreeMaskMode.PACKED else (nodes, nodes)
    needed = requests * math.prod(row)
    if mode == TreeMaskMode.FULL:
        needed = 0 if tree_mask.is_cuda else needed + nodes * int(verified_seq_len.sum())
    elif tree_mask.dim() != 1:
        check_shape("tree_mask", tree_mask, ("bs", *row))
    check_at_least("tree_mask size", tree_mask.numel(), needed)
    wide_enough = [dtype for dtype, bits in _WORD_BITS.items() if bits >= nodes]
    check_dtype("tree_mask", tree_mask, wide_enough if mode == TreeMaskMode.PACKED else (torch.bool,))


def build_tree_reference(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    node_outputs: Sequence[torch.Tensor],
    topk: int,
    depth: int,
    mode: TreeMaskMode,
) -> None:
    """`build_tree_kernel_efficient` in plain torch.

    Args:
        parent_list: [bs, columns] int.
        selected_index: [bs, n - 1] int.
        verified_seq_len: [bs] int.
        tree_mask: flat, written.
        node_outputs: positions, retrive_index, retrive_next_token and retrive_next_sibling, each [bs, n], written.
        topk: children of a beam.
        depth: most visits of a walk.
        mode: what the mask is.
    """
    positions, retrive_index, retrive_next_token, retrive_next_sibling = node_outputs
    parents = _parents(parent_list.long(), selected_index.long(), topk)
    visited, visits = _ancestors(parents, depth)
    next_token, next_sibling = links_of_parents(parents)
    positions.copy_(verified_seq_len[:, None] + visits)
    retrive_index.copy_(torch.arange(parents.numel(), device=parents.device).view_as(parents))
    retrive_next_token.copy_(next_token)
    retrive_next_sibling.copy_(next_sibling)
    if mode == TreeMaskMode.FULL:
        _write_full(tree_mask, visited, verified_seq_len.long())
    elif mode == TreeMaskMode.TREE_ONLY:
        tree_mask[: visited.numel()] = visited.view(-1)
    else:
        bits = torch.arange(parents.shape[1], device=parents.device)
        words = (visited.long() << bits).sum(-1).view(-1)
        tree_mask[: words.numel()] = (tree_mask[: words.numel()].long() | words).to(tree_mask.dtype)


def _parents(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """The parent of every node [bs, n]: 0 is the root, -1 a missing parent (and the root's own entry)."""
    beam = selected.div(topk, rounding_mode="floor")
    listed = (beam >= 0) & (beam < parent_list.shape[1])
    wanted = parent_list.gather(1, beam.where(listed, 0)) if parent_list.shape[1] else beam
    holds = (wanted[:, :, None] == selected[:, None, :]) & listed[:, :, None]
    # The root's row and column come first; nobody is found to hold it, so -1 stays its parent.
    holds = torch.nn.functional.pad(holds, (1, 0, 1, 0))
    return torch.where(torch.nn.functional.pad(beam, (1, 0), value=-1) == 0, 0, first_marked(holds))


def _ancestors(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nodes that the walk from every node visits, [bs, n, n] bool with the root, and its length, [bs, n]."""
    requests, nodes = parents.shape
    number = torch.arange(nodes, device=parents.device)
    visited = torch.zeros(requests, nodes, nodes, dtype=torch.bool, device=parents.device)
    visited[:, :, 0] = True
    visits = torch.zeros_like(parents)
    node = number.expand(requests, nodes)
    for _ in range(depth):
        walking = node > 0
        visited |= (node[:, :, None] == number) & walking[:, :, None]
        visits += walking
        node = torch.where(walking, parents.gather(1, node.clamp(min=0)), node)
    return visited, visits


def _write_full(tree_mask: torch.Tensor, visited: torch.Tensor, verified_seq_len: torch.Tensor) -> None:
    requests, nodes, _ = visited.shape
    number = torch.arange(nodes, device=visited.device)
    start = nodes * (nodes * torch.arange(requests, device=visited.device) + verified_seq_len.cumsum(0))
    start = (start - nodes * verified_seq_len)[:, None, None]
    prefix = verified_seq_len[:, None, None]
    cells = start + number[None, :, None] * (prefix + nodes) + prefix + number
    inside = (cells >= 0) & (cells < tree_mask.numel())
    tree_mask[cells[inside]] = visited[inside]
