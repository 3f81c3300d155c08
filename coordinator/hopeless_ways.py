"""Which ways of timing a target's rounds need no trial: what its batches have shown says enough."""

from collections.abc import Collection

from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.group import Group
from outrider.coordinator.rounds import RoundPace, Way
from outrider.coordinator.successor import can_follow

# Two groups are tried where their steps would take less than this share of a round as it is.
_TRIED_SHARE = 1.1
# What a step of half the rows is hoped to take, by one of all of them, before one was seen.
_HOPED_HALF = 0.75


def hopeless_ways(ways: Collection[int], group: Group, sessions: int, *, cost: StepCost, pace: RoundPace) -> set[int]:
    """Ways that need no trial with what a batch has shown.

    Args:
        ways: that the target has.
        group: the batch's sessions.
        sessions: of the target.
        cost, pace: what is known of its steps and its rounds.
    """
    if Way.AHEAD not in ways:
        return _hopeless_groups(sessions, cost=cost, pace=pace)
    if not can_follow(group):
        return {Way.AHEAD, *_hopeless_groups(sessions, cost=cost, pace=pace)}
    # A step that begins at once is what two groups are for. Only growth may be worth more: where drafts grow much
    # while a successor is made, not to wait may be. Whether it is, its trials say: what a successor needs is measured
    # by sending it, so a rule that drew on that would never hear that pauses are over.
    return {Way.TWO_GROUPS} if group.is_drafted else {Way.WAIT, Way.NEVER_WAIT, Way.TWO_GROUPS}


def _hopeless_groups(sessions: int, *, cost: StepCost, pace: RoundPace) -> set[int]:
    """Two groups run two steps where one would do: not worth a trial unless a round has much else to hide."""
    rows = round(pace.rows)
    if sessions < 2 or rows < 2:
        return {Way.TWO_GROUPS}
    half, whole_ns = (rows + 1) // 2, cost.predict_ns(rows)
    half_ns = cost.predict_ns(half) if cost.is_known(half) else _HOPED_HALF * whole_ns
    return set() if 2 * half_ns < _TRIED_SHARE * (whole_ns + pace.gap_ns) else {Way.TWO_GROUPS}
