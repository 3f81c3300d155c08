"""What of a successor survives, as one loop over its nodes (torch-free).

For where numba is there; without it `outrider.succession` does the same with numpy, whole columns at a time. A device
may wait for it, and with few sessions numpy's time is that of its calls.

Shapes: as in `outrider.succession`.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled

_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1


@compiled
def survivors(  # noqa: PLR0917
    is_in_step: Any,
    verified: Any,
    counts: Any,
    tokens: Any,
    parents: Any,
    values: Any,
    max_nodes: Any,
    max_depths: Any,
    ends: Any,
    finals: Any,
    least_value: Any,
    max_total_nodes: int,
) -> tuple[Any, Any, Any]:
    """Fields of a `Succession`, then the numbers of the last accepted nodes and the final tokens.

    Returns:
        Counts, nodes and parents as of `Survivors`.
    """
    sessions, total = len(counts), len(tokens)
    kept, roots = np.zeros(sessions, np.int64), np.full(sessions, -1)
    nodes, depths, keys = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    # The bits of a float of 0 to 1 are in its order, but for a negative zero's.
    bits = values.view(np.int32)
    first, found, followed = 0, 0, 0
    for session in range(sessions):
        end = first + counts[session]
        if not is_in_step[session]:
            for place in range(first, end):
                nodes[found] = place
                found += 1
            kept[session] = end - first
            first = end
            continue
        above_first = first - verified[session] - 1
        root, surviving, floor = -1, 0, np.float32(0.0)
        for place in range(first, end):
            depths[place] = -1
            if parents[place] == ends[session] and tokens[place] == finals[session]:
                # Of several the first, as a tree's first child is the one that counts.
                if root < 0:
                    root, floor, depths[place] = place, values[place] * least_value, 0
                continue
            above = above_first + parents[place]
            if above < first or depths[above] < 0:
                continue
            depths[place] = depths[above] + 1
            if depths[place] <= max_depths[session] and values[place] >= floor:
                keys[surviving] = -max(np.int64(bits[place]), 0) << _PLACE_BITS | place
                surviving += 1
        best = keys[:surviving]
        best.sort()
        kept[session], roots[session] = min(surviving, max_nodes[session]), root
        for rank in range(kept[session]):
            nodes[found] = best[rank] & _PLACE
            found += 1
        followed += kept[session]
        first = end
    if followed > max_total_nodes:
        found = _best_of_all(is_in_step, kept, nodes, values, roots, max_total_nodes)
    return kept, nodes[:found], _parents(verified, counts, parents, kept, nodes[:found])


@compiled
def surviving_rows(  # noqa: PLR0917
    is_in_step: Any,
    verified: Any,
    counts: Any,
    tokens: Any,
    parents: Any,
    values: Any,
    max_nodes: Any,
    max_depths: Any,
    ends: Any,
    finals: Any,
    least_value: Any,
    max_total_nodes: int,
    is_asked: Any,
) -> tuple[Any, Any, Any]:
    """`survivors` as the rows of a step: a root of token 0 and parent 0 before the nodes of each session.

    Args:
        is_asked: bool [S] of which sessions there are rows; no nodes survive of the others.

    Returns:
        Rows of each session that is asked for, and tokens and parents of all of these.
    """
    kept, nodes, numbers = survivors(
        is_in_step, verified, counts, tokens, parents, values, max_nodes, max_depths, ends, finals, least_value,
        max_total_nodes,
    )  # fmt: skip
    asked = 0
    for session in range(len(kept)):
        asked += is_asked[session]
    rows = np.empty(asked, np.int64)
    row_tokens, row_parents = np.zeros(asked + len(nodes), np.int64), np.zeros(asked + len(nodes), np.int64)
    asked, row, node = 0, 0, 0
    for session in range(len(kept)):
        if not is_asked[session]:
            continue
        rows[asked] = kept[session] + 1
        asked += 1
        row += 1
        for _ in range(kept[session]):
            row_tokens[row], row_parents[row] = tokens[nodes[node]], numbers[node]
            row += 1
            node += 1
    return rows, row_tokens, row_parents


@compiled
def _best_of_all(  # noqa: PLR0917
    is_in_step: Any, kept: Any, nodes: Any, values: Any, roots: Any, max_total_nodes: int
) -> int:
    """Leaves so many nodes of the sessions that are in the step, those of the highest share; how many are left."""
    shares, keys = np.zeros(kept.sum(), np.float32), np.empty(kept.sum(), np.int64)
    bits = shares.view(np.int32)
    place, asked = 0, 0
    for session in range(len(kept)):
        for _ in range(kept[session]):
            if is_in_step[session]:
                above = max(values[roots[session]], np.float32(1e-30))
                # A negative zero's bits are not in order.
                shares[place] = values[nodes[place]] / above + np.float32(0.0)
                keys[asked] = -np.int64(bits[place]) << _PLACE_BITS | place
                asked += 1
            place += 1
    best = keys[:asked]
    best.sort()
    stays = np.zeros(len(shares), np.bool_)
    for rank in range(max_total_nodes):
        stays[best[rank] & _PLACE] = True
    place, left = 0, 0
    for session in range(len(kept)):
        count = kept[session]
        for _ in range(count):
            if is_in_step[session] and not stays[place]:
                kept[session] -= 1
            else:
                nodes[left] = nodes[place]
                left += 1
            place += 1
    return left


@compiled
def _parents(verified: Any, counts: Any, parents: Any, kept: Any, nodes: Any) -> Any:
    """[n] of the nodes that are verified: the new root has number 0, and so has whatever was not sent now."""
    numbers, found = np.zeros(len(parents), np.int64), np.empty(len(nodes), np.int64)
    first, begin = 0, 0
    for session in range(len(counts)):
        for rank in range(kept[session]):
            numbers[nodes[begin + rank]] = rank + 1
        for place in range(begin, begin + kept[session]):
            above = first + parents[nodes[place]] - verified[session] - 1
            found[place] = 0 if above < first else numbers[above]
        begin += kept[session]
        first += counts[session]
    return found


def warm_up() -> None:
    """Compiles the loops, or loads what was compiled, before anybody waits for them."""
    none, nothing = np.zeros(0, np.bool_), np.zeros(0, np.int64)
    values = np.zeros(0, np.float32)
    survivors(none, nothing, nothing, nothing, nothing, values, nothing, nothing, nothing, nothing, np.float32(0.0), 0)
    surviving_rows(
        none, nothing, nothing, nothing, nothing, values, nothing, nothing, nothing, nothing, np.float32(0.0), 0, none
    )  # fmt: skip
