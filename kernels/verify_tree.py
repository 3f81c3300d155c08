"""Greedy verification of token trees: walk down from the root along the target's own choices.

    last = retrive_index[b, 0]
    while some child of the node at `last` holds target_predict[last]: accept it, last = its row
    the accepted nodes are emitted, and then target_predict[last]

Under coupled sampling the choices are argmax(log p + G), and the same walk serves.

Trees come as retrieve links: node 0 is the root, `retrive_next_token` a node's first child and `retrive_next_sibling`
the next child of its parent, -1 for none; `retrive_index[b, i]` is node i's row in the flattened batch. The spelling
"retrive" is the field's. Malformed links do no harm: a link outside [0, n) ends its list, at most n siblings are
visited per level, and a candidate below 0 or a row outside [0, bs * n) is skipped; a request whose root row is outside
accepts nothing and emits nothing.

Shapes: bs requests, n nodes of a request with its root, S = nodes of the deepest path, so at most S - 1 are accepted.
Source: EAGLE-2, arXiv 2406.16858; operator of the same name in SGLang's kernel library.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import check_dtype, check_place, write_back
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.verification.tree_links import check_walk, children_of

__all__ = ["follow_choices", "verify_tree_greedy", "verify_tree_greedy_reference"]


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Write which nodes of each tree the target accepts; entries off the path keep their values.

    The tokens emitted for request b are `predicts[accept_index[b, 0 .. accept_token_num[b]]]`.

    Args:
        predicts: [bs * n] int32, written: the emitted token at each row of the path.
        accept_index: [bs, S] int32, written: the rows of the path, root first.
        accept_token_num: [bs] int32, written: accepted nodes, the final token not counted.
        candidates: [bs, n] int, the nodes' tokens.
        retrive_index: [bs, n] int.
        retrive_next_token: [bs, n] int.
        retrive_next_sibling: [bs, n] int.
        target_predict: [bs, n] or flat int, the target's choice at every node.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or an output too small, naming the argument.
    """
    walk = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    check_walk(predicts, accept_index, accept_token_num, *walk)
    shape = tuple(candidates.shape) if target_predict.dim() > 1 else (candidates.numel(),)
    check_shape("target_predict", target_predict, shape)
    check_dtype("target_predict", target_predict)
    check_place("target_predict", target_predict, candidates.device, "candidates")
    follow_choices(predicts, accept_index, accept_token_num, *walk, target_predict)


def follow_choices(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    *links: torch.Tensor,
) -> None:
    """`verify_tree_greedy` of checked arguments; `target_predict` may have any number of rows."""
    if links[0].numel() == 0:
        return
    run = _launch if uses_triton(links[0]) else verify_tree_greedy_reference
    flat = predicts.contiguous().view(-1)
    run(flat, accept_index, accept_token_num, *links)
    write_back([predicts], [flat])


def verify_tree_greedy_reference(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """`verify_tree_greedy` in plain Python over one request after the other; `predicts` is flat."""
    targets = target_predict.reshape(-1).tolist()
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    columns = zip(*(tensor.tolist() for tensor in links), strict=True)
    for request, (tokens, rows, children, siblings) in enumerate(columns):
        node, path = 0, [row for row in rows[:1] if 0 <= row < len(targets)]
        while path and len(path) < accept_index.shape[1]:
            wanted = targets[path[-1]]
            for child in children_of(children[node], siblings):
                if tokens[child] == wanted >= 0 and 0 <= rows[child] < len(targets):
                    node = child
                    path.append(rows[child])
                    break
            else:
                break
        accept_token_num[request] = max(len(path) - 1, 0)
        on_path = torch.tensor(path, dtype=torch.int64, device=predicts.device)
        accept_index[request, : len(path)] = on_path.to(accept_index.dtype)
        predicts[on_path] = target_predict.reshape(-1)[on_path].to(predicts.dtype)


def _launch(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    *links_and_targets: torch.Tensor,
) -> None:
    requests, nodes = candidates.shape
    path_nodes = accept_index.shape[1]
    block = triton.next_power_of_2(max(nodes, 32))
    _verify_tree_greedy_kernel[(requests,)](
        predicts,
        accept_index,
        accept_token_num,
        candidates.contiguous(),
        *(tensor.contiguous() for tensor in links_and_targets),
        accept_index.stride(0),
        accept_index.stride(1),
        accept_token_num.stride(0),
        nodes,
        links_and_targets[-1].numel(),
        path_nodes,
        N=block,
        P=triton.next_power_of_2(max(path_nodes, 32)),
        STEPS=(path_nodes - 1).bit_length(),
        num_warps=min(max(block // 64, 1), 4),
    )


@jit(do_not_specialize=["accept_row_stride", "nodes", "all_rows", "path_nodes"])
def _verify_tree_greedy_kernel(
    predicts_ptr,  # [bs * n] int32
    accept_index_ptr,  # [bs, S] int32
    accept_token_num_ptr,  # [bs] int32
    candidates_ptr,  # [bs, n] int
    retrive_index_ptr,  # [bs, n] int
    next_token_ptr,  # [bs, n] int
    next_sibling_ptr,  # [bs, n] int
    target_predict_ptr,  # [bs * n] int
    accept_row_stride,
    accept_stride,
    num_stride,
    nodes,
    all_rows,
    path_nodes,
    N: tl.constexpr,
    P: tl.constexpr,
    STEPS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * nodes
    step_to = _accepted_children(
        candidates_ptr + base,
        retrive_index_ptr + base,
        next_token_ptr + base,
        next_sibling_ptr + base,
        target_predict_ptr,
        nodes,
        all_rows,
        N,
    )
    # The node after `order` steps down from the root, -1 past the path's end: every lane takes the steps of its
    # binary digits, and `step_to` doubles its stride from digit to digit.
    order = tl.arange(0, P)
    node = tl.zeros([P], tl.int32)
    for digit in tl.static_range(STEPS):
        stepped = tl.gather(step_to, tl.maximum(node, 0), 0)
        node = tl.where((node >= 0) & (((order >> digit) & 1) != 0), stepped, node)
        step_to = tl.where(step_to >= 0, tl.gather(step_to, tl.maximum(step_to, 0), 0), -1)

    root = tl.load(retrive_index_ptr + base).to(tl.int64)
    on_path = (order < path_nodes) & (node >= 0) & _in_range(root, all_rows)
    row = tl.load(retrive_index_ptr + base + node, mask=on_path, other=0).to(tl.int64)
    token = tl.load(target_predict_ptr + row, mask=on_path, other=0)
    place = accept_index_ptr + request * accept_row_stride + order * accept_stride
    tl.store(place, row.to(accept_index_ptr.dtype.element_ty), mask=on_path)
    tl.store(predicts_ptr + row, token.to(predicts_ptr.dtype.element_ty), mask=on_path)
    accepted = tl.maximum(tl.sum(on_path.to(tl.int32)) - 1, 0)
    tl.store(accept_token_num_ptr + request * num_stride, accepted.to(accept_token_num_ptr.dtype.element_ty))


@jit
def _accepted_children(
    candidates_ptr,  # [n] int, of one request, as the next three
    retrive_index_ptr,  # [n] int
    next_token_ptr,  # [n] int
    next_sibling_ptr,  # [n] int
    target_predict_ptr,  # [bs * n] int
    nodes,
    all_rows,
    N: tl.constexpr,
):
    """[N] int32: the child that a walk accepts at each node, -1 for none; all sibling lists are searched at once."""
    number = tl.arange(0, N)
    row = tl.load(retrive_index_ptr + number, mask=number < nodes, other=-1).to(tl.int64)
    child = tl.load(next_token_ptr + number, mask=number < nodes, other=-1).to(tl.int64)
    wanted = tl.load(target_predict_ptr + row, mask=_in_range(row, all_rows), other=-1).to(tl.int64)
    accepted = tl.full([N], -1, tl.int32)
    child = tl.where(wanted >= 0, child, -1)
    visited = 0
    # Whether any lane still searches is asked of four siblings at a time. In between, lists are walked on past what is
    # found, as the way to the next sibling is what takes the time; after n steps a list holds nothing new.
    while (visited < nodes) & (tl.max(_in_range(child, nodes).to(tl.int32)) > 0):
        for _ in tl.static_range(4):
            live = _in_range(child, nodes)
            place = tl.where(live, child, 0).to(tl.int32)
            following = tl.load(next_sibling_ptr + place).to(tl.int64)
            token = tl.load(candidates_ptr + place).to(tl.int64)
            child_row = tl.load(retrive_index_ptr + place).to(tl.int64)
            found = live & (token == wanted) & _in_range(child_row, all_rows) & (accepted < 0)
            accepted = tl.where(found, place, accepted)
            child = tl.where(live, following, -1)
        child = tl.where(accepted < 0, child, -1)
        visited += 4
    return accepted


@jit
def _in_range(index, size):
    """Return whether 0 <= int64 `index` < size, in one comparison."""
    return index.to(tl.uint64, bitcast=True) < size
