"""The sizes of one-graph rounds, and where a round's arrays lie in its bytes.

A round has the same rows for every session, so its bucket follows from how many sessions there are; and from whether
their logits are changed before the choice (lists of tokens, of so many entries in all), and whether log probabilities
are wanted: what no session of a round asks for is not in its graph.

Shapes: S sessions, n rows of each, T = S n; k steps; E entries of the lists of tokens, B of the short ones.
"""

import functools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.engine.buckets import Bucket
from outrider.engine.one_graph_shape import RoundShape
from outrider.engine.step_buffers import StepLayout

_SESSIONS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512)
_ENTRIES = (0, 4096, 65536, 524288)
_SHORT_ENTRIES = 4096
_ALTERNATIVES = (0, 5, 20)
_MOST_LAYOUTS = 256


@dataclass(frozen=True, kw_only=True, order=True)
class RoundBucket(Bucket):
    """Bounds of a round.

    Attributes:
        steps: k.
        entries: E, of the tokens that penalties count; 0 where no logits are changed.
        alternatives: most likely tokens whose log probabilities are told at every row; -1 where none is told, that of
            the chosen token neither.
    """

    steps: int = 1
    entries: int = 0
    alternatives: int = -1

    @property
    def short_entries(self) -> int:
        """B, of each other list of tokens."""
        return _SHORT_ENTRIES if self.entries else 0


@dataclass(frozen=True, kw_only=True)
class RoundNeeds:
    """What the sessions of a round ask for beside a choice.

    Attributes:
        entries: tokens that penalties count, of all sessions.
        short_entries: the longest other list: biases, allowed tokens, banned tokens of all rows.
        alternatives: the most that a session wants told at a row; -1 where none wants any log probability.
    """

    entries: int = 0
    short_entries: int = 0
    alternatives: int = -1

    @property
    def fits(self) -> bool:
        """Whether there is a bucket for it."""
        return (
            self.entries <= _ENTRIES[-1]
            and self.short_entries <= _SHORT_ENTRIES
            and self.alternatives <= _ALTERNATIVES[-1]
        )


class RoundLadder:
    """Which buckets there are.

    Args:
        shape: of every session's tree.
        max_tokens: rows of the largest.
        max_sessions: sessions at a time.
        row_len: most keys of a session.
    """

    def __init__(self, shape: RoundShape, *, max_tokens: int, max_sessions: int, row_len: int) -> None:
        most = max(1, min(max_sessions, max_tokens // shape.rows))
        self._shape, self._row_len = shape, row_len
        self._sessions = (*(rung for rung in _SESSIONS if rung < most), most)

    @property
    def max_sessions(self) -> int:
        """Sessions of the largest bucket."""
        return self._sessions[-1]

    def bucket(self, sessions: int, needs: RoundNeeds) -> RoundBucket:
        """The smallest bucket that holds so many sessions; `needs` fits."""
        count = self._sessions[bisect_left(self._sessions, sessions)]
        changes = needs.entries or needs.short_entries
        rows = count * self._shape.rows
        return RoundBucket(
            tokens=rows,
            sessions=count,
            keys=self._row_len,
            query_len=self._shape.rows,
            logit_rows=rows,
            nodes=self._shape.rows,
            words=1,
            steps=self._shape.steps,
            entries=_ENTRIES[bisect_left(_ENTRIES, max(needs.entries, 1))] if changes else 0,
            alternatives=_ALTERNATIVES[bisect_left(_ALTERNATIVES, needs.alternatives)]
            if needs.alternatives >= 0
            else -1,
        )

    def first_set(self) -> list[RoundBucket]:
        """The buckets that serving begins with: any number of sessions that ask for nothing special."""
        return [self.bucket(count, RoundNeeds()) for count in self._sessions]

    def rehearsal(self) -> list[RoundBucket]:
        """Buckets that need, with the first set, every kernel that any round needs.

        Rounds that change logits are captured when they are asked for; how long the lists are makes no difference.
        """
        return [self.bucket(count, RoundNeeds(entries=1)) for count in self._sessions]


class RoundLayout(StepLayout):
    """Where a round's arrays lie in its bytes: a step's, and what the draft and the processors read."""

    bucket: RoundBucket

    @staticmethod
    @functools.lru_cache(maxsize=_MOST_LAYOUTS)
    def of_round(bucket: RoundBucket) -> "RoundLayout":
        """The bucket's layout, made once."""
        return RoundLayout(bucket)

    def _wanted(self) -> Iterator[tuple[str, str, tuple[int, ...], float]]:
        yield from super()._wanted()
        bucket = self.bucket
        sessions, starts = (bucket.sessions,), (bucket.sessions + 1,)
        yield "is_known", "<i4", sessions, 0
        yield "last_positions", "<i4", sessions, 0
        yield "draft_start", "<i4", starts, 0
        yield "draft_slots", "<i8", (bucket.steps - 1, bucket.sessions), -1
        if not bucket.entries:
            return
        for name, off in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
            yield name, "<f4", sessions, off
        for name in ("count_start", "bias_start", "allowed_start"):
            yield name, "<i4", starts, 0
        yield "banned_start", "<i4", (bucket.tokens + 1,), 0
        for name in ("count_tokens", "count_output"):
            yield name, "<i4", (bucket.entries,), 0
        for name in ("bias_tokens", "allowed_tokens", "banned_tokens"):
            yield name, "<i4", (bucket.short_entries,), 0
        yield "bias_values", "<f4", (bucket.short_entries,), 0
