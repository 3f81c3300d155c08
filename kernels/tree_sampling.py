"""Verification of token trees by sampling from the target alone.

At a node, one coin runs through the children in sibling order against the running sum of their target probabilities:

    accept the first child c with p[c] > 0 and (coin < (p of the children so far) / threshold_acc or
                                                p[c] >= threshold_single)

A rejected child's probability goes to the draft's row, and the final token is drawn from max(p - draft row, 0). With
both thresholds 1, distinct siblings and draft rows of zeros, the emitted tokens are exact samples of the target.

Trees come as the retrieve links of `outrider.kernels.verify_tree`, and malformed links do no harm: a link outside
[0, n) ends its list, at most n siblings are visited per level, a candidate outside [0, V) or a row outside
[0, bs * n) is skipped; a request whose root row is outside accepts nothing and emits nothing.

Shapes: bs requests, n nodes of a request with its root, V vocabulary size, S = nodes of the deepest path, so at most
S - 1 are accepted. Source: operator of the same name in SGLang's kernel library; typical acceptance, arXiv 2401.10774.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import torch

from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.residual_sampling import (
    PLAN_COLUMNS,
    ResidualPlan,
    launch_residual_draw,
    residual_tokens_reference,
    store_plan,
    with_dense_rows,
)

__all__ = ["tree_speculative_sampling_target_only", "tree_speculative_sampling_target_only_reference"]

_PLAN_COLUMNS = tl.constexpr(PLAN_COLUMNS)
_SMALLEST_THRESHOLD = 1e-9


def tree_speculative_sampling_target_only(
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
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Write which nodes of each tree the target accepts, and the final token; other entries keep their values.

    The tokens emitted for request b are `predicts[accept_index[b, 0 .. accept_token_num[b]]]`.

    Args:
        predicts: [bs * n] int, written: the emitted token at each row of the path.
        accept_index: [bs, S] int, written: the rows of the path, root first.
        accept_token_num: [bs] int, written: accepted nodes, the final token not counted.
        candidates: [bs, n] int, the nodes' tokens.
        retrive_index: [bs, n] int, the nodes' rows in the flattened batch.
        retrive_next_token: [bs, n] int, the nodes' first children.
        retrive_next_sibling: [bs, n] int.
        uniform_samples: [bs, n] float32 in [0, 1): a node's coin judges its children.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1).
        target_probs: [bs, n, V] float32 or bfloat16.
        draft_probs: [bs, n, V] of the same dtype, **mutated**: rejected children's target probabilities are written
            into it. None means zeros; then nothing of size V is written.
        threshold_single: a child of at least this target probability is accepted whatever the coin.
        threshold_acc: divides the running sum; at least 1e-9.
        deterministic: has no effect: the same inputs always give the same bits.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or an output too small, naming the argument.
    """
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    coins = (uniform_samples, uniform_samples_for_final_sampling)
    _check_outputs(predicts, accept_index, accept_token_num, candidates)
    _check_inputs(links, coins, target_probs, draft_probs)
    if candidates.numel() == 0:
        return
    run = _launch if uses_triton(candidates) else tree_speculative_sampling_target_only_reference
    flat = predicts.contiguous().view(-1)
    run(
        flat, accept_index, accept_token_num, *links, *coins, target_probs, draft_probs, threshold_single, threshold_acc
    )
    if not predicts.is_contiguous():
        predicts.copy_(flat.view_as(predicts))


def _check_outputs(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor
) -> None:
    check_shape("candidates", candidates, ("bs", "n"))
    check_shape("accept_index", accept_index, ("bs", "S"))
    check_shape("accept_token_num", accept_token_num, ("bs",))
    requests, nodes = candidates.shape
    for name, given, needed in (
        ("predicts", predicts.numel(), requests * nodes),
        ("accept_index", accept_index.shape[0], requests),
        ("accept_index columns", accept_index.shape[1], 1),
        ("accept_token_num", accept_token_num.numel(), requests),
    ):
        if given < needed:
            raise ValueError(f"{name}: size {given} given, at least {needed} needed")
    outputs = {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accept_token_num}
    for name, tensor in outputs.items():
        _check_kind(name, tensor, (torch.int32, torch.int64), candidates.device)


def _check_inputs(
    links: tuple[torch.Tensor, ...],
    coins: tuple[torch.Tensor, torch.Tensor],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> None:
    requests, nodes = links[0].shape
    device = links[0].device
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
    for name, tensor in zip(names, links, strict=True):
        check_shape(name, tensor, (requests, nodes))
        _check_kind(name, tensor, (torch.int32, torch.int64), device)
    shapes = ((requests, nodes), (requests,))
    for name, tensor, shape in zip(
        ("uniform_samples", "uniform_samples_for_final_sampling"), coins, shapes, strict=True
    ):
        check_shape(name, tensor, shape)
        _check_kind(name, tensor, (torch.float32,), device)
    check_shape("target_probs", target_probs, (requests, nodes, "V"))
    _check_kind("target_probs", target_probs, (torch.float32, torch.bfloat16), device)
    if target_probs.shape[2] == 0:
        raise ValueError("target_probs: vocabulary of 0 given, at least 1 needed")
    if draft_probs is not None:
        check_shape("draft_probs", draft_probs, tuple(target_probs.shape))
        _check_kind("draft_probs", draft_probs, (target_probs.dtype,), device)


def _check_kind(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype} given, {' or '.join(map(str, dtypes))} needed")
    if tensor.device != device:
        raise ValueError(f"{name}: device {tensor.device} given, {device} (that of candidates) needed")


def tree_speculative_sampling_target_only_reference(
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
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> None:
    """`tree_speculative_sampling_target_only`, one request after the other; `predicts` is flat."""
    single, total = _thresholds(threshold_single, threshold_acc)
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    columns = [tensor.tolist() for tensor in (*links, uniform_samples)]
    for request, (tokens, rows, children, siblings, coins) in enumerate(zip(*columns, strict=True)):
        accept_token_num[request] = 0
        if not 0 <= rows[0] < candidates.numel():
            continue
        accept_index[request, 0] = rows[0]
        accepted, node, rejected = 0, 0, []
        while accepted < accept_index.shape[1] - 1:
            family = _children(children[node], siblings)
            family = [
                child
                for child in family
                if 0 <= tokens[child] < target_probs.shape[2] and 0 <= rows[child] < candidates.numel()
            ]
            probabilities = target_probs[request, node, [tokens[child] for child in family]].tolist()
            chosen = _first_accepted(probabilities, coins[node], single, total)
            rejected = [tokens[child] for child in family[:chosen]]
            if draft_probs is not None:
                draft_probs[request, node, rejected] = target_probs[request, node, rejected]
            if chosen is None:
                break
            predicts[rows[node]] = tokens[family[chosen]]
            accepted, node, rejected = accepted + 1, family[chosen], []
            accept_index[request, accepted] = rows[node]
        accept_token_num[request] = accepted
        residual = target_probs[request, node].float()
        if draft_probs is not None and accepted < accept_index.shape[1] - 1:
            residual = residual - draft_probs[request, node].float()
        residual = residual.clamp(min=0).index_fill(0, torch.tensor(rejected, dtype=torch.long).to(residual.device), 0)
        token = residual_tokens_reference(residual[None], uniform_samples_for_final_sampling[request, None])
        predicts[rows[node]] = token[0].to(predicts.dtype)


def _thresholds(single: float, total: float) -> list[float]:
    """Both in float32, like the probabilities that they are compared with."""
    return torch.tensor([single, max(total, _SMALLEST_THRESHOLD)], dtype=torch.float32).tolist()


def _children(first: int, siblings: list[int]) -> list[int]:
    """A node's children in sibling order, at most n of them."""
    family = []
    while 0 <= first < len(siblings) and len(family) < len(siblings):
        family.append(first)
        first = siblings[first]
    return family


def _first_accepted(probabilities: list[float], coin: float, single: float, total: float) -> int | None:
    """Which of the children is accepted, given their target probabilities."""
    running = 0.0
    for place, probability in enumerate(probabilities):
        running += probability
        if probability > 0 and (coin < running / total or probability >= single):
            return place
    return None


def _launch(
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
        *_thresholds(threshold_single, threshold_acc),
        HAS_DRAFT=draft is not None,
        NODES=triton.next_power_of_2(nodes),
        LANES=min(triton.next_power_of_2(nodes), 32),
        num_warps=1,
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
    family = tl.full([LANES], -1, tl.int64)
    count = tl.full([], 0, tl.int32)
    more = nodes > 0
    while more:
        family = tl.where(lanes == count, child, family)
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
    threshold_acc,
    HAS_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """The accepted one of a node's children, of which `child` is the first, or -1; and how many were visited.

    Rejected children's probabilities go to the node's row of the draft, or else their tokens to `excluded`.
    """
    lanes = tl.arange(0, LANES)
    visited = tl.full([], 0, tl.int32)
    running = tl.full([], 0.0, tl.float64)
    chosen = tl.full([], -1, tl.int64)
    searching = (child >= 0) & (child < nodes)
    while searching:
        # Up to LANES siblings are judged together: their probabilities come in one trip to memory.
        family, count, child = _siblings(next_sibling_ptr, child, nodes - visited, nodes, LANES)
        token = tl.load(candidates_ptr + family, mask=lanes < count, other=-1).to(tl.int64)
        row = tl.load(retrive_index_ptr + family, mask=lanes < count, other=-1).to(tl.int64)
        usable = (token >= 0) & (token < vocab_size) & (row >= 0) & (row < all_rows)
        probability = tl.load(target_ptr + token, mask=usable, other=0.0).to(tl.float32)
        sums = running + tl.cumsum(probability.to(tl.float64), 0)
        passes = usable & (probability > 0) & ((coin < sums / threshold_acc) | (probability >= threshold_single))
        # Lane and node in one number, so that one reduction finds both.
        best = tl.min(tl.where(passes, (lanes.to(tl.int64) << 32) | family, LANES << 32))
        rejected = usable & (lanes < (best >> 32))
        if HAS_DRAFT:
            tl.store(draft_ptr + token, probability.to(draft_ptr.dtype.element_ty), mask=rejected)
        else:
            excluded = tl.where(rejected, token, -1).to(tl.int32)
            tl.store(excluded_ptr + visited + lanes, excluded, mask=lanes < count)
        visited += count
        running += tl.sum(probability.to(tl.float64))
        chosen = tl.where((best >> 32) < LANES, best & 0xFFFFFFFF, -1)
        searching = (chosen < 0) & (child >= 0) & (child < nodes) & (visited < nodes)
    return chosen, visited


@jit
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
):
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
            tl.load(coins_ptr + base + node).to(tl.float64),
            target_ptr + node * target_row_stride,
            draft_ptr + node * draft_row_stride,
            excluded_ptr + base,
            nodes,
            all_rows,
            vocab_size,
            threshold_single,
            threshold_acc,
            HAS_DRAFT,
            LANES,
        )
        walking = chosen >= 0
        if walking:
            emitted = tl.load(candidates_ptr + base + chosen)
            tl.store(predicts_ptr + last, emitted.to(predicts_ptr.dtype.element_ty))
            node = chosen
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
