"""The time for which a batch is held on purpose: what of the delay before it is no work of the coordinator's."""


class ChosenWait:
    """The wait of the batch that comes next, since the last result.

    It ends when the batch is decided on, or when it was due: what a timer, or an event loop that has other things to
    do, is late by is not chosen. What is done meanwhile had the time.
    """

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._until_ns = 0.0

    def hold(self, now_ns: int, hold_s: float) -> None:
        """The batch is held for so long from now on, not for how long it was to be held before."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._until_ns = now_ns + hold_s * 1e9

    def end(self, now_ns: int) -> int:
        """The batch is decided on, or a result begins a new round; nanoseconds of the wait."""
        since_ns, self._since_ns = self._since_ns, None
        if since_ns is None:
            return 0
        return int(min(now_ns, self._until_ns)) - since_ns
