"""Notes of the rounds of a target that serves: their cost, metrics, and whether one hangs."""

import logging
import time
from collections import deque
from collections.abc import Sequence

from outrider.kernels.verification.report import RoundTime
from outrider.metrics.worker import StepCounts
from outrider.roles.slow_steps import SlowStepLog
from outrider.roles.step_watch import StepWatch
from outrider.target_worker.rounds.commands import RoundCost
from outrider.target_worker.rounds.observer import RoundObserver
from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.session import Level, SessionResult

logger = logging.getLogger(__name__)

# Level, and orders of magnitude of sessions and prefill rows.
_Kind = tuple[Level, int, int]
USUAL_S = 1.0
"""Usual upper bound for what is done between rounds, in seconds: opening a session copies columns to the device."""
# What a round leaves of the longest of its kind before: one that compiled something is forgotten in time.
_FORGET = 0.9


class RoundNotes(RoundObserver):
    """Notes of rounds.

    Attributes:
        watch: age of the oldest round under way.
        counts: of rounds that have ended.
        slow_steps: log of the long ones.
        busy_ns: time that they took from forward pass to walk.
        costs: of rounds that had results, by number; whoever tells the results clears it.
        is_watching: False while the thread does something else, and has told the watch so.
    """

    def __init__(self) -> None:
        self.watch = StepWatch()
        self.counts = StepCounts()
        self.slow_steps = SlowStepLog(logger, "verification")
        self.busy_ns = 0
        self.costs: dict[int, RoundCost] = {}
        self.is_watching = True
        # Of the rounds under way.
        self._kinds: deque[_Kind] = deque()
        self._usual_s: dict[_Kind, float] = {}
        self._began_s, self._ended_ns = 0.0, 0

    def composed(self, level: Level, *, sessions: int, prefill_rows: int) -> None:
        """See `RoundObserver`."""
        self._kinds.append((level, sessions.bit_length(), prefill_rows.bit_length()))
        if len(self._kinds) == 1:
            self._begin()

    def reported(
        self,
        report: RoundReport,
        results: Sequence[SessionResult],
        *,
        prefill_rows: int,
        plain_ns: int,
        drafted_ns: int,
    ) -> None:
        """See `RoundObserver`."""
        kind, taken_s = self._kinds.popleft(), time.monotonic() - self._began_s
        self._usual_s[kind] = max(_FORGET * self._usual_s.get(kind, 0.0), taken_s)
        self._begin()
        times_ns = report.times_ns
        step_ns = times_ns[RoundTime.ENDED] - max(times_ns[RoundTime.BEGAN], self._ended_ns)
        forward_ns = times_ns[RoundTime.WALKED] - times_ns[RoundTime.PACKED]
        self._ended_ns = times_ns[RoundTime.ENDED]
        rows, sessions = report.verified_rows + prefill_rows, report.sessions + report.chunks
        if results:
            self.costs[results[0].round] = RoundCost(step_ns, forward_ns, rows, plain_ns)
        if not rows:
            # Commands alone took effect.
            return
        self.busy_ns += forward_ns
        self.counts.note(step_ns, forward_ns, rows=rows, sessions=sessions, is_prefill=not report.verified_rows)
        if report.verified_rows:
            self.slow_steps.note(step_ns, rows=rows, sessions=sessions)

    def _begin(self) -> None:
        """Expect the next report."""
        self._began_s = time.monotonic()
        if not self.is_watching:
            return
        # The first of its kind may be compiling. Without one under way sessions may be on their way to the device.
        self.watch.begin(self._usual_s.get(self._kinds[0]) if self._kinds else USUAL_S)
