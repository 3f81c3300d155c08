"""When a step of prefill alone is due, and how long it may take: not while a batch is on its way to take it along.

Alone, prefill reads all of the model's weights for its own rows; beside a verification they are read anyway.
"""

import time

from outrider.target_worker.step_cost import StepCost, StepShape

# After a verification its sessions' next trees are expected: for so many times as long as it took, within bounds.
_EXPECTED_STEPS, _LEAST_EXPECTED_NS, _MOST_EXPECTED_NS = 2.0, 3_000_000, 100_000_000
# Sessions that were verified so lately may come back: a step of prefill alone takes no more than so many of theirs.
_RUNNING_NS, _CHUNK_STEPS = 1_000_000_000, 2.0
# Before anything was measured: prefill rows that cost as much as a verification. And those that always go along: a GPU
# has them for next to nothing.
_CPU_PRIOR_ROWS, _GPU_PRIOR_ROWS = 32, 256
_CPU_LEAST_ROWS, _GPU_LEAST_ROWS = 16, 32


class PrefillPace:
    """Learns from steps as they end.

    Args:
        slowdown: how much longer than its verification alone a step may take for the sake of prefill.
        on_cpu: whether the model runs there.

    Attributes:
        cost: what steps cost.
    """

    def __init__(self, *, slowdown: float, on_cpu: bool) -> None:
        self.cost = StepCost(
            slowdown=slowdown,
            prior_rows=_CPU_PRIOR_ROWS if on_cpu else _GPU_PRIOR_ROWS,
            least_rows=_CPU_LEAST_ROWS if on_cpu else _GPU_LEAST_ROWS,
        )
        self._verified_ns = self._verification_ns = 0

    def note(self, shape: StepShape, step_ns: int, *, ended_ns: int) -> None:
        """A step of this shape has ended, by `time.perf_counter_ns`."""
        self.cost.observe(shape, step_ns)
        if shape.verify_rows:
            self._verified_ns = ended_ns
            known_ns = self.cost.verification_ns(shape.verify_rows, shape.keys)
            self._verification_ns = step_ns if known_ns is None else int(known_ns)

    def due_s(self) -> float:
        """How long prefill should wait for a batch, if there are sessions that may send one; 0.0 when it is overdue."""
        if not self._verified_ns:
            return 0.0
        expected_ns = min(max(_EXPECTED_STEPS * self._verification_ns, _LEAST_EXPECTED_NS), _MOST_EXPECTED_NS)
        return max(0.0, self._verified_ns + expected_ns - time.perf_counter_ns()) / 1e9

    def chunk_ns(self) -> float | None:
        """How long a step of prefill alone may take; None where no session is running that would wait for it."""
        running = self._verified_ns and time.perf_counter_ns() - self._verified_ns < _RUNNING_NS
        return _CHUNK_STEPS * self._verification_ns if running else None
