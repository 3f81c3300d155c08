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

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import INDEX_DTYPES, check_at_least, check_tensors, write_back
from outrider.kernels.backend import uses_triton
from outrider.kernels.sampling.residual_sampling import residual_tokens_reference
from outrider.kernels.verification.tree_links import check_walk, children_of
from outrider.kernels.verification.tree_sampling_kernels import launch_tree_sampling, rounded_thresholds

__all__ = ["tree_speculative_sampling_target_only", "tree_speculative_sampling_target_only_reference"]


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
    check_walk(predicts, accept_index, accept_token_num, *links)
    check_tensors(
        candidates=(candidates, ("bs", "n"), INDEX_DTYPES),
        uniform_samples=(uniform_samples, ("bs", "n"), (torch.float32,)),
        uniform_samples_for_final_sampling=(coins[1], ("bs",), (torch.float32,)),
        target_probs=(target_probs, ("bs", "n", "V"), (torch.float32, torch.bfloat16)),
        draft_probs=(draft_probs, ("bs", "n", "V"), (target_probs.dtype,)),
    )
    check_at_least("target_probs vocabulary", target_probs.shape[2], 1)
    if candidates.numel() == 0:
        return
    run = launch_tree_sampling if uses_triton(candidates) else tree_speculative_sampling_target_only_reference
    flat = predicts.contiguous().view(-1)
    run(
        flat, accept_index, accept_token_num, *links, *coins, target_probs, draft_probs, threshold_single, threshold_acc
    )
    write_back([predicts], [flat])


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
    single, total = rounded_thresholds(threshold_single, threshold_acc)
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    columns = [tensor.tolist() for tensor in (*links, uniform_samples)]
    for request, (tokens, rows, children, siblings, coins) in enumerate(zip(*columns, strict=True)):
        accept_token_num[request] = 0
        if not 0 <= rows[0] < candidates.numel():
            continue
        accept_index[request, 0] = rows[0]
        accepted, node, rejected = 0, 0, []
        while accepted < accept_index.shape[1] - 1:
            family = [
                child
                for child in children_of(children[node], siblings)
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


def _first_accepted(probabilities: list[float], coin: float, single: float, total: float) -> int | None:
    """Return the first accepted child, given the children's target probabilities."""
    running = 0.0
    for place, probability in enumerate(probabilities):
        running += probability
        if probability > 0 and (coin * total < running or probability >= single):
            return place
    return None
