"""Which nodes of its sessions a target verifies: by what its steps cost, and what the nodes promise."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.coordinator.candidates import Candidates, group_candidates
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.firing import MissRates
from outrider.coordinator.group import Group
from outrider.coordinator.one_graph import resident_flags
from outrider.coordinator.open_leaves import Leaves, level_leaves
from outrider.coordinator.rounds import RoundPace
from outrider.coordinator.selection import Ints, choose_counts
from outrider.coordinator.trees import Trees
from outrider.v1 import registry_pb2

# So often half of the nodes may go, where steps of that size have not been seen lately.
_PROBE_ROUNDS = 48
# The price of a row is read over so many, which is more than a rung of a small step.
_PRICE_ROWS = 32


class StepPrices(NamedTuple):
    """What a step is expected to take, in nanoseconds.

    Attributes:
        rows_ns: with a batch's rows alone.
        whole_ns: with all of its rows, prompts among them.
        bare_ns: the same without the batch's nodes.
    """

    rows_ns: float
    whole_ns: float
    bare_ns: float


class _Offer(NamedTuple):
    """The candidates of some sessions, as their forest was then; `version` is None where that does not tell."""

    group: Group
    version: int | None
    found: Candidates


class TreeChoice:
    """Chooses trees for one target. S sessions.

    Args:
        limits: of the target.
        cost: of its steps.
        pace: of its rounds.
        misses: how its sessions' rounds have ended.
        fair_slowdown: how many times slower a session may go on than if nobody's trees were verified.
        one_graph: the target drafts in the graph that verifies, for sessions that let it.

    Attributes:
        steps: that were learned from.
    """

    def __init__(
        self,
        limits: registry_pb2.WorkerLimits,
        cost: StepCost,
        pace: RoundPace,
        misses: MissRates,
        *,
        fair_slowdown: float,
        one_graph: bool,
    ) -> None:
        self._limits, self._cost, self._pace, self._misses = limits, cost, pace, misses
        self._fair_slowdown, self._one_graph = fair_slowdown, one_graph
        self.steps = 0
        self._row_ns = 0.0
        self._offer: _Offer | None = None

    def choose(self, group: Group) -> Trees:
        """The trees of all sessions together that promise the highest rate."""
        found = self.candidates(group)
        counts = self._best_counts(found, max_rows=self._limits.max_step_tokens)
        rows = len(group) + int(counts.sum()) // 2
        if self.steps % _PROBE_ROUNDS == _PROBE_ROUNDS - 1 and not self._cost.is_known(rows):
            # If smaller steps cost much less than the line through larger ones says, only a smaller one can show it.
            counts = self._best_counts(found, max_rows=rows)
        counts = self._with_fixed_trees(group, np.diff(found.starts), counts)
        if self._one_graph:
            counts = np.where(resident_flags(group.sessions), 0, counts)
        return found.trees(counts)

    def candidates(self, group: Group) -> Candidates:
        """The best nodes of each session, as far as its request and the target go."""
        # Of chains nobody counts the changes.
        version = None if group.forest is None or group.chains else group.forest.version
        offer = self._offer
        # Whether to wait and what to send are asked of the same sessions, with nothing in between.
        if offer is None or version is None or offer.group is not group or offer.version != version:
            offer = self._offer = _Offer(group, version, group_candidates(group, self._limits.max_tree_nodes))
        return offer.found

    def forget_offer(self) -> None:
        """A session has gone, and its nodes with it."""
        self._offer = None

    def leaf_values(
        self,
        group: Group,
        *,
        widths: npt.NDArray[np.float64],
        by_model: npt.NDArray[np.bool_] | None = None,
    ) -> Leaves:
        """The leaves that the next level of each session will hang from.

        Args:
            group: the sessions.
            widths: [S] nodes that one step of the session's draft expands of it.
            by_model: [S] whether that is a model; asked where other sources grow too. None: all are.
        """
        return level_leaves(
            self.candidates(group),
            by_model,
            widths=widths,
            most=self._most(group),
            hit=self._misses.hit,
            price=self.price(len(group)),
        )

    def price(self, sessions: int) -> float:
        """Tokens that so many sessions emit in the time that a further row takes."""
        return self._pace.rate(sessions) * self._row_ns

    def learn(self, *, rows: int, nodes: int, step_tokens: int) -> StepPrices:
        """A step has ended: what a row costs, where steps are now; and what the step should have taken.

        Args:
            rows: of the batch.
            nodes: of its rows, those below roots.
            step_tokens: rows of the whole step.
        """
        self.steps += 1
        whole = max(step_tokens, rows)
        asked = np.array([rows, rows + _PRICE_ROWS, whole, whole - nodes])
        low_ns, high_ns, whole_ns, bare_ns = self._cost.predict_many_ns(asked).tolist()
        self._row_ns = (high_ns - low_ns) / _PRICE_ROWS
        return StepPrices(low_ns, whole_ns, bare_ns)

    def most_together(self, group: Group) -> int:
        """Nodes of all sessions that a step takes, and that slow nobody down too much who has none."""
        roots = len(group)
        most = min(self._limits.max_step_tokens - roots, int(self._most(group).sum()))
        costs_ns = self._cost.predict_many_ns(roots + np.arange(max(0, most) + 1))
        return int(np.searchsorted(costs_ns, self._fair_slowdown * costs_ns[0], side="right")) - 1

    def _most(self, group: Group) -> Ints:
        """[S] nodes that a session may send."""
        return group.reaches(self._limits.max_tree_nodes)[0]

    def _best_counts(self, found: Candidates, *, max_rows: int) -> Ints:
        choice = choose_counts(
            found.values,
            found.places,
            sessions=len(found.mirrors),
            cost_ns=lambda rows: self._cost.predict_many_ns(rows) + self._pace.overhead_ns,
            max_rows=max_rows,
            fair_slowdown=self._fair_slowdown,
        )
        return choice.counts

    def _with_fixed_trees(self, group: Group, offered: Ints, counts: Ints) -> Ints:
        """A fixed tree is what sync mode is for: it is submitted whole as long as the step has room for it."""
        if not group.has_sync:
            return counts
        fixed = np.flatnonzero(group.is_sync).tolist()
        counts = counts.copy()
        room = self._limits.max_step_tokens - len(group) - int(counts.sum())
        for place in fixed:
            more = int(offered[place] - counts[place])
            if 0 < more <= room:
                counts[place] += more
                room -= more
        return counts
