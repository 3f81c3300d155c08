"""Shapes of rounds, what each takes, and which one pays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.kernels.pool.select import GAIN_SCALE
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.step_cost import PrefillAllowance, StepCost, StepShape

# Verified rows, sessions and prefill rows of the buckets on a GPU: in between a round takes as long as in the next
# larger one.
_RUNGS, _SESSIONS, _PREFILL = (8, 32, 64, 128, 256, 384, 512), (1, 16, 64, 128), (256, 512)
# Verified rows of a session, on average, beyond which a bucket for fewer sessions than all does not pay.
_MOST_ON_AVERAGE = 16
# Share of a round in the averages: of what it takes beyond its bucket's time, of tokens and time, of acceptance.
_BEYOND_SHARE, _RATE_SHARE, _RATIO_SHARE = 0.05, 0.1, 0.01
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
    sizes = [*(size for size in _PREFILL if size < config.max_prefill_tokens), config.max_prefill_tokens]
    for size in sizes:
        for rung in {min(rung for rung in rungs if rung >= min(sessions, 64)), rungs[-1]}:
            fitting = min(sessions, rung) + MAX_CHUNKS
            found[Bucket(rows=rung, sessions=fitting, most=min(most, rung), prefill=size)] = None
    return list(found)


class RoundTimes:
    """Learned times of rounds, and which bucket and nodes pay in that time.

    Args:
        buckets: the shapes.
        cost: learned from rounds: what a row costs on a CPU, and prefill anywhere.
        captured_ns: what an empty round of each bucket took when it was captured; none on a CPU.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: StepCost, captured_ns: Sequence[float] = ()) -> None:
        self._buckets, self._cost, self._captured_ns = buckets, cost, captured_ns
        # What rounds take beyond the time of their bucket: contexts.
        self._beyond_ns = 0.0
        # What resident drafters take before a round.
        self._drafted_ns = 0.0
        # Averages of a round's tokens and its time.
        self._tokens, self._round_ns = 0.0, 0.0
        # Accepted nodes to the sum of the values that were verified.
        self._ratio = 1.0

    def choose(self, gains: npt.NDArray[np.int64], *, sessions: int, prefill: int) -> int:
        """Return the bucket of the next round: the one with the most expected tokens in its time.

        Args:
            gains: [B] int64, sums of values that `select` would have taken; -1 where the sessions do not fit.
            sessions: that are running.
            prefill: rows of prefill that the round takes.
        """
        if len(self._buckets) == 1:
            return 0
        fitting = [number for number, bucket in enumerate(self._buckets) if bucket.prefill >= prefill]

        def rate(number: int) -> float:
            bucket, gain = self._buckets[number], max(int(gains[number]), 0) / GAIN_SCALE
            served = min(sessions, bucket.sessions, bucket.rows)
            round_ns = self._captured_ns[number] + self._beyond_ns + self._drafted_ns
            return (served + self._ratio * gain) / round_ns

        return max(fitting, key=rate)

    def widest(self, *, prefill: int) -> int:
        """Return the bucket with the most rows, of those with room for so many rows of prefill and as little more."""

        def width(number: int) -> tuple[int, int, int]:
            bucket = self._buckets[number]
            return bucket.rows, -bucket.prefill, bucket.sessions

        return max((number for number, bucket in enumerate(self._buckets) if bucket.prefill >= prefill), key=width)

    @property
    def least_value(self) -> float:
        """The least value of a node that pays for its row; 0 on a GPU, where buckets decide."""
        row_ns = self._cost.row_ns
        if self._captured_ns or row_ns is None or not self._round_ns:
            return 0.0
        return row_ns * self._tokens / self._round_ns / max(self._ratio, _LEAST_RATIO)

    def note(self, bucket: int | None, shape: StepShape, round_ns: int, *, tokens: int, drafted_ns: int = 0) -> None:
        """Learn from a round.

        Args:
            bucket: its number; None for a round with processors, which takes longer than its bucket.
            shape: of its rows.
            round_ns: what it took.
            tokens: that it committed.
            drafted_ns: what resident drafters took before it.
        """
        self._cost.observe(shape, round_ns)
        if shape.prefill_rows or not shape.verify_rows:
            return
        self._tokens += _RATE_SHARE * (tokens - self._tokens)
        self._round_ns += _RATE_SHARE * (round_ns + drafted_ns - self._round_ns)
        self._drafted_ns += _RATE_SHARE * (drafted_ns - self._drafted_ns)
        if self._captured_ns and bucket is not None:
            beyond_ns = max(round_ns - self._captured_ns[bucket], 0.0)
            self._beyond_ns += _BEYOND_SHARE * (beyond_ns - self._beyond_ns)

    def plain_ns(self, bucket: int | None, shape: StepShape, round_ns: int, *, sessions: int) -> int:
        """Return what a round would have taken without nodes, which is never more than it took.

        Args:
            bucket, shape, round_ns: as `note` takes them.
            sessions: with verified rows.
        """
        if not self._captured_ns:
            saved_ns = (self._cost.row_ns or 0.0) * (shape.verify_rows - sessions)
        elif bucket is None:
            # The same bucket serves rounds with processors, nodes or not.
            saved_ns = 0.0
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

    def prefill_allowance(self, *, sessions: int, keys: int, rows: int, most: int) -> PrefillAllowance:
        """Return the prefill that the next round may take beside so many verified rows of sessions."""
        if not sessions:
            return PrefillAllowance(most=most)
        return self._cost.beside(rows, keys, most=most)
