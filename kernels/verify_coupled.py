"""Verification under coupled sampling: the target's choice at every row, then the walk down each tree.

    choices = coupled_choice(logits, ...)           argmax(log p + G) of every row
    walk    = verify_tree_greedy along `choices`    accepted nodes, emitted tokens

One launch sequence for the whole batch, without a word to the host between the two: it can be captured in a graph.
Trees are padded to n nodes, rows are not: row `retrive_index[b, i]` holds the logits of node i of request b, and -1
stands for a node that is not there. Malformed links do as little harm as in `outrider.kernels.verify_tree`, whose
conventions hold here with T in the place of bs * n; a row may also belong to no tree, or to several.

Shapes: T rows of logits, V vocabulary size, bs requests, n nodes of a request with its root, S nodes of the deepest
path, so at most S - 1 are accepted.
"""

# operators take positional columns
# ruff: noqa: PLR0917

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import check_at_least, check_dtype, check_place
from outrider.kernels.backend import check_shape, uses_triton
from outrider.kernels.coupled_sampling import coupled_choice_reference
from outrider.kernels.coupled_sampling_kernels import launch_choice
from outrider.kernels.sampling_rows import SamplingRows, checked_rows
from outrider.kernels.verify_tree import launch_verify_tree_greedy, verify_tree_greedy_reference

__all__ = ["verify_coupled", "verify_coupled_reference"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TreeWalk:
    """Checked trees [bs, n] and outputs of a walk, under the names of `verify_coupled`'s arguments."""

    candidates: torch.Tensor
    retrive_index: torch.Tensor
    retrive_next_token: torch.Tensor
    retrive_next_sibling: torch.Tensor
    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor


def verify_coupled(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    logit_bias: torch.Tensor | None = None,
    *,
    choice_index: torch.Tensor | None = None,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> torch.Tensor:
    """Choose at every row, and write which nodes of each tree the choices accept.

    The tokens emitted for request b are `predicts[accept_index[b, 0 .. accept_token_num[b]]]`; entries off the path
    keep their values.

    Args:
        logits: [T, V] float32, bfloat16 or float16, and the seven columns [T] after it: as `coupled_choice` takes them.
        logit_bias: [T, V] added to the logits, or None.
        choice_index: [T] int32 or int64, or None.
        candidates: [bs, n] int, the nodes' tokens.
        retrive_index: [bs, n] int, each node's row of `logits`; -1 for none.
        retrive_next_token: [bs, n] int, each node's first child; -1 for none.
        retrive_next_sibling: [bs, n] int, the next child of a node's parent; -1 for none.
        predicts: [T] int32, written: the emitted token at each row of a path.
        accept_index: [bs, S] int32, written: the rows of the path, root first.
        accept_token_num: [bs] int32, written: accepted nodes, the final token not counted.

    Returns:
        The choices [T] int64.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or an output too small, naming the argument.
    """
    rows = checked_rows(logits, seeds, positions, temperature, top_k, top_p, min_p, logit_bias, choice_index)
    walk = TreeWalk(
        candidates=candidates,
        retrive_index=retrive_index,
        retrive_next_token=retrive_next_token,
        retrive_next_sibling=retrive_next_sibling,
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
    )
    _check_walk(walk, rows.logits)
    if not uses_triton(logits):
        return verify_coupled_reference(rows, walk)
    choices = launch_choice(rows)
    _launch_walk(choices, walk)
    return choices


def verify_coupled_reference(rows: SamplingRows, walk: TreeWalk) -> torch.Tensor:
    """`verify_coupled` in plain torch: the two references, one after the other."""
    choices = coupled_choice_reference(rows)
    if walk.candidates.numel() > 0:
        verify_tree_greedy_reference(
            walk.predicts,
            walk.accept_index,
            walk.accept_token_num,
            walk.candidates,
            walk.retrive_index,
            walk.retrive_next_token,
            walk.retrive_next_sibling,
            choices,
        )
    return choices


def _check_walk(walk: TreeWalk, logits: torch.Tensor) -> None:
    check_shape("candidates", walk.candidates, ("bs", "n"))
    requests, nodes = walk.candidates.shape
    for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling"):
        check_shape(name, getattr(walk, name), (requests, nodes))
    check_shape("predicts", walk.predicts, ("T",))
    check_shape("accept_index", walk.accept_index, ("bs", "S"))
    check_shape("accept_token_num", walk.accept_token_num, ("bs",))
    check_at_least("predicts size", walk.predicts.shape[0], logits.shape[0])
    check_at_least("accept_index rows", walk.accept_index.shape[0], requests)
    check_at_least("accept_index columns", walk.accept_index.shape[1], 1)
    check_at_least("accept_token_num size", walk.accept_token_num.shape[0], requests)
    for name in TreeWalk.__slots__:
        tensor = getattr(walk, name)
        check_dtype(name, tensor)
        check_place(name, tensor, logits.device, "logits")


def _launch_walk(choices: torch.Tensor, walk: TreeWalk) -> None:
    if walk.candidates.numel() == 0:
        return
    predicts = walk.predicts.contiguous()
    launch_verify_tree_greedy(
        predicts,
        walk.accept_index,
        walk.accept_token_num,
        walk.candidates,
        walk.retrive_index,
        walk.retrive_next_token,
        walk.retrive_next_sibling,
        choices,
    )
    if not walk.predicts.is_contiguous():
        walk.predicts.copy_(predicts)
