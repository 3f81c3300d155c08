"""A time that is measured again and again."""


class Latency:
    """A running mean of a time.

    Attributes:
        mean_ns: in nanoseconds; 0 before the first.
    """

    def __init__(self) -> None:
        self.mean_ns = 0.0

    def observe(self, elapsed_ns: float) -> None:
        """Take one measured time."""
        # A pause of the whole machine counts as twice the mean at most.
        error_ns = min(elapsed_ns, 2 * self.mean_ns) - self.mean_ns if self.mean_ns else 8 * elapsed_ns
        self.mean_ns += error_ns / 8
