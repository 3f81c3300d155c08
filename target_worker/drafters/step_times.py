"""Expected times of a resident drafter's growth steps."""

from collections.abc import Sequence

# Share of the newest step in an average.
_SHARE = 0.1


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
        # Without graphs the first step of a kind compiles: it is left out.
        self._compiled = set[tuple[bool, int]]()

    def of_buckets(self, *, reads: bool) -> list[float]:
        """Return the times [B] of all buckets; none without graphs."""
        return self._by_bucket[reads]

    def expected_ns(self, bucket: int, sessions: int, *, reads: bool) -> float | None:
        """Return the time of a step; None if there was none like it.

        Args:
            bucket: that it runs in.
            sessions: that the next round verifies.
            reads: whether it reads an earlier step's logits.
        """
        if self._by_bucket[0]:
            return self._by_bucket[reads][bucket]
        passes_ns = self._by_sessions.get((False, sessions.bit_length()))
        return self._by_sessions.get((reads, sessions.bit_length()), passes_ns)

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
        if kind in self._compiled:
            self._by_sessions[kind] = (1 - _SHARE) * self._by_sessions.get(kind, step_ns) + _SHARE * step_ns
        self._compiled.add(kind)
