"""When to fire: whether a free target should wait for more growth, or verify what is there.

A draft follows the true path level by level until it misses it; a verification that reaches the miss lets the draft
begin anew behind it, and one that ends before the miss costs the session a whole round more. So a further level is
worth as many tokens as a session emits a round, times the chance that the truth ends at just that level:

    gain of the next i levels = V * h * (1 - h^i) * a / p

    V  path values of the leaves that the draft expands next, the root's is 1
    h  chance that the truth is among the children of a node that it has reached
    a  tokens of a session in a round
    p  chance that a round with a tree ends in a miss: without it, the next round meets the same path again

If these levels are there in `w` nanoseconds, waiting costs `rate * w` tokens, rate being the tokens per nanosecond that
the sessions of the batch emit. Wait while the best i of all sessions together earns more; a hard cap bounds the wait of
a round, and a draft that is overdue is not waited for at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# Levels that are looked ahead.
LEVELS = 6
# What the formula's gain is multiplied by: compared at twelve settings, see docs/scheduling.md.
_EMPHASIS = 0.5
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
        step: how long each level after that takes it.
    """

    since_ns: int
    latency: Latency
    step: Latency

    def due_in_ns(self, now_ns: int) -> float | None:
        """Time until the next growth; None when it is overdue."""
        return self.latency.left_ns(now_ns - self.since_ns)


class MissRates:
    """What the rounds of a target's drafted sessions have shown, as averages that forget.

    Begins with what a good pair shows, and soon follows what it sees.
    """

    _FORGET = 0.995

    def __init__(self) -> None:
        self._rounds, self._tokens, self._misses = 8.0, 24.0, 4.0
        self._tree_rounds, self._tree_misses = 8.0, 4.0

    def observe_many(self, rounds: int, *, tokens: int, misses: int, tree_rounds: int, tree_misses: int) -> None:
        """A round of so many sessions, and what they did together.

        Args:
            tokens: that they emitted.
            misses: sessions whose tree lacked one of these in the end.
            tree_rounds: sessions of which any node was verified.
            tree_misses: misses among these.
        """
        kept = self._FORGET**rounds
        self._rounds = self._rounds * kept + rounds
        self._tokens = self._tokens * kept + tokens
        self._misses = self._misses * kept + misses
        kept = self._FORGET**tree_rounds
        self._tree_rounds = self._tree_rounds * kept + tree_rounds
        self._tree_misses = self._tree_misses * kept + tree_misses

    @property
    def tokens_per_round(self) -> float:
        """a"""
        return self._tokens / self._rounds

    @property
    def hit(self) -> float:
        """h"""
        return 1 - min(self._misses / self._tokens, 0.95)

    @property
    def miss_per_round(self) -> float:
        """p"""
        return max(self._tree_misses / self._tree_rounds, 0.02)

    def level_gains(self) -> list[float]:
        """[LEVELS] tokens that the first, second, ... further level is worth, for a V of 1."""
        hit = self.hit
        each = _EMPHASIS * self.tokens_per_round / self.miss_per_round * hit * (1 - hit)
        return [each * hit**level for level in range(LEVELS)]


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What one draft's next growth means for the sessions that expect it at one time.

    Attributes:
        value: V, summed over these sessions.
    """

    forecast: GrowthForecast
    value: float


def patience_ns(outlooks: Iterable[Outlook], *, gains: list[float], rate: float, now_ns: int, left_ns: float) -> float:
    """How long to go on waiting before the question is asked again; 0 is fire.

    Args:
        gains: of each further level, for a V of 1.
        rate: tokens per nanosecond of all sessions of the batch.
        left_ns: what is left of this round's cap.
    """
    arrivals: list[tuple[float, float]] = []
    for outlook in outlooks:
        due_ns = outlook.forecast.due_in_ns(now_ns)
        if due_ns is not None:
            step_ns = outlook.forecast.step.mean_ns
            arrivals += [(due_ns + level * step_ns, outlook.value * gain) for level, gain in enumerate(gains)]
    arrivals.sort()
    best_profit, gained = 0.0, 0.0
    # Never wait for one straggler: each arrival has to pay for all the waiting up to it.
    for due_ns, gain in arrivals:
        gained += gain
        profit = gained - rate * due_ns
        if due_ns <= left_ns and profit > best_profit:
            return arrivals[0][0]
    return 0.0
