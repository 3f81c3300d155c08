"""Some ways of deciding, tried in turn: the one under which tokens come faster is used most.

Where a formula would have to know what it cannot (whether a whole batch of sessions falls into step with its waits, for
one), the rate that clients see decides. Rounds are played in blocks of one way each, and of every number of sessions a
Kalman filter keeps the logarithms of all ways' rates. What changes from block to block is foremost common to all ways
(other requests, another temperature), so a block of one way moves the others' rates along, by the gain

    K = P[:, way] / (P[way, way] + noise)     P: covariance of the ways' rates

and what blocks of different ways near each other in time show is what ranks the ways. The next block is played by the
way with the highest

    rate + margin of error beside the way that is played

so that a way that was tried little, or long ago, is tried again, the more rarely the clearer its defeat was. A block
that is far off moves the level of all ways to itself and their ranking hardly; but it makes the ranking doubtful, too:
once a block more of the same way has found the level (the first may have been half before the change), the others are
looked at, for the way that was played may have become worse alone.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

# A block has so many verifications of single sessions, and so many rounds, at least.
_BLOCK_SESSIONS, _BLOCK_ROUNDS = 64, 12
# The first rounds of a block still have the trees that the way before has left.
_SETTLING_ROUNDS = 2
# A round that is this many times as long as usual is a pause of the machine, and counts as that many.
_PAUSE, _USUAL_SHARE = 4.0, 0.1
# Variance of one verification's tokens, by their mean squared.
_SPREAD = 0.5
# Verifications by each way before they are compared: a single short block may have met a cold start, or bad luck.
_FIRST_SESSIONS = 3 * _BLOCK_SESSIONS
# Standard errors that a way is given the benefit of. With more, ways of about equal worth take turns more often.
_BENEFIT = 1.25
# What a block leaves of what is known, in variances; and the variance that is not exceeded so.
_FORGET, _UNKNOWN = 0.98, 1.0
# Variance of the logarithm of a way's rate beside the others', before any was seen.
_PRIOR = 0.04
# Variance by which the rates of all ways drift together from block to block: at first, and at least; and the share of
# it that a block renews.
_DRIFT, _DRIFT_LEAST, _LEARN = 0.005, 0.002, 0.06
# A block whose squared deviation is this many times the variance of what is expected is far off, and makes the ranking
# doubtful by that variance. A best way that has become slower is found the later the higher the one is, and a way that
# has become better with other requests the later the lower the other is.
_FAR, _DOUBT = 16.0, 0.02


class _Rates:
    """What blocks say of the rates of W ways.

    Attributes:
        seen: [W] verifications of single sessions by each.
        is_far: whether the last block was far from what was expected.
    """

    def __init__(self, ways: int) -> None:
        self.seen = [0] * ways
        self.is_far = False
        # Logarithms of tokens a nanosecond and session.
        self._means = np.zeros(ways)
        self._covariance = _PRIOR * np.eye(ways)
        self._drift = _DRIFT
        self._last: int | None = None

    def observe(self, way: int, rate: float, verified: int) -> None:
        """A block by one way (its index), in which there were so many verifications of single sessions."""
        covariance, noise = self._covariance, _SPREAD / verified
        if self._last is None:
            self._means += log(rate)
            covariance += _UNKNOWN
        scale = np.sqrt(np.minimum(1 / _FORGET, _UNKNOWN / covariance.diagonal()))
        covariance *= np.outer(scale, scale)
        covariance += self._drift
        off, expected = log(rate) - self._means[way], covariance[way, way] + noise
        self.is_far = bool(off * off > _FAR * expected)
        if self.is_far:
            covariance += off * off + _DOUBT * np.eye(len(covariance))
        if way == self._last:
            # Else it says as much of the two ways as of the drift.
            self._drift += _LEARN * (min(off * off, _FAR * expected) - expected)
            self._drift = max(_DRIFT_LEAST, self._drift)
        gain = covariance[way] / (covariance[way, way] + noise)
        self._means += gain * off
        covariance -= np.outer(gain, covariance[way])
        # What rounding leaves of asymmetry would grow by what is forgotten.
        self._covariance = (covariance + covariance.T) / 2
        self._last = way
        self.seen[way] += verified

    def hopes(self) -> npt.NDArray[np.float64]:
        """[W] Rates, those of others than the last way with a margin for how little is known of them beside it."""
        covariance, last = self._covariance, self._last
        assert last is not None
        beside = covariance.diagonal() + covariance[last, last] - 2 * covariance[last]
        return self._means + _BENEFIT * np.sqrt(np.maximum(beside, 0.0))


@dataclass
class _Block:
    way: int
    settling: int = _SETTLING_ROUNDS
    rounds: int = 0
    sessions: int = 0
    tokens: float = 0.0
    session_ns: float = 0.0


class Trials:
    """Which of some ways to decide by.

    Args:
        ways: numbers of the ways, the one to begin with first.

    Attributes:
        current: the way to decide by now.
    """

    def __init__(self, ways: Sequence[int]) -> None:
        self.ways = ways
        self.current = ways[0]
        self._rates: dict[int, _Rates] = {}
        self._block = _Block(self.current)
        self._bucket = 0
        self._usual_ns = 0.0

    def observe(
        self, *, placed: int, sessions: int, verified: int, tokens: float, round_ns: float, hopeless: Set[int]
    ) -> None:
        """One round by `current`.

        Args:
            placed: sessions that are there, by whose number records are kept.
            sessions: of these, that could have been verified in it.
            verified: sessions that were.
            tokens: that these emitted.
            round_ns: since the round before, all waiting included.
            hopeless: ways that are not to be tried now.
        """
        if not verified or sessions < 1:
            return
        choices = [way for way in self.ways if way not in hopeless]
        if len(choices) < 2:
            # Plain decoding, say: that the one way was slow there would be held against it beside others.
            self.current = choices[0] if choices else self.current
            return
        if placed.bit_length() != self._bucket:
            # How long rounds of other numbers of sessions took is no measure of a pause.
            self._bucket, self._usual_ns = placed.bit_length(), 0.0
            self._begin(hopeless)
        elif self._block.way in hopeless:
            self._begin(hopeless)
        block = self._block
        if self.current != block.way:
            # The only way for a while; the block goes on.
            self.current, block.settling = block.way, _SETTLING_ROUNDS
        round_ns = min(round_ns, _PAUSE * (self._usual_ns or round_ns))
        self._usual_ns += _USUAL_SHARE * (round_ns - self._usual_ns) if self._usual_ns else round_ns
        if block.settling:
            block.settling -= 1
            return
        block.rounds += 1
        block.sessions += verified
        block.tokens += tokens
        block.session_ns += sessions * round_ns
        # A rate of nothing has no logarithm; a block goes on until there is something.
        if block.rounds >= _BLOCK_ROUNDS and block.sessions >= _BLOCK_SESSIONS and block.tokens:
            self._of_bucket().observe(self.ways.index(block.way), block.tokens / block.session_ns, block.sessions)
            self._begin(hopeless)
            if self.current == block.way:
                self._block.settling = 0

    def _begin(self, hopeless: Set[int]) -> None:
        rates = self._of_bucket()
        choices = [index for index, way in enumerate(self.ways) if way not in hopeless]
        if not rates.is_far or self.current in hopeless:
            chosen = min(choices, key=rates.seen.__getitem__)
            if rates.seen[chosen] >= _FIRST_SESSIONS:
                chosen = max(choices, key=rates.hopes().__getitem__)
            self.current = self.ways[chosen]
        self._block = _Block(self.current)

    def _of_bucket(self) -> _Rates:
        return self._rates.setdefault(self._bucket, _Rates(len(self.ways)))
