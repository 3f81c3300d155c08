"""When to fire: whether a free target should wait for more growth, or verify what is there.

The next growth of a draft adds children to the best leaves of its trees. If it is expected in `w` nanoseconds, waiting
costs `rate * w` tokens, rate being the tokens per nanosecond that the target's sessions emit now. It earns a share of
the sum of the leaves' path values. Wait while that earns more; a hard cap bounds the wait of a round, and a draft that
is overdue is not waited for at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.tree import Node

# What a leaf's children are worth now, in tokens per path value of the leaf: some child is right about nine times in
# ten (measured on the embedded pair), but part of what comes too late for this round still serves the next. That part
# is assumed to be half; docs/performance.md has what was compared.
LEAF_GAIN = 0.45
# Leaves that one draft step expands for a session.
STEP_WIDTH = 8
# How many mean deviations past its mean an answer still counts as on its way.
_PATIENT_DEVIATIONS = 3.0


class Latency:
    """Running mean and mean deviation of a time, as TCP keeps them of its round trips."""

    def __init__(self) -> None:
        self.mean_ns = 0.0
        self.deviation_ns = 0.0

    def observe(self, elapsed_ns: float) -> None:
        """One measured time."""
        if not self.mean_ns:
            self.mean_ns, self.deviation_ns = elapsed_ns, elapsed_ns / 2
            return
        # A pause of the whole machine must not teach patience: it counts as twice the mean at most.
        error_ns = min(elapsed_ns, 2 * self.mean_ns) - self.mean_ns
        self.mean_ns += error_ns / 8
        self.deviation_ns += (abs(error_ns) - self.deviation_ns) / 4

    def left_ns(self, elapsed_ns: float) -> float | None:
        """Expected time still to wait after `elapsed_ns`; None when nothing is known, or it is overdue."""
        if not self.mean_ns or elapsed_ns > self.mean_ns + _PATIENT_DEVIATIONS * self.deviation_ns:
            return None
        return max(self.mean_ns - elapsed_ns, self.deviation_ns, 0.05 * self.mean_ns)


@dataclass(frozen=True, kw_only=True)
class GrowthForecast:
    """When a session's draft is expected to speak next.

    Attributes:
        since_ns: when what it answers happened: the commit it has not spoken to yet, or its last growth.
        latency: how long that takes it.
    """

    since_ns: int
    latency: Latency

    def due_in_ns(self, now_ns: int) -> float | None:
        """Time until the next growth; None when it is overdue."""
        return self.latency.left_ns(now_ns - self.since_ns)


def leaf_gain(root: Node, candidates: Sequence[Node], *, max_depth: int) -> float:
    """Expected tokens that one more draft step adds to a session's submission."""
    if not root.children:
        return LEAF_GAIN if max_depth > 0 else 0.0
    leaves = [node.path_value for node in candidates if not node.children and node.depth < max_depth]
    return LEAF_GAIN * sum(leaves[:STEP_WIDTH])


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
