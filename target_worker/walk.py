"""The walk down verified trees: the operator for all sessions at once, then each session's own ends."""

from collections.abc import Sequence

import numpy as np
import torch

from outrider.kernels.verify_tree import verify_tree_greedy


def accepted_paths(
    choices: torch.Tensor, trees: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[list[list[int]], list[int]]:
    """Walks every tree along the target's choices.

    Args:
        choices: [T] int64, the tokens chosen at the root and the n nodes of every tree, tree after tree, on the
            target's device.
        trees: per tree, tokens [n] and parents [n] (node numbers, 0 the root) of nodes 1 to n.

    Returns:
        Per tree, the accepted nodes, root to leaf, the root left out; and the choices [T], on the host.
    """
    width = 1 + max(len(tokens) for tokens, _ in trees)
    rows = np.full((len(trees), width), -1, dtype=np.int64)
    candidates, first_child, next_sibling = rows.copy(), rows.copy(), rows.copy()
    first = 0
    for place, (tokens, parents) in enumerate(trees):
        count = 1 + len(tokens)
        rows[place, :count] = np.arange(first, first + count)
        candidates[place, 1:count] = tokens
        _link(parents, first_child[place], next_sibling[place])
        first += count
    device = choices.device
    accept_index = torch.zeros((len(trees), width), dtype=torch.int32, device=device)
    accepted = torch.zeros(len(trees), dtype=torch.int32, device=device)
    # The operator wants a choice for every cell of its padded trees; rows past T are never visited.
    padded = torch.zeros(rows.size, dtype=torch.int64, device=device)
    padded[:first] = choices
    verify_tree_greedy(
        torch.zeros_like(padded),
        accept_index,
        accepted,
        torch.from_numpy(candidates).to(device),
        torch.from_numpy(rows).to(device),
        torch.from_numpy(first_child).to(device),
        torch.from_numpy(next_sibling).to(device),
        padded.view(rows.shape),
    )
    walked = zip(accept_index.tolist(), accepted.tolist(), strict=True)
    paths = [[row - path[0] for row in path[1 : count + 1]] for path, count in walked]
    return paths, choices.tolist()


def _link(parents: Sequence[int], first_child: np.ndarray, next_sibling: np.ndarray) -> None:
    """Writes the retrieve links of one tree (see `outrider.kernels.verify_tree`)."""
    newest: dict[int, int] = {}
    for number, parent in enumerate(parents, start=1):
        if parent in newest:
            next_sibling[newest[parent]] = number
        else:
            first_child[parent] = number
        newest[parent] = number


def emit(
    path: Sequence[int], choices: Sequence[int], *, stop_token_ids: frozenset[int], room: int
) -> tuple[list[int], list[int]]:
    """Where a walk ends for its session: at a stop token, or with the last token that may be emitted.

    Args:
        path: the accepted nodes, root to leaf.
        choices: [n + 1] the token chosen at the root and at each node.
        stop_token_ids: the walk ends at these.
        room: most tokens that may be emitted, at least 1.

    Returns:
        The accepted nodes, and the emitted tokens: those of the accepted nodes and the final choice, which is left out
        where a stop token or `room` ended the walk at an accepted node.
    """
    emitted: list[int] = []
    for node in (0, *path):
        emitted.append(choices[node])
        if len(emitted) == room or choices[node] in stop_token_ids:
            break
    return list(path[: len(emitted)]), emitted
