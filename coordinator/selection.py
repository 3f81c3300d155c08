"""Which nodes go into a batch: the expected tokens per second is maximised over all sessions together.

A verification of session s emits 1 + the sum of its submitted nodes' path values, in expectation. For S sessions and
k nodes a step costs T(S + k), so the best k maximises (S + sum of the k best values) / T(S + k). The k best nodes
over all sessions are ancestor-closed, because values fall along every path.
"""

from collections.abc import Callable, Sequence
from heapq import merge

from outrider.tree import Node


def choose_nodes(
    candidates: Sequence[Sequence[Node]], *, cost_ns: Callable[[int], float], max_rows: int
) -> list[Sequence[Node]]:
    """The nodes to submit of each session.

    Args:
        candidates: per session, its best nodes in falling order of path value (as `TokenTree.best` gives them).
        cost_ns: T(n), the cost of a step of n rows.
        max_rows: most rows of a step, roots included.

    Returns:
        per session, a head of its candidates.
    """
    sessions = len(candidates)
    ranked = list(merge(*([(-node.path_value, place) for node in nodes] for place, nodes in enumerate(candidates))))
    tokens, best_rate, best_count = float(sessions), sessions / cost_ns(sessions), 0
    for count, (negative_value, _) in enumerate(ranked[: max(0, max_rows - sessions)], start=1):
        tokens -= negative_value
        rate = tokens / cost_ns(sessions + count)
        if rate > best_rate:
            best_rate, best_count = rate, count
    taken = [0] * sessions
    for _, place in ranked[:best_count]:
        taken[place] += 1
    return [nodes[:count] for nodes, count in zip(candidates, taken, strict=True)]
