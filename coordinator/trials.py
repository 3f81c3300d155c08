"""Some ways of deciding, tried in turn: the one under which tokens come faster is used most.

Where a formula would have to know what it cannot (whether a whole batch of sessions falls into step with its waits, for
one), the rate that clients see decides. Rounds are played in blocks of one way each, and of every number of sessions a
Kalman filter keeps the logarithms of all ways' rates. What changes from block to block is foremost common to all ways
(other requests, another temperature), so a block of one way moves the others' rates along, by the gain

    K = P[:, way] / (P[way, way] + noise)     P: covariance of the ways' rates

and what blocks of different ways near each other in time show is what ranks the ways. The next block is played by the
way with the highest

    rate + margin of error beside the way that is played

so that a way that was tried little, or long ago, is tried again, the more rarely the clearer its defeat was.

Which way is best depends on how many sessions there are, and on how often drafts are right, which greedy requests and
sampled ones differ in most: records are kept apart by both. What else changes the requests shows as a block that is far
off. It moves the level of all ways to itself and their ranking hardly; but the further off it is, the more doubtful it
makes the ranking: once a block more of the same way has found the level (the first may have been half before the
change), the others are looked at, for the way that was played may have become worse alone.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

# A block has so many verifications of single sessions, and so many rounds, at least.
_BLOCK_SESSIONS, _BLOCK_ROUNDS = 32, 12
# The first rounds of a block still have the trees that the way before has left.
_SETTLING_ROUNDS = 2
# Those of a load's very first: when steps end, and what they cost, is learned in them, which is no way's doing.
_FIRST_ROUNDS = 24
# A round that is this many times as long as usual is a pause of the machine, and counts as that many.
_PAUSE, _USUAL_SHARE = 4.0, 0.1
# Variance of one verification's tokens, by their mean squared.
_SPREAD = 0.5
# Blocks by each way before they are compared: a single one may have met a cold start, or bad luck.
_FIRST_BLOCKS = 2
# Standard errors that a way is given the benefit of. With more, ways of about equal worth take turns more often.
_BENEFIT = 1.1
# What a block leaves of what is known, in variances; and the variance that is not exceeded so: a way that is thought up
# to exp(_BENEFIT * sqrt(_UNKNOWN)), some eighty times, slower is tried again at some time.
_FORGET, _UNKNOWN = 0.98, 16.0
# Variance of the logarithm of a way's rate beside the others', before any was seen.
_PRIOR = 0.04
# Variance by which the rates of all ways drift together from block to block: at first, and at least; and the share of
# it that a block renews.
_DRIFT, _DRIFT_LEAST, _LEARN = 0.005, 0.002, 0.06
# A block whose squared deviation is this many times the variance of what is expected is far off; by this share of what
# is beyond, the rates of the ways may have moved apart, as a variance. With less of it, a best way that has become
# slower is found the later, and a way that has become better with other requests; with more, ways are compared anew
# where all have changed alike.
_FAR, _DOUBT = 10.0, 0.3


class _Rates:
    """What blocks say of the rates of W ways.

    Attributes:
        seen: [W] blocks by each.
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
        excess = off * off - _FAR * expected
        self.is_far = bool(excess > 0)
        if self.is_far:
            covariance += off * off + _DOUBT * excess * np.eye(len(covariance))
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
        self.seen[way] += 1

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
    settles_again: bool = True

    def resume(self) -> None:
        """Another way was played meanwhile.

        The block settles again, but not before it had a round that counts: where a load comes for a round or two only,
        none ever would.
        """
        if self.settles_again:
            self.settling, self.settles_again = max(self.settling, _SETTLING_ROUNDS), False


class _Records:
    """What is known of the ways with one kind of load, and the block that it is in.

    Rounds of other loads may come between those of a block, which goes on with the next of its own: where loads take
    turns every few rounds, no block would ever end else.
    """

    def __init__(self, ways: Sequence[int]) -> None:
        self.block = _Block(ways[0], settling=_FIRST_ROUNDS)
        self._ways = ways
        self._rates = _Rates(len(ways))
        # How long rounds of another number of sessions took is no measure of a pause.
        self._usual_ns = 0.0

    def begin(self, choices: Sequence[int]) -> None:
        """The next block, by one of these ways."""
        before = self.block.way
        # The level first, then who is best.
        again = self._rates.is_far and before in choices
        self.block = _Block(before if again else self._best(choices))
        if self.block.way == before:
            self.block.settling = 0

    def _best(self, choices: Sequence[int]) -> int:
        places = [self._ways.index(way) for way in choices]
        chosen = min(places, key=self._rates.seen.__getitem__)
        if self._rates.seen[chosen] >= _FIRST_BLOCKS:
            chosen = max(places, key=self._rates.hopes().__getitem__)
        return self._ways[chosen]

    def note(self, *, sessions: int, verified: int, tokens: float, round_ns: float) -> bool:
        """One round by the block's way; whether it was the block's last."""
        block = self.block
        round_ns = min(round_ns, _PAUSE * (self._usual_ns or round_ns))
        self._usual_ns += _USUAL_SHARE * (round_ns - self._usual_ns) if self._usual_ns else round_ns
        if block.settling:
            block.settling -= 1
            return False
        block.settles_again = True
        block.rounds += 1
        block.sessions += verified
        block.tokens += tokens
        block.session_ns += sessions * round_ns
        # A rate of nothing has no logarithm; a block goes on until there is something.
        if block.rounds < _BLOCK_ROUNDS or block.sessions < _BLOCK_SESSIONS or not block.tokens:
            return False
        self._rates.observe(self._ways.index(block.way), block.tokens / block.session_ns, block.sessions)
        return True


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
        self._records: dict[tuple[int, bool], _Records] = {}

    def observe(
        self,
        *,
        placed: int,
        sampled: int,
        sessions: int,
        verified: int,
        tokens: float,
        round_ns: float,
        hopeless: Set[int],
    ) -> None:
        """One round by `current`.

        Args:
            placed: sessions that are there; records are kept by its order of magnitude,
            sampled: and by whether most of these are at a temperature above 0.
            sessions: of those placed, that could have been verified in the round.
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
        # Clients are often as many as a power of two, of whom now and then one is between two requests: that is in the
        # middle of 12 to 23, say.
        key = (4 * placed // 3).bit_length(), 2 * sampled > placed
        records = self._records.get(key)
        if records is None:
            records = self._records[key] = _Records(self.ways)
        if records.block.way in hopeless:
            records.begin(choices)
        if self.current != records.block.way:
            # Another load, or a way that was the only one for a while; the block goes on.
            records.block.resume()
        if records.note(sessions=sessions, verified=verified, tokens=tokens, round_ns=round_ns):
            records.begin(choices)
        self.current = records.block.way
