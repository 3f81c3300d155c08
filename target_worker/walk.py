"""The walk down a verified tree (torch-free)."""

from collections.abc import Sequence


def walk(
    choices: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    stop_token_ids: frozenset[int],
    room: int,
) -> tuple[list[int], list[int]]:
    """Follows the target's choices down a tree.

    The same walk as the operator `verify_tree_greedy`, here on the host: the choices must come to the host anyway, and
    a walk over a few of them costs less than the launch that would replace it.

    Args:
        choices: [n + 1] the token chosen at the root and at each node.
        tokens: [n] of nodes 1 to n.
        parents: [n] node numbers, 0 the root.
        stop_token_ids: the walk ends at these.
        room: most tokens that may be emitted, at least 1.

    Returns:
        The accepted nodes, root to leaf, and the emitted tokens: those of the accepted nodes and the final choice,
        which is left out where a stop token or `room` ended the walk at an accepted node.
    """
    children: dict[tuple[int, int], int] = {}
    for number, edge in enumerate(zip(parents, tokens, strict=True), start=1):
        children.setdefault(edge, number)
    accepted: list[int] = []
    emitted: list[int] = []
    node = 0
    while len(emitted) < room:
        token = choices[node]
        emitted.append(token)
        child = children.get((node, token))
        if child is None:
            break
        accepted.append(child)
        if token in stop_token_ids:
            break
        node = child
    return accepted, emitted
