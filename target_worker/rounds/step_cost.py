"""Costs of steps without graphs, learned from those that ran, and the prefill that fits beside a verification.

    verification alone     a + b rows + c keys         rows: roots and nodes; keys: tokens before the roots
    prefill beside it      d rows + e pairs            on top of that; pairs: keys that the prefill rows see, in sum

Each line is a least-squares fit with coefficients of at least 0 that forgets old steps. They are learned apart: what
verification alone takes stays known through a long prefill. Prefill alone takes all the rows that there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# What one more measurement leaves of the weight of those before; of prefill beside a verification only the sizes that
# are tried now matter.
_FORGET, _FORGET_BESIDE = 0.97, 0.9
# A fit is believed from so many measurements on; then what took several times as long as expected met something else.
_BELIEVED = 3
_OUTLIER = 3.0
# Sizes of which the fits' features are multiples, so that these are of one order.
_ROWS, _KEYS, _PAIRS = 64.0, 65536.0, 1048576.0
# No step takes many more prefill rows than those measured: rows that a GPU computes beside others for nothing end
# somewhere, which no fit foretells.
_GROWTH, _GROWTH_ROWS = 1.25, 48
# After so many steps with prefill one goes without, for the comparison.
_PROBE_STEPS = 64


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Size of a step; see the module's docstring."""

    verify_rows: int = 0
    keys: int = 0
    prefill_rows: int = 0
    pairs: float = 0.0


def prefill_pairs(rows: int, context: int) -> float:
    """The keys that so many rows of a prefill see in sum, `context` tokens before the first."""
    return rows * (context + 0.5 * rows)


class _Fit:
    """y = w x, w >= 0, by least squares over measurements that fade."""

    def __init__(self, count: int, *, forget: float = _FORGET) -> None:
        self.weights = [0.0] * count
        self.observed = 0
        self._forget = forget
        self._products = [[0.0] * count for _ in range(count)]
        self._targets = [0.0] * count

    def predict(self, features: Sequence[float]) -> float:
        return sum(weight * feature for weight, feature in zip(self.weights, features, strict=True))

    def observe(self, features: Sequence[float], value: float) -> None:
        self.observed += 1
        places = range(len(features))
        for i in places:
            self._targets[i] = self._forget * self._targets[i] + features[i] * value
            for j in places:
                self._products[i][j] = self._forget * self._products[i][j] + features[i] * features[j]
        # Coordinate descent, from the weights found before: few rounds follow the data well enough.
        for _ in range(12):
            for i in places:
                if self._products[i][i] > 0:
                    rest = sum(self._products[i][j] * self.weights[j] for j in places if j != i)
                    self.weights[i] = max(0.0, (self._targets[i] - rest) / self._products[i][i])


class PrefillAllowance:
    """Prefill rows that one step may take; what is spent is gone.

    Args:
        most: rows, whatever they cost.
        least: rows that are granted, whatever they cost.
        time_ns: what rows may cost.
        row_ns: of one row.
        pair_ns: of one key that a row sees.
    """

    def __init__(
        self, *, most: int, least: int = 0, time_ns: float = math.inf, row_ns: float = 0.0, pair_ns: float = 0.0
    ) -> None:
        self._most = most
        self._least = least
        self._time_ns = time_ns
        self._row_ns = row_ns
        self._pair_ns = pair_ns

    def rows(self, context: int) -> int:
        """Return how many rows may follow `context` tokens."""
        linear, square = self._row_ns + self._pair_ns * context, self._pair_ns / 2
        fitting = float(self._most)
        if self._time_ns <= 0:
            fitting = 0.0
        elif self._time_ns < math.inf and (linear or square):
            # The root of square n^2 + linear n = time, in the form that also holds for square = 0.
            fitting = 2 * self._time_ns / (linear + math.sqrt(linear * linear + 4 * square * self._time_ns))
        return int(min(self._most, max(fitting, self._least)))

    def spend(self, rows: int, context: int) -> None:
        """Spend the allowance on rows that follow `context` tokens."""
        self._most -= rows
        self._least -= rows
        self._time_ns -= self._row_ns * rows + self._pair_ns * prefill_pairs(rows, context)


class StepCost:
    """The two fits.

    Args:
        slowdown: how much longer than its verification alone a step may take for the sake of prefill: 0.4 is 40 %.
        prior_rows: prefill rows that are taken to cost as much as a verification before anything was measured.
        least_rows: rows by which prefill always moves, whatever they cost.
    """

    def __init__(self, *, slowdown: float, prior_rows: int, least_rows: int = 32) -> None:
        self._slowdown, self._least_rows = slowdown, least_rows
        self._prior_rows = prior_rows
        self._alone, self._beside = _Fit(3), _Fit(2, forget=_FORGET_BESIDE)
        self._tried = float(least_rows)
        self._since_alone = 0

    def observe(self, shape: StepShape, step_ns: float) -> None:
        """One measured step."""
        if not shape.verify_rows:
            return
        prefill = (shape.prefill_rows / _ROWS, shape.pairs / _PAIRS)
        alone = (1.0, shape.verify_rows / _ROWS, shape.keys / _KEYS)
        if not shape.prefill_rows:
            self._since_alone = 0
            if self._alone.observed >= _BELIEVED:
                step_ns = min(step_ns, _OUTLIER * self._alone.predict(alone))
            self._alone.observe(alone, step_ns)
            return
        self._since_alone += 1
        if self._alone.observed >= _BELIEVED:
            known_ns = self._alone.predict(alone)
            self._tried = max(0.99 * self._tried, float(shape.prefill_rows))
            self._beside.observe(prefill, min(max(0.0, step_ns - known_ns), _OUTLIER * known_ns))

    def verification_ns(self, verify_rows: int, keys: int) -> float | None:
        """Return the time of a verification alone, in nanoseconds; None while unknown."""
        if self._alone.observed < _BELIEVED:
            return None
        return self._alone.predict((1.0, verify_rows / _ROWS, keys / _KEYS))

    @property
    def row_ns(self) -> float | None:
        """Nanoseconds that one more verified row takes; None while that is not known."""
        return self._alone.weights[1] / _ROWS if self._alone.observed >= _BELIEVED else None

    def beside(self, verify_rows: int, keys: int, *, most: int) -> PrefillAllowance:
        """The prefill that a step may take beside a verification."""
        known_ns = self.verification_ns(verify_rows, keys)
        if self._since_alone >= (_PROBE_STEPS if known_ns is not None else _PROBE_STEPS // 8):
            return PrefillAllowance(most=0)
        if known_ns is None or self._beside.observed < _BELIEVED:
            return PrefillAllowance(most=min(most, max(self._least_rows, int(self._slowdown * self._prior_rows))))
        row, pair = self._beside.weights
        return PrefillAllowance(
            most=min(most, max(self._least_rows, int(_GROWTH * self._tried) + _GROWTH_ROWS)),
            least=self._least_rows,
            time_ns=self._slowdown * known_ns,
            row_ns=row / _ROWS,
            pair_ns=pair / _PAIRS,
        )
