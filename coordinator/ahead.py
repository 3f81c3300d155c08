"""When the batch that follows a step leaves, while that still runs: early enough to be there, and no earlier.

A successor that comes late costs the target what it waits. One that leaves early lacks what has grown since, which is
sent behind it: a message each time, and a session that comes meanwhile has to wait for the next one. Targets say how
long each lay there before its step ended, so that the time that one needs is known: making it, its way, and by how much
the prediction of the step's end was off. It leaves by the mean of that and some deviations before the end.
"""

# Of what is needed: beyond so many mean deviations few are late.
_DEVIATIONS = 3.0
# Before anything was measured: a share of the step, for all that is not its way.
_FIRST_SHARE = 0.2
# An error counts as so many deviations at most, and as no less than that much: a pause of the whole machine is no rule.
_MOST_DEVIATIONS, _LEAST_ERROR_NS = 4.0, 200_000.0


class Lead:
    """How long before a step's result its successor is made."""

    def __init__(self) -> None:
        self._mean_ns: float | None = None
        self._deviation_ns = 0.0

    def ns(self, *, step_ns: float, overhead_ns: float) -> float:
        """That time.

        Args:
            step_ns: what the step is expected to take.
            overhead_ns: from a batch's submission to its result, beyond its step.
        """
        if self._mean_ns is None:
            return overhead_ns + _FIRST_SHARE * step_ns
        return max(0.0, self._mean_ns + _DEVIATIONS * self._deviation_ns)

    def observe(self, lead_ns: float, ahead_ns: float) -> None:
        """One that was made so long before the expected result lay at the target so long before the end."""
        needed_ns = lead_ns - ahead_ns
        if self._mean_ns is None:
            self._mean_ns, self._deviation_ns = needed_ns, abs(needed_ns) / 2
            return
        most_ns = _MOST_DEVIATIONS * self._deviation_ns + _LEAST_ERROR_NS
        error_ns = min(max(needed_ns - self._mean_ns, -most_ns), most_ns)
        self._mean_ns += error_ns / 8
        self._deviation_ns += (abs(error_ns) - self._deviation_ns) / 4
