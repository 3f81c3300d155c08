"""When to fire: whether a free target should wait for more growth, or verify what is there.

The next growth of a draft adds children to the best leaves of its trees. If it is expected in `w` nanoseconds, waiting
costs `rate * w` tokens, rate being the tokens per nanosecond that the target's sessions emit now. It earns about the
sum of the leaves' path values times the chance that one of a leaf's children is right. Wait while that earns more; a
hard cap bounds the wait of a round, and a draft that is overdue is not waited for at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.tree import Node

# Chance that some child of an accepted node is the target's choice.
CHILD_HIT = 0.9
# Leaves that one draft step expands for a session.
STEP_WIDTH = 8
# A growth later than this many of its draft's steps is not coming soon.
OVERDUE_STEPS = 2.5


@dataclass(frozen=True, kw_only=True)
class GrowthForecast:
    """When a session's draft is expected to speak next.

    Attributes:
        last_ns: when it last spoke, or was told of a commit, whichever is later.
        step_ns: how long its steps take.
    """

    last_ns: int
    step_ns: float

    def due_in_ns(self, now_ns: int) -> float | None:
        """Time until the next growth; None when it is overdue."""
        since = now_ns - self.last_ns
        if self.step_ns <= 0 or since > OVERDUE_STEPS * self.step_ns:
            return None
        # Once late, the rest is as uncertain as a fresh half step.
        return max(self.step_ns - since, 0.5 * self.step_ns)


def leaf_gain(root: Node, candidates: Sequence[Node], *, max_depth: int) -> float:
    """Expected tokens that one more draft step adds to a session's submission."""
    if not root.children:
        return CHILD_HIT if max_depth > 0 else 0.0
    leaves = [node.path_value for node in candidates if not node.children and node.depth < max_depth]
    return CHILD_HIT * sum(leaves[:STEP_WIDTH])


def patience_ns(outlooks: Iterable[tuple[float, GrowthForecast]], *, rate: float, now_ns: int, left_ns: float) -> float:
    """How long to go on waiting before the question is asked again; 0 is fire.

    Args:
        outlooks: per session, what its next growth would earn and when it is expected.
        rate: tokens per nanosecond of all sessions of this target.
        left_ns: what is left of this round's cap.
    """
    arrivals = [(due, gain) for gain, forecast in outlooks if (due := forecast.due_in_ns(now_ns)) is not None]
    best_wait, best_profit, gained = 0.0, 0.0, 0.0
    # Never wait for one straggler: each arrival has to pay for all the waiting up to it.
    for due, gain in sorted(arrivals):
        gained += gain
        profit = gained - rate * due
        if due <= left_ns and profit > best_profit:
            best_wait, best_profit = due, profit
    return best_wait
