"""Rounds of one target: how they may be timed, what is in flight, and how fast they go on."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from outrider.coordinator.config import RoundTiming
from outrider.coordinator.group import Group
from outrider.coordinator.messages import VerifyResult
from outrider.coordinator.session import Session
from outrider.coordinator.trees import Tree, Trees

if TYPE_CHECKING:
    from outrider.coordinator.successor import Successor


class Way(IntEnum):
    """How rounds are timed; which one pays is tried."""

    WAIT = 0
    """All sessions in one batch, held while growth that is due seems worth it."""
    NEVER_WAIT = 1
    """All sessions in one batch, at once."""
    TWO_GROUPS = 2
    """One half is verified while the other half's trees grow and its batch travels."""
    AHEAD = 3
    """All sessions in one batch, which lies at the target before the step before it ends."""


_NAMED = {"wait": Way.WAIT, "never-wait": Way.NEVER_WAIT, "two-groups": Way.TWO_GROUPS, "ahead": Way.AHEAD}


def ways_of(timing: RoundTiming, *, ahead: bool) -> tuple[Way, ...]:
    """The ways that a target's rounds may be timed in, the one to begin with first.

    Args:
        timing: the name of one, or "learned": all.
        ahead: whether the target may be sent batches ahead; if not, "ahead" is "learned".
    """
    if timing != "learned" and (ahead or timing != "ahead"):
        return (_NAMED[timing],)
    return ((Way.AHEAD,) if ahead else ()) + (Way.WAIT, Way.NEVER_WAIT, Way.TWO_GROUPS)


@dataclass(kw_only=True, eq=False)
class Flight:
    """A batch that the target has not answered yet.

    Attributes:
        is_alone: no other was on its way when it was sent.
        waited_ns: how long the free target was held for growth before.
        held_ns: how long the batch was held on purpose since the result before: for growth, for its time to go, or
            since nobody could run.
        group: the sessions in columns.
        trees: [S] what is verified of each session; of a successor none before `begins`.
        successor: what was sent, of a batch that follows a step.
        lead_ns: how long before that step's expected result it was made.
        follows_ns: when that step's result came; 0 before.
        additions: that it had got by then.
    """

    sessions: Sequence[Session]
    group: Group = field(default_factory=lambda: Group(()))
    trees: Trees = field(default_factory=lambda: Trees.of(()))
    rows: int
    submitted_ns: int
    is_alone: bool
    waited_ns: int = 0
    held_ns: int = 0
    successor: "Successor | None" = None
    lead_ns: float = 0.0
    follows_ns: int = 0
    additions: int = 0
    result: "asyncio.Future[VerifyResult]"

    @property
    def begun_ns(self) -> int:
        """Since when the target had nothing else to do, as seen from here."""
        return max(self.submitted_ns, self.follows_ns)

    def begins(self, trees: Trees, *, sessions: int, at_ns: int, additions: int = 0) -> None:
        """The step before has ended: this is what is verified of so many sessions."""
        self.trees, self.rows, self.follows_ns, self.additions = trees, sessions + len(trees.tokens), at_ns, additions

    def tree_of(self, session_id: int) -> Tree:
        """What is verified of a session; of a successor nothing before `begins`."""
        return self.trees[self.group.places[session_id]]


class Step(NamedTuple):
    """A batch's answer."""

    flight: Flight
    result: VerifyResult
    result_ns: int
    """When it came."""


class RoundPace:
    """How fast a target's sessions go on: averages over rounds, waiting included, that forget.

    Attributes:
        overhead_ns: from the submission of a batch to its result, beyond the step itself.
        gap_ns: from the result of one batch to the next one's, beyond the step itself.
        rows: of all sessions together, in their last batches.
        last_result_ns: when it came.
    """

    _SHARE = 0.1

    def __init__(self) -> None:
        self.overhead_ns = self.gap_ns = self.rows = 0.0
        self.last_result_ns = 0
        self._round_ns = self._emitted = self._sessions = 0.0

    def observe(self, flight: Flight, step_ns: int, *, tokens: int, result_ns: int) -> int:
        """One round, whose result came then; returns how long it was."""
        # After a pause the round began when it was submitted, not at the result before.
        round_ns = result_ns - max(self.last_result_ns, flight.submitted_ns - step_ns)
        share = self._SHARE if self._round_ns else 1.0
        if flight.is_alone:
            self.overhead_ns += share * (max(0, result_ns - flight.submitted_ns - step_ns) - self.overhead_ns)
            self.gap_ns += share * (max(0, round_ns - step_ns) - self.gap_ns)
            self.rows += share * (flight.rows - self.rows)
        self._round_ns += share * (round_ns - self._round_ns)
        self._emitted += share * (tokens - self._emitted)
        self._sessions += share * (len(flight.sessions) - self._sessions)
        self.last_result_ns = result_ns
        return round_ns

    def rate(self, sessions: int) -> float:
        """Tokens per nanosecond that so many sessions emit; 0 before the first round."""
        if not self._round_ns or not self._sessions:
            return 0.0
        return self._emitted / self._round_ns * sessions / self._sessions
