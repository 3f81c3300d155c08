"""Policies that learn nothing, for the learned one to be compared with: a tree of the same size every round."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.coordinator.lane import TargetLane
from outrider.coordinator.rounds import Way
from outrider.coordinator.selection import choose_each
from outrider.coordinator.session import Session
from outrider.coordinator.trees import Tree
from outrider.coordinator.trials import Trials
from outrider.coordinator.verify_loop import VerifyLoop


def fixed_tree(count: int, *, waits: bool) -> type[VerifyLoop]:
    """A loop that sends the `count` best nodes of every session.

    Args:
        waits: until every tree has so many, the cap at most; otherwise what is there goes at once.
    """

    class FixedTreeLoop(VerifyLoop):
        """As its maker says, all sessions in one batch."""

        def __init__(self, lane: TargetLane, *others: Any) -> None:
            super().__init__(lane, *others)
            lane.way = Trials((Way.WAIT,))

        def choose(self, sessions: Sequence[Session]) -> Sequence[Tree]:
            found = self.lane.trees.candidates(self.lane.group(sessions))
            return found.trees(choose_each(found.places, sessions=len(sessions), count=count).tolist())

        def patience_ns(self, sessions: Sequence[Session], *, waited_ns: int) -> float:
            if not waits or np.diff(self.lane.trees.candidates(self.lane.group(sessions)).starts).min() >= count:
                return 0.0
            return max(0.0, self._config.verify_wait_cap_ms * 1e6 - waited_ns)

    return FixedTreeLoop


def fixed_way(way: Way) -> type[VerifyLoop]:
    """The learned policy, but for how it times its rounds."""

    class FixedWayLoop(VerifyLoop):
        """As its maker says."""

        def __init__(self, lane: TargetLane, *others: Any) -> None:
            super().__init__(lane, *others)
            lane.way = Trials((way,))

    return FixedWayLoop
