"""Retrieve links and positions from a token tree's mask, and packing of bits into bytes.

    ancestors(i)    = {j < i: mask[i, j]};  parent(i) = the largest of them, -1 where there is none
    positions[i]    = verified_seq_len + number of ancestors
    next_token[i]   = smallest k > i with mask[k, i], -1 if none
    next_sibling[i] = smallest k > i with parent(k) == parent(i), -1 if none or if parent(i) == -1

    y[out[i] + k]   = sum over j < 8 of (x[in[i] + 8k + j] != 0) << j, zeros past the end of segment i

The first inverts `outrider.kernels.build_tree` for well-formed, ascending trees. Cells at and above the diagonal are
not read, so children come after their parents whatever the mask holds.

Shapes: bs requests, n nodes of a request with its root; inside kernels N is n rounded up, R the rows of a program.
Source: operators of the same names in SGLang's kernel library (n-gram drafts) and in FlashInfer (packed masks).
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.argument_checks import check_at_least, check_columns, check_tensors, write_back
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.verification.tree_links import (
    first_marked,
    link_views,
    links_of_parents,
    links_of_rows,
    stretch_of,
)

__all__ = [
    "reconstruct_indices_from_tree_mask",
    "reconstruct_reference",
    "segment_packbits",
    "segment_packbits_reference",
]

# Up to here one program sees the whole mask of a request.
_FUSED_NODES = 128
_PACK_BLOCK = 256


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write the links and positions of trees known by their masks; buffers may be larger than needed.

    Args:
        tree_mask: [bs * n * n] bool (or any shape of that order): cell (i, j) of a request says that j is i or an
            ancestor of i.
        verified_seq_len: [bs] int, committed tokens before the root.
        positions: [bs, n] or flat int, written.
        retrive_index: [bs, n] int, written: b * n + i.
        retrive_next_token: [bs, n] int, written.
        retrive_next_sibling: [bs, n] int, written.
        batch_size: bs.
        draft_token_num: n.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed.
    """
    check_at_least("batch_size", batch_size, 0)
    check_at_least("draft_token_num", draft_token_num, 1)
    check_tensors(tree_mask=(tree_mask, tuple(tree_mask.shape), (torch.bool,)))
    check_at_least("tree_mask size", tree_mask.numel(), batch_size * draft_token_num**2)
    check_columns("tree_mask", tree_mask.device, {"verified_seq_len": (verified_seq_len, batch_size)})
    outputs = link_views(
        positions, retrive_index, retrive_next_token, retrive_next_sibling,
        shape=(batch_size, draft_token_num), like=tree_mask, owner="tree_mask",
    )  # fmt: skip
    if batch_size == 0:
        return
    written = [output.contiguous() for output in outputs]
    run = _launch_reconstruct if uses_triton(tree_mask) else reconstruct_reference
    run(tree_mask.contiguous().view(-1), verified_seq_len[:batch_size].contiguous(), written)
    write_back(outputs, written)


def reconstruct_reference(
    tree_mask: torch.Tensor, verified_seq_len: torch.Tensor, node_outputs: Sequence[torch.Tensor]
) -> None:
    """`reconstruct_indices_from_tree_mask` in plain torch.

    Args:
        tree_mask: [bs * n * n] bool or longer, flat.
        verified_seq_len: [bs] int.
        node_outputs: positions, retrive_index, retrive_next_token and retrive_next_sibling, each [bs, n], written.
    """
    positions, retrive_index, retrive_next_token, retrive_next_sibling = node_outputs
    requests, nodes = positions.shape
    number = torch.arange(nodes, device=tree_mask.device)
    ancestors = tree_mask[: requests * nodes * nodes].view(requests, nodes, nodes).tril(-1)
    parent = torch.where(ancestors, number, -1).amax(-1)
    positions.copy_(verified_seq_len[:, None] + ancestors.sum(-1))
    retrive_index.copy_(torch.arange(requests * nodes, device=tree_mask.device).view(requests, nodes))
    retrive_next_token.copy_(first_marked(ancestors.mT))
    retrive_next_sibling.copy_(links_of_parents(parent)[1])


def _launch_reconstruct(
    tree_mask: torch.Tensor, verified_seq_len: torch.Tensor, node_outputs: Sequence[torch.Tensor]
) -> None:
    requests, nodes = node_outputs[0].shape
    N = max(triton.next_power_of_2(nodes), 16)
    fused = nodes <= _FUSED_NODES
    parents = node_outputs[3] if fused else torch.empty(requests, nodes, dtype=torch.int32, device=tree_mask.device)
    rows = N if fused else max(16384 // N, 1)
    _reconstruct_kernel[(requests, triton.cdiv(nodes, rows))](
        tree_mask.view(torch.uint8),
        verified_seq_len,
        *node_outputs,
        parents,
        nodes,
        FUSED=fused,
        R=rows,
        N=N,
        num_warps=4 if fused else 8,
    )
    if not fused:
        _siblings_kernel[(requests, triton.cdiv(nodes, 64))](
            parents, node_outputs[3], nodes, R=64, STRETCH=stretch_of(nodes), num_warps=2
        )


@jit
def _reconstruct_kernel(
    mask_ptr,  # [bs * n * n] uint8
    seq_len_ptr,  # [bs] int
    positions_ptr,  # [bs, n] int
    index_ptr,  # [bs, n] int
    next_token_ptr,  # [bs, n] int
    next_sibling_ptr,  # [bs, n] int, written if FUSED
    parents_ptr,  # [bs, n] int32, written unless FUSED
    nodes,
    FUSED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * nodes
    mask_ptr += base * nodes
    rows = tl.program_id(1) * R + tl.arange(0, R)
    numbers = tl.arange(0, N)
    inside = rows < nodes
    prefix = tl.load(seq_len_ptr + request).to(tl.int64)
    marked = _below_diagonal(mask_ptr, rows, numbers, nodes)
    parent = tl.max(tl.where(marked, numbers[None, :], -1), axis=1)
    position = prefix + tl.sum(marked.to(tl.int32), axis=1)
    tl.store(positions_ptr + base + rows, position.to(positions_ptr.dtype.element_ty), mask=inside)
    tl.store(index_ptr + base + rows, (base + rows).to(index_ptr.dtype.element_ty), mask=inside)
    # The nodes below the nodes `rows`: one program a request has their cells at hand.
    below = marked if FUSED else _below_diagonal(mask_ptr, numbers, rows, nodes)
    child = tl.min(tl.where(below, numbers[:, None], N), axis=0)
    child = tl.where(child < N, child, -1)
    tl.store(next_token_ptr + base + rows, child.to(next_token_ptr.dtype.element_ty), mask=inside)
    if FUSED:
        later = (parent[None, :] == parent[:, None]) & (numbers[None, :] > rows[:, None]) & (parent >= 0)[:, None]
        sibling = tl.min(tl.where(later, numbers[None, :], N), axis=1)
        sibling = tl.where(sibling < N, sibling, -1)
        tl.store(next_sibling_ptr + base + rows, sibling.to(next_sibling_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(parents_ptr + base + rows, parent, mask=inside)


@jit
def _below_diagonal(
    mask_ptr,  # [n * n] uint8, of one request
    rows,  # [R] int32
    columns,  # [C] int32
    nodes,
):
    """[R, C] int1: the mask's cells, false at and above the diagonal and beyond n."""
    wanted = (rows < nodes)[:, None] & (columns[None, :] < rows[:, None])
    return tl.load(mask_ptr + rows.to(tl.int64)[:, None] * nodes + columns[None, :], mask=wanted, other=0) != 0


@jit
def _siblings_kernel(
    parents_ptr,  # [bs, n] int32
    next_sibling_ptr,  # [bs, n] int
    nodes,
    R: tl.constexpr,
    STRETCH: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * nodes
    rows = tl.program_id(1) * R + tl.arange(0, R)
    parent = tl.load(parents_ptr + base + rows, mask=rows < nodes, other=-1)
    _child, sibling = links_of_rows(parents_ptr + base, rows, parent, nodes, STRETCH)
    tl.store(next_sibling_ptr + base + rows, sibling.to(next_sibling_ptr.dtype.element_ty), mask=rows < nodes)


def segment_packbits(
    x: torch.Tensor, input_indptr: torch.Tensor, output_indptr: torch.Tensor, y: torch.Tensor, batch_size: int
) -> None:
    """Pack each segment of `x` into bytes of `y`, the first value in the lowest bit; a segment starts a fresh byte.

    Nothing outside `x` counts as set, and nothing outside `y` or past a segment's own output is written, whatever the
    index arrays hold.

    Args:
        x: flat bool or uint8; every value but 0 is a set bit.
        input_indptr: [bs + 1] int, segment i is x[input_indptr[i]:input_indptr[i + 1]].
        output_indptr: [bs + 1] int, its bytes start at y[output_indptr[i]]; a segment of m bits has ceil(m / 8).
        y: flat uint8, written.
        batch_size: bs.

    Raises:
        ValueError: an argument that does not fit, naming it, what was given and what is needed. How long y must be
            depends on output_indptr and is checked on the CPU only.
    """
    check_at_least("batch_size", batch_size, 0)
    check_tensors(x=(x, ("size",), (torch.bool, torch.uint8)), y=(y, ("bytes",), (torch.uint8,)))
    pointers = {"input_indptr": (input_indptr, batch_size + 1), "output_indptr": (output_indptr, batch_size + 1)}
    check_columns("x", x.device, pointers)
    if batch_size == 0:
        return
    if not y.is_cuda:
        check_at_least("y size", y.shape[0], int(output_indptr[batch_size]))
    packed = y.contiguous()
    run = _launch_packbits if uses_triton(x) else segment_packbits_reference
    run(x.contiguous(), input_indptr.contiguous(), output_indptr.contiguous(), packed, batch_size)
    write_back((y,), (packed,))


def segment_packbits_reference(
    x: torch.Tensor, input_indptr: torch.Tensor, output_indptr: torch.Tensor, y: torch.Tensor, batch_size: int
) -> None:
    """`segment_packbits` in plain torch, one segment after the other."""
    weights = 2 ** torch.arange(8, device=x.device)
    starts, outputs = input_indptr.tolist(), output_indptr.tolist()
    for segment in range(batch_size):
        begin, end = starts[segment : segment + 2]
        first, last = outputs[segment : segment + 2]
        if not 0 <= first <= len(y):
            continue
        count = min(-(-(end - begin) // 8), last - first, len(y) - first)
        if count <= 0:
            continue
        place = begin + torch.arange(count * 8, device=x.device)
        inside = (place >= 0) & (place < min(end, len(x)))
        bits = torch.zeros(count * 8, dtype=torch.int64, device=x.device)
        bits[inside] = (x[place[inside]] != 0).long()
        y[first : first + count] = (bits.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _launch_packbits(
    x: torch.Tensor, input_indptr: torch.Tensor, output_indptr: torch.Tensor, y: torch.Tensor, batch_size: int
) -> None:
    # How long a segment is only the device knows: as many programs each as segments of equal length would need.
    programs = min(max(triton.cdiv(y.shape[0], batch_size * _PACK_BLOCK), 1), 64)
    _packbits_kernel[(batch_size, programs)](
        x.view(torch.uint8),
        input_indptr,
        output_indptr,
        y,
        x.shape[0],
        y.shape[0],
        programs,
        BLOCK=_PACK_BLOCK,
        num_warps=4,
    )


@jit
def _packbits_kernel(
    x_ptr,  # [x_size] uint8
    input_indptr_ptr,  # [bs + 1] int
    output_indptr_ptr,  # [bs + 1] int
    y_ptr,  # [y_size] uint8
    x_size,
    y_size,
    programs,
    BLOCK: tl.constexpr,
):
    segment = tl.program_id(0)
    begin = tl.load(input_indptr_ptr + segment).to(tl.int64)
    end = tl.load(input_indptr_ptr + segment + 1).to(tl.int64)
    first = tl.load(output_indptr_ptr + segment).to(tl.int64)
    last = tl.load(output_indptr_ptr + segment + 1).to(tl.int64)
    count = (end - begin) // 8 + ((end - begin) % 8 > 0).to(tl.int64)
    count = tl.minimum(tl.minimum(count, last - first), y_size - first)
    if (first < 0) | (first > y_size):
        count *= 0
    bit = tl.arange(0, 8)
    for start in range(tl.program_id(1) * BLOCK, count, programs * BLOCK):
        byte = start + tl.arange(0, BLOCK)
        place = begin + byte[:, None] * 8 + bit[None, :]
        inside = (place >= 0) & (place < x_size) & (place < end) & (byte < count)[:, None]
        value = tl.load(x_ptr + place, mask=inside, other=0)
        packed = tl.sum((value != 0).to(tl.int32) << bit[None, :], axis=1)
        tl.store(y_ptr + first + byte, packed.to(tl.uint8), mask=byte < count)
