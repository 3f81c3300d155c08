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

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import check_place
from outrider.kernels.backend import uses_triton
from outrider.kernels.coupled_sampling import coupled_choice_reference
from outrider.kernels.sampling.coupled_kernels import launch_choice
from outrider.kernels.sampling.row_arguments import checked_rows
from outrider.kernels.verification.tree_links import check_walk
from outrider.kernels.verify_tree import follow_choices

__all__ = ["verify_coupled"]


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
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    check_walk(predicts, accept_index, accept_token_num, *links, rows=logits.shape[0])
    check_place("candidates", candidates, logits.device, "logits")
    choices = launch_choice(rows) if uses_triton(logits) else coupled_choice_reference(rows)
    follow_choices(predicts, accept_index, accept_token_num, *links, choices)
    return choices
