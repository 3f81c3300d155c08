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
# Prefill rows by verified rows: long parts of prompts are for rounds that verify little.
_PREFILL = {64: (64, 128, 192, 256, 512, 1024), 128: (64, 128, 256), 256: (64, 128), 512: (64, 128)}
# Verified rows of a session, on average, beyond which a bucket for fewer sessions than all does not pay.
_MOST_ON_AVERAGE = 16
# Share of a round in the averages: of what it takes beyond its bucket's time, of tokens and time, of acceptance.
_BEYOND_SHARE, _RATE_SHARE, _RATIO_SHARE = 0.05, 0.1, 0.01
# Forgetting factor of the fit of prompt attention time, and the (row, key) pairs below which a round hardly counts.
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
    # The last one holds all rows that sessions can have.
    all_rows = next((rung for rung in rungs if rung >= most * sessions), widest)
    beside = sorted({all_rows} | {rung for rung in rungs if rung in _PREFILL and min(sessions, 64) <= rung <= all_rows})
    for rung in beside:
        sizes = _PREFILL.get(rung, (64, 128)) + (config.max_prefill_tokens,) * (rung == beside[0])
        for size in sizes:
            fitting, prefill = min(sessions, rung) + MAX_CHUNKS, min(size, config.max_prefill_tokens)
            found[Bucket(rows=rung, sessions=fitting, most=min(most, rung), prefill=prefill)] = None
    return list(found)


class RoundTimes:
    """Learned times of rounds, and which bucket and nodes pay in that time.

    Args:
        buckets: the shapes.
        cost: bounds of prefill; without graphs also the learned cost of a row.
        captured_ns: what an empty round of each bucket took when it was captured; none on a CPU.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: StepCost, captured_ns: Sequence[float] = ()) -> None:
        self._buckets, self._cost, self._captured_ns = buckets, cost, captured_ns
        # What rounds take beyond the time of their bucket: contexts, processors.
        self._beyond_ns = 0.0
        # Attention time of prompt rows beyond the bucket's time: sums of a least-squares fit through 0.
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
        takes_all_nodes: bool = False,
    ) -> tuple[int, PrefillAllowance]:
        """Return the bucket of the next round and the prefill that it may take.

        Without prompts it is the bucket with the most expected tokens in its time. Beside sessions that run, prompts
        may make that time longer by `slowdown`. Of the buckets that keep to it, the best is the one with the most
        expected tokens, less those that the others would have brought in its time; of that time, what the prompt's rows
        take at the least is no loss, for they have to be computed anyway.

        Args:
            gains: [B] int64, sums of values that `select` would have taken; -1 where the sessions do not fit.
            sessions: that are running.
            keys: their committed tokens.
            rows: that they verify.
            missing: tokens of prompts that have still to be computed.
            context: tokens before the first of these.
            takes_all_nodes: verify every node, for sessions in sync mode.
        """
        if not self._captured_ns:
            (bucket,) = self._buckets
            most = min(bucket.prefill, missing)
            return 0, self._cost.beside(rows, keys, most=most) if sessions else PrefillAllowance(most=most)
        rates = [self._rate(number, int(gain), sessions) for number, gain in enumerate(gains)]
        plain = max(self._candidates(sessions, has_prefill=False, is_widest=takes_all_nodes), key=rates.__getitem__)
        if not missing:
            return plain, PrefillAllowance(most=0)
        beside = self._candidates(sessions, has_prefill=True, is_widest=takes_all_nodes)
        return self._beside_prompts(beside, plain, rates, sessions=sessions, missing=missing, context=context)

    def _beside_prompts(
        self, beside: Sequence[int], plain: int, rates: Sequence[float], *, sessions: int, missing: int, context: int
    ) -> tuple[int, PrefillAllowance]:
        """Return the best of the buckets with prefill, and what it leaves to prompts; `plan` says which is the best.

        Args:
            beside: numbers of these buckets.
            plain: number of the best one without prefill.
            rates: expected tokens in the time of each bucket.
            sessions, missing, context: as `plan` takes them.
        """
        limit_ns = (1 + self._cost.slowdown) * self._expected_ns(plain) if sessions else math.inf
        # Where none keeps to the limit, the quickest has to do.
        longest_ns = max(limit_ns, min(map(self._expected_ns, beside)))

        def allowance(number: int) -> PrefillAllowance:
            most = min(self._buckets[number].prefill, missing)
            return PrefillAllowance(
                most=most,
                least=min(most, self._cost.least_rows),
                time_ns=limit_ns - self._expected_ns(number),
                pair_ns=self._pairs_ns / (self._pairs_square + _FEW_PAIRS * _FEW_PAIRS),
            )

        row_ns = min(self._expected_ns(number) / self._buckets[number].prefill for number in beside)
        rate = rates[plain] or 1.0

        def progress(number: int) -> float:
            round_ns, left = self._expected_ns(number), missing - allowance(number).rows(context)
            later_ns = row_ns * left
            if left and not sessions:
                # A round that no session would have had.
                rounds_ns = (self._expected_ns(other) for other in beside if self._buckets[other].prefill >= left)
                later_ns = min(rounds_ns, default=later_ns)
            return rates[number] * round_ns - rate * (round_ns + later_ns)

        best = max((number for number in beside if self._expected_ns(number) <= longest_ns), key=progress)
        return best, allowance(best)

    def _candidates(self, sessions: int, *, has_prefill: bool, is_widest: bool) -> list[int]:
        """Return the numbers of the buckets that hold all running sessions, else of the widest ones."""
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
            # A round in which the host has a part may have waited for it.
            beyond_ns = min(max(round_ns - self._captured_ns[bucket], 0.0), self._captured_ns[bucket])
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
