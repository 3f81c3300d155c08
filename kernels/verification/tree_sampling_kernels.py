"""Triton side of `outrider.kernels.tree_sampling`, whose rule and conventions hold here.

Two launches: `_walk_kernel`, one warp a request, walks the tree, writes the path and leaves in a `ResidualPlan` from
which row the final token is drawn; `outrider.kernels.sampling.residual_sampling` draws it with the whole GPU. Of
target_probs the walk reads the children's entries in the rows it visits, and the draw reads the last of these rows.

A walk is a chain of trips to memory, so it makes few: the tree is read at once, and a node's children are judged
together.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.sampling.residual_sampling import (
    ResidualPlan,
    launch_residual_draw,
    overlap_options,
    with_dense_rows,
)
from outrider.kernels.sampling.residual_sampling_kernels import PLAN_COLUMNS, store_plan

__all__ = ["launch_tree_sampling", "rounded_thresholds"]

_PLAN_COLUMNS = tl.constexpr(PLAN_COLUMNS)
_SMALLEST_THRESHOLD = 1e-9


def rounded_thresholds(single: float, total: float) -> list[float]:
    """Both in float32, like the probabilities that they are compared with."""
    return torch.tensor([single, max(total, _SMALLEST_THRESHOLD)], dtype=torch.float32).tolist()


def launch_tree_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """`tree_speculative_sampling_target_only` of checked arguments; `predicts` is flat."""
    requests, nodes = candidates.shape
    target = with_dense_rows(target_probs)
    draft = None if draft_probs is None else with_dense_rows(draft_probs)
    # Without a draft to write them into, the rejected tokens travel in a list.
    plan = ResidualPlan.empty(requests, candidates.device, excluded=nodes if draft is None else 0)
    written = target if draft is None else draft
    _walk_kernel[(requests,)](
        predicts,
        accept_index,
        accept_token_num,
        candidates.contiguous(),
        retrive_index.contiguous(),
        retrive_next_token.contiguous(),
        retrive_next_sibling.contiguous(),
        uniform_samples.contiguous(),
        uniform_samples_for_final_sampling.contiguous(),
        target,
        written,
        plan.columns,
        plan.uniforms,
        plan.columns if plan.excluded is None else plan.excluded,
        *accept_index.stride(),
        accept_token_num.stride(0),
        *target.stride()[:2],
        *written.stride()[:2],
        nodes,
        requests * nodes,
        accept_index.shape[1],
        target.shape[2],
        *rounded_thresholds(threshold_single, threshold_acc),
        HAS_DRAFT=draft is not None,
        NODES=triton.next_power_of_2(nodes),
        LANES=min(triton.next_power_of_2(nodes), 32),
        num_warps=1,
        OVERLAPS=overlap_options(predicts)["OVERLAPS"],
    )
    launch_residual_draw(predicts, target, draft, plan, falls_back=False)
    if draft_probs is not None and draft is not None and draft is not draft_probs:
        draft_probs.copy_(draft)


@jit
def _read_all(
    candidates_ptr, retrive_index_ptr, next_token_ptr, next_sibling_ptr, coins_ptr, nodes, NODES: tl.constexpr
):
    """Something made of everything that a walk may need of a tree, so that the compiler keeps the reads."""
    every = tl.arange(0, NODES)
    read = tl.load(next_token_ptr + every, mask=every < nodes, other=0).to(tl.int64)
    read |= tl.load(next_sibling_ptr + every, mask=every < nodes, other=0).to(tl.int64)
    read |= tl.load(candidates_ptr + every, mask=every < nodes, other=0).to(tl.int64)
    read |= tl.load(retrive_index_ptr + every, mask=every < nodes, other=0).to(tl.int64)
    read |= tl.load(coins_ptr + every, mask=every < nodes, other=0.0).to(tl.int64)
    return tl.max(read)


@jit
def _siblings(next_sibling_ptr, child, most, nodes, LANES: tl.constexpr):
    """`child`, which is a node, and what its sibling links lead to: nodes [LANES], their number and the next link."""
    lanes = tl.arange(0, LANES)
    family = tl.full([LANES], -1, tl.int32)
    count = tl.full([], 0, tl.int32)
    more = nodes > 0
    while more:
        family = tl.where(lanes == count, child.to(tl.int32), family)
        count += 1
        child = tl.load(next_sibling_ptr + child).to(tl.int64)
        more = (child >= 0) & (child < nodes) & (count < LANES) & (count < most)
    return family, count, child


@jit
def _judge_children(
    candidates_ptr,
    retrive_index_ptr,
    child,
    next_sibling_ptr,
    coin,
    target_ptr,
    draft_ptr,
    excluded_ptr,
    nodes,
    all_rows,
    vocab_size,
    threshold_single,
    HAS_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """The accepted one of a node's children, of which `child` is the first, or -1; and how many were visited.

    `coin` is multiplied by threshold_acc already. Two float32 have an exact product in float64.
    Rejected children's probabilities go to the node's row of the draft, or else their tokens to `excluded`.
    """
    lanes = tl.arange(0, LANES)
    visited = tl.full([], 0, tl.int32)
    running = tl.full([], 0.0, tl.float64)
    chosen = tl.full([], -1, tl.int32)
    searching = (child >= 0) & (child < nodes)
    while searching:
        # Up to LANES siblings are judged together: their probabilities come in one trip to memory.
        family, count, child = _siblings(next_sibling_ptr, child, nodes - visited, nodes, LANES)
        token = tl.load(candidates_ptr + family, mask=lanes < count, other=-1).to(tl.int64)
        row = tl.load(retrive_index_ptr + family, mask=lanes < count, other=-1).to(tl.int64)
        usable = (token >= 0) & (token < vocab_size) & (row >= 0) & (row < all_rows)
        probability = tl.load(target_ptr + token, mask=usable, other=0.0).to(tl.float32)
        sums = running + tl.cumsum(probability.to(tl.float64), 0)
        passes = usable & (probability > 0) & ((coin < sums) | (probability >= threshold_single))
        first = tl.min(tl.where(passes, lanes, LANES))
        rejected = usable & (lanes < first)
        if HAS_DRAFT:
            tl.store(draft_ptr + token, probability.to(draft_ptr.dtype.element_ty), mask=rejected)
        else:
            excluded = tl.where(rejected, token, -1).to(tl.int32)
            tl.store(excluded_ptr + visited + lanes, excluded, mask=lanes < count)
        visited += count
        chosen = tl.max(tl.where(lanes == first, family, -1))
        searching = (chosen < 0) & (child >= 0) & (child < nodes) & (visited < nodes)
        if searching:
            running += tl.sum(probability.to(tl.float64))
    return chosen, visited


# Sizes that differ from step to step are not worth compiling for; and for path_nodes == 1 Triton 3.6 fails to.
@jit(do_not_specialize=["nodes", "all_rows", "path_nodes"])
def _walk_kernel(
    predicts_ptr,  # [bs * n] int
    accept_index_ptr,  # [bs, S] int
    accept_token_num_ptr,  # [bs] int
    candidates_ptr,  # [bs, n] int
    retrive_index_ptr,  # [bs, n] int
    next_token_ptr,  # [bs, n] int
    next_sibling_ptr,  # [bs, n] int
    coins_ptr,  # [bs, n] float32
    finals_ptr,  # [bs] float32
    target_ptr,  # [bs, n, V] float
    draft_ptr,  # [bs, n, V] float
    columns_ptr,  # [bs, PLAN_COLUMNS] int64
    uniforms_ptr,  # [bs] float64
    excluded_ptr,  # [bs, n] int32
    accept_row_stride,
    accept_stride,
    num_stride,
    target_stride,
    target_row_stride,
    draft_stride,
    draft_row_stride,
    nodes,
    all_rows,
    path_nodes,
    vocab_size,
    threshold_single,
    threshold_acc,
    HAS_DRAFT: tl.constexpr,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    base = request * nodes
    accept_index_ptr += request * accept_row_stride
    target_ptr += request * target_stride
    draft_ptr += request * draft_stride
    # The walk follows links one by one. Read all at once first, they cost one trip to memory instead of many.
    read = _read_all(
        candidates_ptr + base,
        retrive_index_ptr + base,
        next_token_ptr + base,
        next_sibling_ptr + base,
        coins_ptr + base,
        nodes,
        NODES,
    )
    tl.store(columns_ptr + request * _PLAN_COLUMNS + 5, read)

    last = tl.load(retrive_index_ptr + base).to(tl.int64)
    rooted = (last >= 0) & (last < all_rows)
    if rooted:
        tl.store(accept_index_ptr, last.to(accept_index_ptr.dtype.element_ty))
    accepted = tl.full([], 0, tl.int32)
    visited = tl.full([], 0, tl.int32)
    node = tl.full([], 0, tl.int64)
    walking = rooted & (path_nodes > 1)
    while walking:
        chosen, visited = _judge_children(
            candidates_ptr + base,
            retrive_index_ptr + base,
            tl.load(next_token_ptr + base + node).to(tl.int64),
            next_sibling_ptr + base,
            tl.load(coins_ptr + base + node).to(tl.float64) * threshold_acc,
            target_ptr + node * target_row_stride,
            draft_ptr + node * draft_row_stride,
            excluded_ptr + base,
            nodes,
            all_rows,
            vocab_size,
            threshold_single,
            HAS_DRAFT,
            LANES,
        )
        walking = chosen >= 0
        if walking:
            emitted = tl.load(candidates_ptr + base + chosen)
            tl.store(predicts_ptr + last, emitted.to(predicts_ptr.dtype.element_ty))
            node = chosen.to(tl.int64)
            last = tl.load(retrive_index_ptr + base + node).to(tl.int64)
            accepted += 1
            tl.store(accept_index_ptr + accepted * accept_stride, last.to(accept_index_ptr.dtype.element_ty))
            walking = accepted < path_nodes - 1
    tl.store(accept_token_num_ptr + request * num_stride, accepted.to(accept_token_num_ptr.dtype.element_ty))
    # A path of S nodes ends without a verdict on the last node's children.
    judged = accepted < path_nodes - 1
    draft_row, excluded_count = tl.where(judged, node, -1), tl.where(judged, visited, 0)
    place = tl.where(rooted, last, -1)
    final = tl.load(finals_ptr + request).to(tl.float64)
    store_plan(columns_ptr, uniforms_ptr, request, node, draft_row, place, excluded_count, final)
