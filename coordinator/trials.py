"""Some ways of deciding, tried in turn: the one under which tokens come faster is used most.

Where a formula would have to know what it cannot (whether a whole batch of sessions falls into step with its waits, for
one), the rate that clients see decides. Rounds are played in blocks of one way each. Of every way and number of
sessions a mean rate is kept that forgets; the next block is played by the way with the highest

    mean + margin of error

so that a way that was tried little, or long ago, is tried again, the more rarely the clearer its defeat was. Before
they are compared, all ways play blocks in turn until each has shown enough: a single short block may have met a cold
start, or bad luck. Several blocks in turn that are far from their ways' means, all on one side, say that something else
has changed (other requests, another temperature): what is known of all ways is of before that, and they are compared
anew. A single such block is a pause of the machine, or one odd request.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import sqrt

# A block has so many verifications of single sessions, and so many rounds, at least.
_BLOCK_SESSIONS, _BLOCK_ROUNDS = 64, 12
# The first rounds of a block still have the trees that the way before has left.
_SETTLING_ROUNDS = 2
# Standard deviation of one verification's tokens, by their mean.
_SPREAD = 0.7
# Standard errors that a way is given the benefit of.
_BENEFIT = 1.5
# What a block leaves of the weight of all means before it.
_FORGET = 0.97
# Verifications of single sessions by each way before they are compared.
_FIRST_SESSIONS = 3 * _BLOCK_SESSIONS
# A block whose rate is this many times its way's mean, or its mean that many times the rate, is none of chance.
_CHANGED = 1.8
# So many of them in turn are a change that lasts. Ways are compared anew at a price: with 16 sessions and a round in a
# hundred that takes 15 times as long, the best of three was used for 43 % of rounds with 1, 51 with 2, 86 with 4.
_CHANGED_BLOCKS = 4


@dataclass
class _Record:
    """Mean tokens a nanosecond and session, the verifications that it rests on, and all that there were."""

    mean: float = 0.0
    weight: float = 0.0
    seen: int = 0


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
        self._records: dict[int, dict[int, _Record]] = {}
        self._block = _Block(self.current)
        self._bucket = 0
        # The last blocks that were far above (or below: negative) their ways' means, in turn.
        self._far = 0

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
        if placed.bit_length() != self._bucket or self._block.way in hopeless:
            if placed.bit_length() != self._bucket:
                self._bucket, self._far = placed.bit_length(), 0
            self._begin(hopeless)
        block = self._block
        if self.current != block.way:
            # The only way for a while; the block goes on.
            self.current, block.settling = block.way, _SETTLING_ROUNDS
        if block.settling:
            block.settling -= 1
            return
        block.rounds += 1
        block.sessions += verified
        block.tokens += tokens
        block.session_ns += sessions * round_ns
        if block.rounds >= _BLOCK_ROUNDS and block.sessions >= _BLOCK_SESSIONS:
            self._close(block, hopeless)

    def _close(self, block: _Block, hopeless: Set[int]) -> None:
        rate, mean = block.tokens / block.session_ns, self._of_bucket()[self.current].mean
        if mean:
            # A way that has no mean yet says nothing of changes.
            side = (rate >= mean * _CHANGED) - (rate <= mean / _CHANGED)
            self._far = self._far + side if side * self._far > 0 else side
        if abs(self._far) >= _CHANGED_BLOCKS:
            del self._records[self._bucket]
            self._far = 0
        for record in self._of_bucket().values():
            record.weight *= _FORGET
        record = self._of_bucket()[self.current]
        record.seen += block.sessions
        record.weight += block.sessions
        record.mean += (rate - record.mean) * block.sessions / record.weight
        before = self.current
        self._begin(hopeless)
        if self.current == before:
            self._block.settling = 0

    def _begin(self, hopeless: Set[int]) -> None:
        self._choose(hopeless)
        self._block = _Block(self.current)

    def _of_bucket(self) -> dict[int, _Record]:
        return self._records.setdefault(self._bucket, {way: _Record() for way in self.ways})

    def _choose(self, hopeless: Set[int]) -> None:
        records = self._of_bucket()
        ways = [way for way in self.ways if way not in hopeless] or [self.current]
        least_tried = min(ways, key=lambda way: records[way].seen)
        if records[least_tried].seen < _FIRST_SESSIONS:
            self.current = least_tried
        else:
            self.current = max(ways, key=lambda way: self._hope(records[way]))

    @staticmethod
    def _hope(record: _Record) -> float:
        return record.mean * (1 + _BENEFIT * _SPREAD / sqrt(record.weight))
