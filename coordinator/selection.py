"""Which nodes go into a batch: the expected tokens per second is maximised over all sessions together.

A verification of session s emits 1 + the sum of its submitted nodes' path values, in expectation. For S sessions and
k nodes a step costs T(S + k), so the best k maximises (S + sum of the k best values) / T(S + k). The k best nodes
over all sessions are ancestor-closed, because values fall along every path. A T that is a staircase is read at every k,
so the best k lies at the edge of a stair unless the nodes end before it.

n: candidates of all sessions, S: sessions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED
from outrider.coordinator.choice_kernels import best_count

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]
_ONE = int(np.float32(1.0).view(np.int32))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How many of each session's best nodes are sent.

    Attributes:
        counts: [S]
        emitted: expected tokens of the step.
    """

    counts: Ints
    emitted: float


def choose_counts(
    values: Floats,
    places: Ints,
    *,
    sessions: int,
    cost_ns: Callable[[Ints], Floats],
    max_rows: int,
    fair_slowdown: float = float("inf"),
) -> Choice:
    """The best number of nodes of each session.

    Args:
        values: [n] path values, falling within a session.
        places: [n] whose they are, 0 to S - 1.
        sessions: S.
        cost_ns: T of numbers of rows [m], in nanoseconds [m].
        max_rows: most rows of a step, roots included.
        fair_slowdown: a session may not be served slower than by this factor than if nobody speculated.
    """
    order = _falling(values)[: max(0, max_rows - sessions)]
    costs = cost_ns(sessions + np.arange(len(order) + 1))
    if IS_COMPILED:
        count, emitted = best_count(values, order, costs, sessions)
    else:
        tokens = sessions + np.concatenate(([0.0], np.cumsum(values[order])))
        count = int(np.argmax(tokens / costs))
        emitted = float(tokens[count])
    if costs[count] > fair_slowdown * costs[0]:
        count = _fair_count(count, values[order], places[order], costs / costs[0] / fair_slowdown, sessions)
        emitted = sessions + float(values[order[:count]].sum())
    counts = np.bincount(places[order[:count]], minlength=sessions)
    return Choice(counts=counts, emitted=emitted)


def _falling(values: Floats) -> Ints:
    """The places of path values, the highest first, equal ones as they come: parents before their children."""
    # The bits of a float of 0 to 1 are in its order, and one whole number each is sorted far sooner than by a stable
    # sort; what float32 cannot tell apart is equal.
    worth = values.astype(np.float32).view(np.int32).astype(np.int64)
    keys = (_ONE - worth) << 32 | np.arange(len(values))
    keys.sort()
    return keys & 0xFFFFFFFF


def _fair_count(count: int, values: Floats, places: Ints, needed: Floats, sessions: int) -> int:
    """The largest number of nodes, `count` at most, at which every session is expected to emit what it needs."""
    while count and needed[count] > 1:
        emitted = 1 + np.bincount(places[:count], weights=values[:count], minlength=sessions)
        if emitted.min() >= needed[count]:
            break
        # A session without nodes of its own stays at one token: what is over that goes at once.
        count = int(np.searchsorted(needed[:count], max(1.0, float(emitted.min())), side="right")) - 1
    return max(count, 0)


def choose_each(places: Ints, *, sessions: int, count: int) -> Ints:
    """[S] the `count` best of every session, or what it has."""
    return np.minimum(np.bincount(places, minlength=sessions), count)
