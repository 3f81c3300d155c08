"""One target worker as the scheduler sees it: its link, its sessions, its batches in flight, what its steps cost."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.coordinator import clock
from outrider.coordinator.candidates import Candidates, Tree, candidates
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.firing import MissRates
from outrider.coordinator.links import TargetLink
from outrider.coordinator.messages import SessionOpening, SpeculationMode, TreeSubmission, VerifyResult
from outrider.coordinator.selection import choose_counts
from outrider.coordinator.session import Session, Submission
from outrider.coordinator.trials import Trials
from outrider.v1 import registry_pb2

# The price of a row is read over so many, which is more than a rung of a small step.
_PRICE_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A batch that the target has not answered yet."""

    sessions: Sequence[Session]
    rows: int
    submitted_ns: int
    result: "asyncio.Future[VerifyResult]"


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """What the next level of S sessions would hang from.

    Attributes:
        values: [S] path values of the leaves, less what the level's rows would cost; 0 where none may follow.
        has_tree: [S] whether anything is known below the root.
    """

    values: Sequence[float]
    has_tree: Sequence[bool]


class TargetLane:
    """A target's sessions and the state of its verify loop."""

    def __init__(
        self, worker_id: str, link: TargetLink, limits: registry_pb2.WorkerLimits, *, fair_slowdown: float = 1.5
    ) -> None:
        self.worker_id = worker_id
        self.link = link
        self.limits = limits
        self.sessions: dict[int, Session] = {}
        self.flights: deque[Flight] = deque()
        self.cost = StepCost()
        self.pace = RoundPace()
        self.misses = MissRates()
        self.waiting = Trials(2)
        """0: waits for growth where that seems to pay; 1: never."""
        self.steps = 0
        self._fair_slowdown = fair_slowdown
        self._changed = asyncio.Event()
        self._found: tuple[Sequence[Session], Candidates] | None = None

    @property
    def is_full(self) -> bool:
        """Whether no further batch may be sent before a result is in."""
        return len(self.flights) >= 1

    def next_group(self) -> list[Session]:
        """The sessions of the next batch."""
        return self.runnable()

    def lead_ns(self, now_ns: int) -> float:
        """How long a further batch would only wait at the target."""
        return 0.0

    @property
    def has_room(self) -> bool:
        """Whether one more session may be placed here."""
        return len(self.sessions) < self.limits.max_sessions

    def runnable(self) -> list[Session]:
        """Sessions that may be verified now, oldest first; those in flight and those whose reader stalls are not."""
        now_ns = clock.now_ns()
        return [
            session
            for session in self.sessions.values()
            if session.submission is None
            and not session.is_finished
            and not session.generation.is_stalled
            and session.rests_until_ns <= now_ns
        ]

    def notify(self) -> None:
        """Something has changed that the loop may be waiting for: growth, a new session, a reader that reads on."""
        self._changed.set()

    async def change(self, *, timeout_s: float) -> None:
        """Waits for the next `notify`, not longer than so many seconds (or for ever: inf)."""
        self._changed.clear()
        self._found = None
        timer = None
        if timeout_s != math.inf:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def candidates(self, sessions: Sequence[Session]) -> Candidates:
        """The best nodes of each session, as far as its request and this target go.

        Asked for the same list again before anything else could happen, it says the same.
        """
        if self._found is not None and self._found[0] is sessions:
            return self._found[1]
        most = self.limits.max_tree_nodes
        reaches = [session.reach(most) for session in sessions]
        found = candidates(
            [session.mirror for session in sessions],
            most=[most for most, _ in reaches],
            deepest=[deepest for _, deepest in reaches],
        )
        self._found = sessions, found
        return found

    def leaf_values(self, sessions: Sequence[Session], *, widths: Sequence[float]) -> Leaves:
        """The leaves that the next level of each session will hang from.

        Args:
            widths: [S] nodes that one step of the session's draft expands of it.
        """
        found = self.candidates(sessions)
        counts = np.diff(found.starts)
        hit, price = self.misses.hit, self._row_price(len(sessions), len(found.values))
        # A session that has all the nodes that it may send pays with the last of them, any other with the row.
        most = np.array([session.reach(self.limits.max_tree_nodes)[0] for session in sessions])
        displaced = np.full(len(sessions), price)
        full = np.flatnonzero((counts >= most) & (counts > 0))
        displaced[full] = np.maximum(found.values[found.starts[full + 1] - 1], price)
        values, places = found.values[found.is_leaf], found.places[found.is_leaf]
        # Each leaf's rank among its session's, best first, as they come.
        leaves = np.bincount(places, minlength=len(sessions))
        ranks = np.arange(len(places)) - np.repeat(np.cumsum(leaves) - leaves, leaves)
        shares = np.clip(np.asarray(widths)[places] - ranks, 0.0, 1.0)
        net = shares * np.maximum(values - displaced[places] / hit, 0.0)
        sums = np.bincount(places, weights=net, minlength=len(sessions)).astype(np.float64)
        sums[(counts == 0) & (most > 0)] = max(1.0 - price / hit, 0.0)
        return Leaves(values=sums.tolist(), has_tree=(counts > 0).tolist())

    def _row_price(self, sessions: int, nodes: int) -> float:
        """Tokens that one row more costs, at about so many nodes."""
        low_ns, high_ns = self.cost.predict_many_ns(sessions + nodes + np.array([0, _PRICE_ROWS])).tolist()
        return self.pace.rate(sessions) * (high_ns - low_ns) / _PRICE_ROWS

    def choose(self, sessions: Sequence[Session]) -> list[Tree]:
        """The trees of all sessions together that promise the highest rate."""
        found = self.candidates(sessions)
        choice = choose_counts(
            found.values,
            found.places,
            sessions=len(sessions),
            cost_ns=lambda rows: self.cost.predict_many_ns(rows) + self.pace.overhead_ns,
            max_rows=self.limits.max_step_tokens,
            fair_slowdown=self._fair_slowdown,
        )
        return found.trees(self._with_fixed_trees(sessions, np.diff(found.starts).tolist(), choice.counts.tolist()))

    def _with_fixed_trees(
        self, sessions: Sequence[Session], offered: Sequence[int], counts: Sequence[int]
    ) -> Sequence[int]:
        """A fixed tree is what sync mode is for: it is submitted whole as long as the step has room for it."""
        if all(session.mode is not SpeculationMode.SYNC for session in sessions):
            return counts
        room = self.limits.max_step_tokens - len(sessions) - sum(counts)
        fixed = []
        for session, most, count in zip(sessions, offered, counts, strict=True):
            more = most - count if session.mode is SpeculationMode.SYNC else 0
            fixed.append(most if 0 < more <= room else count)
            room -= more if more <= room else 0
        return fixed

    def submit(self, sessions: Sequence[Session], chosen: Sequence[Tree], *, waited_ns: int) -> Flight:
        """Sends one batch."""
        openings = [self._opening(session) for session in sessions if session.target_id != self.worker_id]
        now_ns = clock.now_ns()
        trees = []
        for session, tree in zip(sessions, chosen, strict=True):
            session.submission = Submission(tree, now_ns, waited_ns)
            trees.append(
                TreeSubmission(
                    session.session_id,
                    session.target_epoch,
                    len(session.token_ids),
                    tree.tokens,
                    tree.parents,
                    tree.distributions,
                )
            )
        rows = len(sessions) + sum(len(tree.tokens) for tree in chosen)
        result = self.link.submit(trees, openings=openings)
        flight = Flight(sessions=list(sessions), rows=rows, submitted_ns=now_ns, result=result)
        self.flights.append(flight)
        self._found = None
        return flight

    def _opening(self, session: Session) -> SessionOpening:
        opening = session.opening(max_live_nodes=0)
        session.target_id, session.target_epoch = self.worker_id, opening.epoch
        return opening

    def learn(self, flight: Flight, result: VerifyResult, *, emitted: int) -> None:
        """Takes a round's times into the cost model and the rate."""
        self.steps += 1
        self.cost.observe(result.step_tokens, result.step_ns)
        sessions = len(flight.sessions)
        round_ns = self.pace.observe(flight.submitted_ns, result.step_ns, tokens=emitted, sessions=sessions)
        self.waiting.observe(sessions=sessions, tokens=emitted, round_ns=round_ns)


class RoundPace:
    """How fast a target's sessions go on: averages over rounds, waiting included, that forget."""

    _SHARE = 0.1

    def __init__(self) -> None:
        self.overhead_ns = 0.0
        """From the submission of a batch to its result, beyond the step itself."""
        self._last_result_ns = 0
        self._round_ns = self._emitted = self._sessions = 0.0

    def observe(self, submitted_ns: int, step_ns: int, *, tokens: int, sessions: int) -> int:
        """One round that ends now; returns how long it was."""
        now_ns = clock.now_ns()
        # Behind another batch it began with that one's end.
        began_ns = max(submitted_ns, self._last_result_ns)
        self.overhead_ns += self._SHARE * (max(0, now_ns - began_ns - step_ns) - self.overhead_ns)
        # After a pause the round began when it was submitted, not at the result before.
        began_ns = max(self._last_result_ns, submitted_ns - step_ns)
        share, round_ns = self._SHARE if self._round_ns else 1.0, now_ns - began_ns
        self._round_ns += share * (round_ns - self._round_ns)
        self._emitted += share * (tokens - self._emitted)
        self._sessions += share * (sessions - self._sessions)
        self._last_result_ns = now_ns
        return round_ns

    def rate(self, sessions: int) -> float:
        """Tokens per nanosecond that so many sessions emit; 0 before the first round."""
        if not self._round_ns or not self._sessions:
            return 0.0
        return self._emitted / self._round_ns * sessions / self._sessions
