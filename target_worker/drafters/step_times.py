"""Times of a resident drafter's growth steps, as they are to be expected."""

from collections.abc import Sequence

# Share of the newest step in the average.
_SHARE = 0.1


class StepTimes:
    """Averages over steps of a kind: with graphs those of a bucket, else those for about as many sessions.

    Args:
        captured_ns: time of each bucket's graph; none without graphs.
        reading_ns: the same of steps that read an earlier one's logits.
    """

    def __init__(self, captured_ns: Sequence[float] = (), reading_ns: Sequence[float] = ()) -> None:
        self._is_captured = bool(captured_ns)
        self._learned = {(False, bucket): each_ns for bucket, each_ns in enumerate(captured_ns)}
        self._learned |= {(True, bucket): each_ns for bucket, each_ns in enumerate(reading_ns)}
        # Without graphs the first step of a kind takes what others do not.
        self._met = set(self._learned)

    def expected_ns(self, bucket: int, sessions: int, *, reads: bool) -> float | None:
        """Return the time of a step; None if there was none like it.

        Args:
            bucket: that it runs in.
            sessions: that are drafted.
            reads: whether it reads an earlier one's logits.
        """
        found = self._learned.get(self._kind(bucket, sessions, reads))
        return self.expected_ns(bucket, sessions, reads=False) if found is None and reads else found

    def note(self, bucket: int, sessions: int, step_ns: float, *, reads: bool) -> None:
        """Learn from a step.

        Args:
            bucket, sessions, reads: as `expected_ns` takes them.
            step_ns: what it took.
        """
        kind = self._kind(bucket, sessions, reads)
        if kind in self._met:
            before_ns = self._learned.setdefault(kind, step_ns)
            self._learned[kind] += _SHARE * (step_ns - before_ns)
        self._met.add(kind)

    def _kind(self, bucket: int, sessions: int, reads: bool) -> tuple[bool, int]:
        return reads, bucket if self._is_captured else sessions.bit_length()
