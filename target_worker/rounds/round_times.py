"""Times of rounds, and the bucket, nodes and prompt rows that pay in them.

The objective is expected tokens in the time of the round: those of the sessions that run for certain, and the values of
the nodes that are verified, times a ratio that is learned. What is known of times differs: `CapturedTimes` has one for
every bucket, `LearnedTimes` the cost of a row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.kernels.pool.select import GAIN_SCALE
from outrider.target_worker.rounds.buckets import MAX_CHUNKS, Bucket
from outrider.target_worker.rounds.draft_steps import Floats
from outrider.target_worker.rounds.step_cost import PrefillAllowance, StepCost, StepShape

# Share of a round in the averages: of what it takes beyond its bucket's time, of tokens and time, of acceptance.
_BEYOND_SHARE, _RATE_SHARE, _RATIO_SHARE = 0.05, 0.1, 0.01
# Forgetting factor of the fit of prompt attention time, and the (row, key) pairs below which a round says nothing.
_PAIRS_FORGET, _FEW_PAIRS = 0.9, 262_144.0
# Prompt rows that always move, however many keys they see.
_LEAST_ROWS = 32
# Without graphs: prefill rows that are taken to cost as much as a verification before anything was measured, and those
# by which prefill always moves.
_CPU_PREFILL, _GPU_PREFILL = (32, 16), (256, 32)
# However few nodes are accepted, some are tried.
_LEAST_RATIO = 0.1
# How much a round without nodes forgets of how few were accepted: after a while some are tried again.
_FORGOTTEN_SHARE = 1 / 4096


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Sessions and prompts that the next round may serve.

    Attributes:
        sessions: that are running when it begins.
        keys: their committed tokens.
        rows: that they verify.
        prompts: sessions whose prompts have still to be computed; each may be running in the round of its last chunk.
        missing: tokens of these.
        context: tokens before the first of these.
        takes_all_nodes: verify every node, for sessions in sync mode.
    """

    sessions: int
    keys: int = 0
    rows: int = 0
    prompts: int = 0
    missing: int = 0
    context: int = 0
    takes_all_nodes: bool = False


class RoundTimes(ABC):
    """Learned times of rounds.

    Attributes:
        ratio: accepted nodes to the sum of the values that were verified.
    """

    def __init__(self) -> None:
        self.ratio = 1.0

    @property
    @abstractmethod
    def least_value(self) -> float:
        """The least value of a node that pays for its row."""

    @abstractmethod
    def plan(self, gains: npt.NDArray[np.int64], demand: Demand) -> tuple[int, PrefillAllowance]:
        """Return the bucket of the next round and the prefill that it may take.

        Args:
            gains: [B] int64, sums of values that `select` would have taken; -1 where the sessions do not fit.
            demand: what it may serve.
        """

    @abstractmethod
    def drafted_rates(self, demand: Demand, gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        """Return the expected tokens of rounds behind growth steps, in the time of both: [K] a nanosecond.

        Args:
            demand: what they serve, prompts apart.
            gained: [K] accepted nodes to expect where all that the steps grow is verified.
            row_yield: most of them that one verified node brings.
            drafted_ns: [K], what the steps take.
        """

    @abstractmethod
    def note(self, bucket: int, shape: StepShape, round_ns: int, *, tokens: int, drafted_ns: int = 0) -> None:
        """Learn from a round.

        Args:
            bucket: its number.
            shape: of its rows.
            round_ns: what it took.
            tokens: that it committed.
            drafted_ns: what resident drafters took before it.
        """

    def plain_ns(self, bucket: int, shape: StepShape, round_ns: int, *, sessions: int) -> int:
        """Return what a round would have taken without nodes, which is never more than it took.

        Args:
            bucket, shape, round_ns: as `note` takes them.
            sessions: with verified rows.
        """
        return round_ns - int(min(max(self._saved_ns(bucket, shape, sessions), 0.0), round_ns))

    @abstractmethod
    def _saved_ns(self, bucket: int, shape: StepShape, sessions: int) -> float:
        """Nanoseconds that a round would have taken less without nodes; arguments as of `plain_ns`."""

    def note_accepted(self, accepted: int, expected: float) -> None:
        """Learn how many nodes were accepted of what their values let expect."""
        share, ratio = _FORGOTTEN_SHARE, 1.0
        if expected > 0:
            share, ratio = min(_RATIO_SHARE * expected, 1.0), accepted / expected
        self.ratio += share * (ratio - self.ratio)


class LearnedTimes(RoundTimes):
    """Times of rounds without graphs: no padding is computed, so every row has its cost, and one bucket is the bound.

    Args:
        bucket: of all rounds.
        cost: learned from them.
    """

    def __init__(self, bucket: Bucket, cost: StepCost) -> None:
        super().__init__()
        self._bucket, self._cost = bucket, cost
        # Averages of a round's tokens and its time.
        self._tokens, self._round_ns = 0.0, 0.0

    @property
    def least_value(self) -> float:
        """See `RoundTimes`; 0 as long as nothing is known."""
        row_ns = self._cost.row_ns
        if row_ns is None or not self._round_ns:
            return 0.0
        return row_ns * self._tokens / self._round_ns / max(self.ratio, _LEAST_RATIO)

    def plan(self, gains: npt.NDArray[np.int64], demand: Demand) -> tuple[int, PrefillAllowance]:
        """See `RoundTimes`."""
        most = min(self._bucket.prefill, demand.missing)
        if not demand.sessions:
            return 0, PrefillAllowance(most=most)
        return 0, self._cost.beside(demand.rows, demand.keys, most=most)

    def drafted_rates(self, demand: Demand, gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        """See `RoundTimes`; 0 before anything is known."""
        plain_ns = self._cost.verification_ns(demand.sessions, demand.keys)
        if plain_ns is None:
            return np.zeros(len(gained))
        nodes_ns = (self._cost.row_ns or 0.0) * gained / max(row_yield, _LEAST_RATIO)
        return (demand.sessions + gained) / np.maximum(plain_ns + nodes_ns + drafted_ns, 1.0)

    def note(self, bucket: int, shape: StepShape, round_ns: int, *, tokens: int, drafted_ns: int = 0) -> None:
        """See `RoundTimes`."""
        self._cost.observe(shape, round_ns)
        if shape.verify_rows and not shape.prefill_rows:
            self._tokens += _RATE_SHARE * (tokens - self._tokens)
            self._round_ns += _RATE_SHARE * (round_ns + drafted_ns - self._round_ns)

    def _saved_ns(self, bucket: int, shape: StepShape, sessions: int) -> float:
        return (self._cost.row_ns or 0.0) * (shape.verify_rows - sessions)


class CapturedTimes(RoundTimes):
    """Times of rounds that are captured in graphs, by bucket: padding takes what other rows take.

    Without prompts the best bucket is the one with the most expected tokens in its time. Beside sessions that run,
    prompts may make that time longer by `slowdown`. Of the buckets that keep to it, the best is the one with the most
    expected tokens, less those that the others would have brought in its time; of that time, what the prompt's rows
    take at the least is no loss, for they have to be computed anyway. Beside nothing, prompts end as soon as they can.

    Args:
        buckets: the shapes.
        captured_ns: what an empty round of each took when it was captured.
        slowdown: how much longer a round may take for the sake of prompts: 0.3 is 30 %.
    """

    def __init__(self, buckets: Sequence[Bucket], captured_ns: Sequence[float], *, slowdown: float) -> None:
        super().__init__()
        self._buckets, self._captured_ns, self._slowdown = buckets, captured_ns, slowdown
        # Time of rounds beyond that of their bucket, for contexts and processors, and of resident drafters before them.
        self._beyond_ns, self._drafted_ns = 0.0, 0.0
        # Attention time of prompt rows beyond the bucket's time: sums of a least-squares fit through 0.
        self._pairs_ns, self._pairs_square = 0.0, 0.0

    @property
    def least_value(self) -> float:
        """See `RoundTimes`; 0, for buckets decide."""
        return 0.0

    def drafted_rates(self, demand: Demand, gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        """See `RoundTimes`."""
        numbers, sessions = self._candidates(demand, has_prefill=False), demand.sessions
        rows = np.array([self._buckets[number].rows for number in numbers])
        rounds_ns = np.array([self._captured_ns[number] for number in numbers]) + self._beyond_ns
        accepted = np.minimum(gained[:, None], row_yield * (rows - sessions))
        return ((sessions + accepted) / (rounds_ns + drafted_ns[:, None])).max(axis=1)

    def plan(self, gains: npt.NDArray[np.int64], demand: Demand) -> tuple[int, PrefillAllowance]:
        """See `RoundTimes`."""
        rates = [self._rate(number, int(gain), demand.sessions) for number, gain in enumerate(gains)]
        plain = max(self._candidates(demand, has_prefill=False), key=rates.__getitem__)
        if not demand.missing:
            return plain, PrefillAllowance(most=0)
        return self._beside_prompts(rates, plain, demand)

    def _beside_prompts(self, rates: Sequence[float], plain: int, demand: Demand) -> tuple[int, PrefillAllowance]:
        """Return the best of the buckets with prefill, and what it leaves to prompts.

        Args:
            rates: expected tokens in the time of each bucket.
            plain: number of the best bucket without prefill.
            demand: as `plan` takes it.
        """
        sessions, missing = demand.sessions, demand.missing
        beside = self._candidates(demand, has_prefill=True)
        limit_ns = (1 + self._slowdown) * self._expected_ns(plain) if sessions else math.inf
        # Where none keeps to the limit, the quickest has to do.
        longest_ns = max(limit_ns, min(map(self._expected_ns, beside)))

        def allowance(number: int) -> PrefillAllowance:
            most, round_ns = min(self._buckets[number].prefill, missing), self._expected_ns(number)
            return PrefillAllowance(
                most=most,
                least=min(most, _LEAST_ROWS),
                # Rows are paid for with the bucket; what is left limits the keys that they see.
                time_ns=limit_ns - round_ns if round_ns < limit_ns else self._slowdown * round_ns,
                pair_ns=self._pairs_ns / self._pairs_square if self._pairs_square else 0.0,
            )

        row_ns = min(self._expected_ns(number) / self._buckets[number].prefill for number in beside)
        rate = rates[plain] or 1.0

        def progress(number: int) -> float:
            round_ns, left = self._expected_ns(number), missing - allowance(number).rows(demand.context)
            later_ns = row_ns * left
            if left and not sessions:
                # A round that no session would have had.
                rounds_ns = (self._expected_ns(other) for other in beside if self._buckets[other].prefill >= left)
                later_ns = min(rounds_ns, default=later_ns)
            return rates[number] * round_ns - rate * (round_ns + later_ns)

        best = max((number for number in beside if self._expected_ns(number) <= longest_ns), key=progress)
        return best, allowance(best)

    def _candidates(self, demand: Demand, *, has_prefill: bool) -> list[int]:
        """Return the numbers of the buckets that hold all running sessions."""
        sessions = demand.sessions + (min(demand.prompts, MAX_CHUNKS) if has_prefill else 0)
        found = [
            number
            for number, bucket in enumerate(self._buckets)
            if bool(bucket.prefill) == has_prefill and min(bucket.rows, bucket.sessions) >= sessions
        ]
        if not demand.takes_all_nodes:
            return found
        widest = max(self._buckets[number].rows for number in found)
        return [number for number in found if self._buckets[number].rows == widest]

    def _expected_ns(self, number: int) -> float:
        return self._captured_ns[number] + self._beyond_ns + self._drafted_ns

    def _rate(self, number: int, gain: int, sessions: int) -> float:
        """Expected tokens of a round in a bucket that holds the sessions, in its time; 0 where none is running."""
        if not sessions:
            return 0.0
        return (sessions + self.ratio * max(gain, 0) / GAIN_SCALE) / self._expected_ns(number)

    def note(self, bucket: int, shape: StepShape, round_ns: int, *, tokens: int, drafted_ns: int = 0) -> None:
        """See `RoundTimes`."""
        captured_ns = self._captured_ns[bucket]
        if shape.pairs >= _FEW_PAIRS:
            known_ns = captured_ns + self._beyond_ns
            pairs_ns = min(max(round_ns - known_ns, 0.0), known_ns)
            self._pairs_ns = _PAIRS_FORGET * self._pairs_ns + pairs_ns * shape.pairs
            self._pairs_square = _PAIRS_FORGET * self._pairs_square + shape.pairs * shape.pairs
        if shape.verify_rows and not shape.prefill_rows:
            # A round in which the host has a part may have waited for it.
            beyond_ns = min(max(round_ns - captured_ns, 0.0), captured_ns)
            self._beyond_ns += _BEYOND_SHARE * (beyond_ns - self._beyond_ns)
            self._drafted_ns += _RATE_SHARE * (drafted_ns - self._drafted_ns)

    def _saved_ns(self, bucket: int, shape: StepShape, sessions: int) -> float:
        fitting = (
            self._captured_ns[number]
            for number, other in enumerate(self._buckets)
            if other.prefill >= shape.prefill_rows and min(other.rows, other.sessions) >= sessions
        )
        return self._captured_ns[bucket] - min(fitting, default=self._captured_ns[bucket])


def times_of_buckets(
    buckets: Sequence[Bucket], captured_ns: Sequence[float], *, slowdown: float, on_gpu: bool
) -> RoundTimes:
    """Return the times of rounds before the first one.

    Args:
        buckets: [B] of the rounds; a single one without graphs.
        captured_ns: [B] time of each bucket's graph; none without graphs.
        slowdown: see `RoundConfig.prefill_slowdown`.
        on_gpu: whether rounds run on a GPU.
    """
    if captured_ns:
        return CapturedTimes(buckets, captured_ns, slowdown=slowdown)
    (bucket,) = buckets
    prior_rows, least_rows = _GPU_PREFILL if on_gpu else _CPU_PREFILL
    return LearnedTimes(bucket, StepCost(slowdown=slowdown, prior_rows=prior_rows, least_rows=least_rows))
