"""The number of growth steps of a resident drafter that pay before a round.

It is the number with the least expected time for each committed token:

    (time of the round + times of the steps) / (sessions + accepted), and time of prompts if any step runs
    accepted = hit rate x sum of the values that the steps expand, and hit rate x best share for each node's row at most

    value       of what a step expands, for each session: 1 for a root, else the chance that verification reaches the
                node. Learned for a round's first step, and for each further one how much less it is than that of the
                step before. The first step's is at least the share of sessions that the newest round has left without
                a tree: full trees of others lower the average, and say nothing of sessions that begin
    hit rate    share of the places with children at which the target's choice was one of them: a property of drafter
                and text, whatever the load. Verified or not, so that it says what more rows would bring
    best share  of these hits, those of the likeliest child: where rows are few, a node is all that a place gets
    times       by bucket, of rounds and of steps, so that what was learned under one load serves under another
    prompts     the drafter computes them, too: a time for each committed token that steps have to be worth

A part of the time goes to one step more than pays, for some rounds on end, so that a drafter that has become better is
noticed.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

# Steps before a round: at most, and before anything was measured.
MOST_STEPS, _FIRST_STEPS = 8, 4
# Share of the newest step in the averages of values.
_STEP_SHARE = 0.1
# Places that are remembered.
_MOST_PLACES = 128
# A step's value after the one before it, hit rate and best share, before anything was measured.
_PRIOR_RATIO, _PRIOR_HITS, _PRIOR_BEST = 0.8, 0.6, 0.8
# Share of the newest round in the averages of prompt tokens and committed ones.
_ROUND_SHARE = 1 / 512
# Part of the rounds' time for steps that are not known to pay, and rounds of a trial: the first may have to catch up.
_EXPLORED, _TRIAL_ROUNDS = 0.01, 3

Floats = npt.NDArray[np.float64]
RoundRates = Callable[[Floats, float, Floats], Floats]
"""Expected tokens a nanosecond, for each number of steps: given accepted nodes, most of them that one verified node
brings, and the time of the steps."""


class DraftSteps:
    """Averages of growth steps and rounds, and the number of steps that follows from them.

    Args:
        most: steps before a round.

    Attributes:
        most: as given.
        is_trial: whether the last choice has one step more than pays.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.most = most
        # Value of the first step, and of each further one the ratio to the value of the one before.
        self._first, self._ratios = 1.0, np.full(most - 1, _PRIOR_RATIO)
        # Share of its sessions that the newest round has left without a tree.
        self._bare = 0.0
        # The step of this round that was noted last: its number and its value.
        self._noted = (-1, 0.0)
        self._hits, self._places = _PRIOR_HITS * _MOST_PLACES / 8, _MOST_PLACES / 8
        self._best, self._right = _PRIOR_BEST * _MOST_PLACES / 8, _MOST_PLACES / 8
        self._saved_ns, self._trial_rounds = 0.0, 0
        self.is_trial = False

    def choose(self, sessions: int, times_ns: Sequence[float], rates: RoundRates, *, prompt_ns: float) -> int:
        """Return how many steps to run before the next round.

        Args:
            sessions: that are drafted, and verified in that round.
            times_ns: of the first, second, .. step; none before anything was measured.
            rates: of rounds.
            prompt_ns: what prompts take for each committed token, where steps run.
        """
        self.is_trial = False
        if not times_ns:
            return min(_FIRST_STEPS, self.most)
        hit_rate, steps_ns = self._hits / self._places, np.array(times_ns[: self.most])
        values = np.array([max(self._first, self._bare), *self._ratios[: len(steps_ns) - 1]]).cumprod()
        gained = hit_rate * sessions * _sums(values)
        with np.errstate(divide="ignore"):
            token_ns = 1 / rates(gained, hit_rate * self._best / self._right, _sums(steps_ns))
        token_ns[1:] += prompt_ns
        count = int(token_ns.argmin())
        if count == self.most:
            self._trial_rounds = 0
            return count
        most_ns = 2 * _TRIAL_ROUNDS * float(steps_ns.max())
        self._saved_ns = min(self._saved_ns, most_ns)
        if not self._trial_rounds and self._saved_ns >= _TRIAL_ROUNDS * steps_ns[count]:
            self._trial_rounds = _TRIAL_ROUNDS
        if self._trial_rounds:
            self._trial_rounds -= 1
            self._saved_ns -= steps_ns[count]
            self.is_trial = True
            count += 1
        return count

    def note_step(self, number: int, *, expanded: float, sessions: int) -> None:
        """Learn from a step.

        Args:
            number: of the steps before it in its round.
            expanded: sum of the values that it has expanded.
            sessions: that the round verifies, or those whose roots were expanded, if they are more.
        """
        value, (last, before) = expanded / sessions, self._noted
        if not number:
            self._first += _STEP_SHARE * (value - self._first)
        elif last == number - 1 and before > 0:
            self._ratios[last] += _STEP_SHARE * (min(value / before, 1.0) - self._ratios[last])
        self._noted = number, value

    def note_trial(self, excess_ns: float) -> None:
        """Take note of how much longer than expected a trial's step has taken: it may have had to catch up."""
        self._saved_ns -= max(excess_ns, 0.0)

    def note_round(self, *, bare: float, hits: int, misses: int, time_ns: float) -> None:
        """Learn from a round with verified rows.

        Args:
            bare: share of its drafted sessions that it has left without a tree; 0 while slots are wanting.
            hits: places with children at which the target's choice was one of them.
            misses: places with children at which it was none.
            time_ns: of the round and the steps before it.
        """
        self._noted, self._bare = (-1, 0.0), bare
        self._hits, self._places = _faded(self._hits + hits, self._places + hits + misses)
        self._saved_ns += _EXPLORED * time_ns

    def note_hits(self, *, best: int, hits: int) -> None:
        """Learn how many of the hits on the way of committed tokens were those of the likeliest child."""
        self._best, self._right = _faded(self._best + best, self._right + hits)


class PromptRatio:
    """Tokens of the prompts that a drafter has to compute, for each committed token of its sessions.

    Both are averages over about 500 rounds, so that prompts that come at once are paid for by all that follows them.
    """

    def __init__(self) -> None:
        # Since the last round; averages of rounds.
        self._prompts = self._committed = 0
        self._prompts_average = self._committed_average = 0.0

    def note_prompt(self, tokens: int) -> None:
        """Take note of a session that begins with so many tokens."""
        self._prompts += tokens

    def note_committed(self, tokens: int) -> None:
        """Take note of tokens that a round has committed."""
        self._committed += tokens

    def close_round(self, sessions: int) -> float:
        """Begin a new round, of so many sessions, each of which commits a token at least; return the ratio so far."""
        self._committed_average = self._committed_average or float(sessions)
        self._prompts_average += _ROUND_SHARE * (self._prompts - self._prompts_average)
        self._committed_average += _ROUND_SHARE * (self._committed - self._committed_average)
        self._prompts = self._committed = 0
        return self._prompts_average / self._committed_average


def _faded(part: float, whole: float) -> tuple[float, float]:
    """Return both for as many places as are remembered."""
    kept = min(_MOST_PLACES / max(whole, 1.0), 1.0)
    return kept * part, kept * whole


def _sums(values: Floats) -> Floats:
    """Sums of the first 0, 1, .. values."""
    return np.concatenate(([0.0], np.cumsum(values)))
