"""Expected times of a resident drafter's growth steps."""

from collections import Counter
from collections.abc import Sequence

# Share of the newest step in an average.
_SHARE = 0.1
# Without graphs: steps of a kind before their average is believed, for the first ones meet a machine that gets ready.
_BELIEVED = 16


class StepTimes:
    """Averages over steps of a kind: with graphs those of a bucket, else those for about as many sessions.

    A step that reads an earlier step's logits is of another kind than one with a forward pass.

    Args:
        captured_ns: [B] time of each bucket's graph; none without graphs.
        reading_ns: [B] time of each bucket's graph for steps that read.
    """

    def __init__(self, captured_ns: Sequence[float] = (), reading_ns: Sequence[float] = ()) -> None:
        self._by_bucket = list(captured_ns), list(reading_ns)
        self._by_sessions: dict[tuple[bool, int], float] = {}
        self._counts = Counter[tuple[bool, int]]()

    def of_buckets(self, *, reads: bool) -> list[float]:
        """Return the times [B] of all buckets; none without graphs."""
        return self._by_bucket[reads]

    def expected_ns(self, bucket: int, sessions: int, *, reads: bool) -> float | None:
        """Return the time of a step; None while too few were like it.

        Args:
            bucket: that it runs in.
            sessions: that the next round verifies.
            reads: whether it reads an earlier step's logits.
        """
        if self._by_bucket[0]:
            return self._by_bucket[reads][bucket]
        count = sessions.bit_length()
        kind = reads and self._counts[True, count] >= _BELIEVED, count
        return self._by_sessions[kind] if self._counts[kind] >= _BELIEVED else None

    def note(self, bucket: int, sessions: int, step_ns: float, *, reads: bool) -> None:
        """Learn from a step.

        Args:
            bucket, sessions, reads: as `expected_ns` takes them.
            step_ns: what it took.
        """
        if self._by_bucket[0]:
            times_ns = self._by_bucket[reads]
            times_ns[bucket] += _SHARE * (step_ns - times_ns[bucket])
            return
        kind = reads, sessions.bit_length()
        self._counts[kind] += 1
        before_ns, share = self._by_sessions.get(kind, step_ns), max(_SHARE, 1 / self._counts[kind])
        self._by_sessions[kind] = before_ns + share * (step_ns - before_ns)
