"""The number of growth steps of a resident drafter that pay before a round.

A step pays while the nodes that it adds bring more tokens than the target commits in the time of the step:

    yield x value x sessions  >=  tokens / time of the rounds  x  time of a step

    value    what a step expands, for each session: 1 for a root, else the chance that verification reaches the node;
             learned for the first, second, .. step of a round
    time     of a step, learned likewise: the first one has more rows, and of a block drafter the only pass. It is
             taken to change with the time of a round without nodes, so that it fits the load of now, however long ago
             the step ran
    yield    tokens that a round gains per value that its steps have expanded: accepted nodes, less what the target
             would have committed in the time that verifying nodes has taken. Counted for each
             session: a round of a thousand sessions would outweigh hundreds of rounds of few

At high load verifying nodes gains nothing, and no step pays. A part of the time goes to one step more than pays, so
that a change of the load is noticed.
"""

from collections.abc import Sequence
from itertools import accumulate

# Steps before a round: at most, and before anything was measured.
MOST_STEPS, _FIRST_STEPS = 8, 4
# Share of the newest measurement in the averages.
_RATE_SHARE, _STEP_SHARE = 0.1, 0.1
# Share of a round in the yield: for each of its sessions, since more of them tell more, and at most.
_YIELD_SHARE, _MOST_YIELD_SHARE = 0.05, 0.2
# What a step expands beyond the one before it, and the yield, before anything was measured.
_PRIOR_DECAY, _PRIOR_YIELD = 0.8, 0.6
_LEAST_EXPANDED = 1e-3
# Part of the rounds' time for steps that are not known to pay; no more is saved up than several steps take.
_EXPLORED, _MOST_SAVED_STEPS = 0.01, 4


class DraftSteps:
    """Averages of what steps and rounds have brought, and the number of steps that follows from them.

    Args:
        most: steps before a round.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self._values = [_PRIOR_DECAY**number for number in range(MOST_STEPS)]
        # By number in the round; 0 of steps that have not run yet.
        self._step_ns = [0.0] * MOST_STEPS
        self._tokens = self._time_ns = self._plain_ns = self._saved_ns = 0.0
        # For each session of a round.
        self._gained, self._expanded = _PRIOR_YIELD, 1.0

    def choose(self, sessions: int) -> int:
        """Return how many steps to run before the next round.

        Args:
            sessions: that are drafted, and may run.
        """
        if not sessions:
            return 0
        if not self._time_ns or not self._step_ns[0]:
            return min(_FIRST_STEPS, self._most)
        rate = self._tokens / self._time_ns
        each = max(self._gained, 0.0) / self._expanded * sessions
        # A step that has not run yet is taken to be as long as the one before it.
        times_ns = list(accumulate(self._step_ns[: self._most], lambda before, own: own or before))
        gains = (each * value - rate * step_ns for value, step_ns in zip(self._values, times_ns, strict=False))
        sums = [0.0, *accumulate(gains)]
        count = sums.index(max(sums))
        if count < self._most and self._saved_ns >= times_ns[count]:
            self._saved_ns -= times_ns[count]
            count += 1
        return count

    def note_step(self, number: int, *, expanded: float, sessions: int, step_ns: int) -> None:
        """Learn from a step.

        Args:
            number: of the steps before it in its round.
            expanded: sum of the values that it has expanded.
            sessions: as `choose` was given.
            step_ns: what it took.
        """
        self._values[number] += _STEP_SHARE * (expanded / sessions - self._values[number])
        before = self._step_ns[number]
        self._step_ns[number] += (_STEP_SHARE if before else 1.0) * (step_ns - before)

    def note_prefill(self, step_ns: int) -> None:
        """Take note of a step that has computed prompts for the most part: what it is worth comes with later ones."""
        self._saved_ns = max(
            self._saved_ns - max(step_ns - self._step_ns[0], 0.0), -_MOST_SAVED_STEPS * self._step_ns[0]
        )

    def note_round(
        self, *, tokens: int, accepted: int, round_ns: int, plain_ns: int, steps: Sequence[tuple[float, int]]
    ) -> None:
        """Learn from a round with verified rows.

        Args:
            tokens: that it committed.
            accepted: nodes among them.
            round_ns: what it took.
            plain_ns: what it would have taken without nodes.
            steps: before it: sum of the values that each has expanded, and what it took.
        """
        time_ns = round_ns + sum(step_ns for _, step_ns in steps)
        share = _RATE_SHARE if self._time_ns else 1.0
        self._tokens += share * (tokens - self._tokens)
        self._time_ns += share * (time_ns - self._time_ns)
        self._follow_load(plain_ns, share)
        sessions = max(tokens - accepted, 1)
        gained = (accepted - self._tokens / max(self._time_ns, 1.0) * (round_ns - plain_ns)) / sessions
        expanded = sum(value for value, _ in steps) / sessions
        # Rounds without growth say nothing of it.
        if gained or expanded:
            share = min(_YIELD_SHARE * sessions, _MOST_YIELD_SHARE)
            self._gained += share * (gained - self._gained)
            self._expanded = max(self._expanded + share * (expanded - self._expanded), _LEAST_EXPANDED)
        self._saved_ns = min(self._saved_ns + _EXPLORED * time_ns, _MOST_SAVED_STEPS * max(self._step_ns))

    def _follow_load(self, plain_ns: int, share: float) -> None:
        before = self._plain_ns
        self._plain_ns += share * (plain_ns - before)
        if before:
            change = self._plain_ns / before
            self._step_ns, self._saved_ns = [change * step_ns for step_ns in self._step_ns], change * self._saved_ns
