"""Shapes of rounds, what each takes, and which one pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.kernels.pool.select import GAIN_SCALE
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.step_cost import PrefillAllowance, StepCost, StepShape

# Verified rows and sessions of the buckets on a GPU: in between a round takes as long as in the next larger one.
_RUNGS, _SESSIONS = (8, 32, 64, 128, 256, 384, 512), (1, 16, 64, 128)
# Verified rows and prefill rows of those with prompts. Long parts of prompts are for rounds that verify little.
_PREFILL_RUNGS, _PREFILL, _PREFILL_LONG = (64, 128, 256, 512), (64, 128, 192, 256), (384, 512, 1024)
# Verified rows of a session, on average, beyond which a bucket for fewer sessions than all does not pay.
_MOST_ON_AVERAGE = 16
# Share of a round in the averages: of what it takes beyond its bucket's time, of tokens and time, of acceptance.
_BEYOND_SHARE, _RATE_SHARE, _RATIO_SHARE = 0.05, 0.1, 0.01
# What one more round leaves of those before in what a prompt's keys take, and the keys below which it says little.
_PAIRS_FORGET, _FEW_PAIRS = 0.9, 262_144.0
# However few nodes are accepted, some are tried.
_LEAST_RATIO = 0.1
# How much a round without nodes forgets of how few were accepted: after a while some are tried again.
_FORGOTTEN_SHARE = 1 / 4096
# Sessions whose prompts are computed in one round.
MAX_CHUNKS = 16


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Shape of a round.

    Attributes:
        rows: R, verified rows.
        sessions: with verified rows, and chunks of prompts.
        most: most rows of one of them.
        prefill: prefill rows; 0 for a round without.
    """

    rows: int
    sessions: int
    most: int
    prefill: int

    @property
    def selected(self) -> tuple[int, int, int, int]:
        """Bounds for `select`: rows, sessions, most rows of a session, most entries."""
        return self.rows, self.sessions, self.most, self.rows


def round_buckets(config: RoundConfig, *, on_gpu: bool) -> list[Bucket]:
    """Return the buckets, those without prefill first, smallest first.

    Args:
        config: sizes.
        on_gpu: whether rounds are captured in CUDA graphs.
    """
    sessions, most, widest = config.max_sessions, config.max_session_rows, config.max_step_rows
    if not on_gpu:
        # Without graphs no padding is computed: one bucket is the bound of all rounds.
        return [Bucket(rows=widest, sessions=sessions + MAX_CHUNKS, most=most, prefill=config.max_prefill_tokens)]
    rungs = [*(rung for rung in _RUNGS if rung < widest), widest]
    found: dict[Bucket, None] = {}
    for rung in rungs:
        for fitting in (*(count for count in _SESSIONS if count < sessions), sessions):
            bound = most if fitting == 1 else rung if fitting == sessions else _MOST_ON_AVERAGE * fitting
            if fitting <= rung <= bound:
                found[Bucket(rows=rung, sessions=fitting, most=min(most, rung), prefill=0)] = None
    least, bound = min(sessions, 64), max(most * sessions, 64)
    beside = [rung for rung in rungs if rung in _PREFILL_RUNGS and least <= rung <= bound] or rungs[-1:]
    for rung in beside:
        sizes = [*_PREFILL, *_PREFILL_LONG, config.max_prefill_tokens] if rung == beside[0] else _PREFILL
        for size in {min(size, config.max_prefill_tokens): None for size in sizes}:
            fitting = min(sessions, rung) + MAX_CHUNKS
            found[Bucket(rows=rung, sessions=fitting, most=min(most, rung), prefill=size)] = None
    return list(found)


class RoundTimes:
    """Learned times of rounds, and which bucket and nodes pay in that time.

    Args:
        buckets: the shapes.
        cost: how much prefill may cost, and learned on a CPU: what it does cost, and verified rows.
        captured_ns: what an empty round of each bucket took when it was captured; none on a CPU.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: StepCost, captured_ns: Sequence[float] = ()) -> None:
        self._buckets, self._cost, self._captured_ns = buckets, cost, captured_ns
        # What rounds take beyond the time of their bucket: contexts, processors.
        self._beyond_ns = 0.0
        # What the keys take that rows of prompts see, beyond that: sums of a least-squares fit, nanoseconds x pairs and
        # pairs x pairs.
        self._pairs_ns, self._pairs_square = 0.0, 0.0
        # What resident drafters take before a round.
        self._drafted_ns = 0.0
        # Averages of a round's tokens and its time.
        self._tokens, self._round_ns = 0.0, 0.0
        # Accepted nodes to the sum of the values that were verified.
        self._ratio = 1.0

    def plan(
        self,
        gains: npt.NDArray[np.int64],
        *,
        sessions: int,
        keys: int,
        rows: int,
        missing: int,
        context: int,
        is_widest: bool = False,
    ) -> tuple[int, PrefillAllowance]:
        """Return the bucket of the next round and the prefill that it may take.

        Without prompts it is the bucket with the most expected tokens in its time. With prompts a round takes as many
        of their tokens as `slowdown` of that time has room for; of the buckets that do, the one with the most expected
        tokens in its time. Where nothing is verified, prompts get on as fast as they can.

        Args:
            gains: [B] int64, sums of values that `select` would have taken; -1 where the sessions do not fit.
            sessions: that are running.
            keys: their committed tokens.
            rows: that they verify.
            missing: tokens of prompts that have still to be computed.
            context: tokens before the first of these.
            is_widest: whether all nodes are wanted, whatever they cost.
        """
        if not self._captured_ns:
            (bucket,) = self._buckets
            most = min(bucket.prefill, missing)
            return 0, self._cost.beside(rows, keys, most=most) if sessions else PrefillAllowance(most=most)
        rates = [self._rate(number, int(gain), sessions) for number, gain in enumerate(gains)]
        plain = max(self._holding(sessions, has_prefill=False, is_widest=is_widest), key=rates.__getitem__)
        if not missing:
            return plain, PrefillAllowance(most=0)
        limit_ns = (1 + self._cost.slowdown) * self._expected_ns(plain) if sessions else math.inf
        beside = self._holding(sessions, has_prefill=True, is_widest=is_widest)
        # Where none keeps to the limit, the quickest has to do.
        in_time = [number for number in beside if self._expected_ns(number) <= limit_ns]
        in_time = in_time or [min(beside, key=self._expected_ns)]

        def allowance(number: int) -> PrefillAllowance:
            most = min(self._buckets[number].prefill, missing)
            return PrefillAllowance(
                most=most,
                least=min(most, self._cost.least_rows),
                time_ns=limit_ns - self._expected_ns(number),
                pair_ns=self._pairs_ns / (self._pairs_square + _FEW_PAIRS * _FEW_PAIRS),
            )

        def worth(number: int) -> tuple[float, float, float]:
            granted, round_ns = allowance(number).rows(context), self._expected_ns(number)
            return granted if sessions else granted / round_ns, rates[number], -round_ns

        best = max(in_time, key=worth)
        return best, allowance(best)

    def _holding(self, sessions: int, *, has_prefill: bool, is_widest: bool) -> list[int]:
        """The buckets with or without prefill that hold all running sessions; where none does, the widest."""
        found = [number for number, bucket in enumerate(self._buckets) if bool(bucket.prefill) == has_prefill]
        widest = max(self._buckets[number].rows for number in found)
        wide = [number for number in found if self._buckets[number].rows == widest]
        if is_widest:
            return wide
        return [
            number for number in found if min(self._buckets[number].rows, self._buckets[number].sessions) >= sessions
        ] or wide

    def _expected_ns(self, number: int) -> float:
        return self._captured_ns[number] + self._beyond_ns + self._drafted_ns

    def _rate(self, number: int, gain: int, sessions: int) -> float:
        """Expected tokens of a round in a bucket, in its time."""
        bucket = self._buckets[number]
        served = min(sessions, bucket.sessions, bucket.rows)
        return (served + self._ratio * max(gain, 0) / GAIN_SCALE) / self._expected_ns(number)

    @property
    def least_value(self) -> float:
        """The least value of a node that pays for its row; 0 on a GPU, where buckets decide."""
        row_ns = self._cost.row_ns
        if self._captured_ns or row_ns is None or not self._round_ns:
            return 0.0
        return row_ns * self._tokens / self._round_ns / max(self._ratio, _LEAST_RATIO)

    def note(self, bucket: int, shape: StepShape, round_ns: int, *, tokens: int, drafted_ns: int = 0) -> None:
        """Learn from a round.

        Args:
            bucket: its number.
            shape: of its rows.
            round_ns: what it took.
            tokens: that it committed.
            drafted_ns: what resident drafters took before it.
        """
        if not self._captured_ns:
            self._cost.observe(shape, round_ns)
        elif shape.pairs:
            known_ns = self._captured_ns[bucket] + self._beyond_ns
            pairs_ns = min(max(round_ns - known_ns, 0.0), known_ns)
            self._pairs_ns = _PAIRS_FORGET * self._pairs_ns + pairs_ns * shape.pairs
            self._pairs_square = _PAIRS_FORGET * self._pairs_square + shape.pairs * shape.pairs
        if shape.prefill_rows or not shape.verify_rows:
            return
        self._tokens += _RATE_SHARE * (tokens - self._tokens)
        self._round_ns += _RATE_SHARE * (round_ns + drafted_ns - self._round_ns)
        self._drafted_ns += _RATE_SHARE * (drafted_ns - self._drafted_ns)
        if self._captured_ns:
            beyond_ns = max(round_ns - self._captured_ns[bucket], 0.0)
            self._beyond_ns += _BEYOND_SHARE * (beyond_ns - self._beyond_ns)

    def plain_ns(self, bucket: int, shape: StepShape, round_ns: int, *, sessions: int) -> int:
        """Return what a round would have taken without nodes, which is never more than it took.

        Args:
            bucket, shape, round_ns: as `note` takes them.
            sessions: with verified rows.
        """
        if not self._captured_ns:
            saved_ns = (self._cost.row_ns or 0.0) * (shape.verify_rows - sessions)
        else:
            fitting = [
                self._captured_ns[number]
                for number, other in enumerate(self._buckets)
                if other.prefill >= shape.prefill_rows and min(other.rows, other.sessions) >= sessions
            ]
            saved_ns = self._captured_ns[bucket] - min(fitting, default=self._captured_ns[bucket])
        return round_ns - int(min(max(saved_ns, 0.0), round_ns))

    def note_accepted(self, accepted: int, expected: float) -> None:
        """Learn how many nodes were accepted of what their values let expect."""
        share, ratio = _FORGOTTEN_SHARE, 1.0
        if expected > 0:
            share, ratio = min(_RATIO_SHARE * expected, 1.0), accepted / expected
        self._ratio += share * (ratio - self._ratio)
