"""When the batch that follows a step leaves, while that still runs: late enough for growth, early enough to be there.

A successor that comes late costs the target what it waits; one that leaves early lacks what has grown since. Targets
say how long each lay there before its step ended, so that the time that one needs is known: making it, its way, and by
how much the prediction of the step's end was off. It leaves by the mean of that and some deviations before the end.
"""

from outrider.coordinator.firing import Latency

# Of what is needed: beyond so many mean deviations few are late.
_DEVIATIONS = 2.5
# Before anything was measured: a share of the step, for all that is not its way.
_FIRST_SHARE = 0.2


class Lead:
    """How long before a step's result its successor is made."""

    def __init__(self) -> None:
        self._need = Latency()

    def ns(self, *, step_ns: float, overhead_ns: float) -> float:
        """That time.

        Args:
            step_ns: what the step is expected to take.
            overhead_ns: from a batch's submission to its result, beyond its step.
        """
        need = self._need
        if not need.mean_ns:
            return overhead_ns + _FIRST_SHARE * step_ns
        return need.mean_ns + _DEVIATIONS * need.deviation_ns

    def observe(self, lead_ns: float, ahead_ns: float) -> None:
        """One that was made so long before the expected result lay at the target so long before the end."""
        self._need.observe(max(lead_ns - ahead_ns, 1.0))
