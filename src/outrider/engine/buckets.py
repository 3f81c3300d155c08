"""The sizes that steps are run in: a step is filled up to the next bucket, and every bucket has one CUDA graph.

A bucket bounds what launches depend on, never what a step holds: rows past a step's own belong to no session and are
stored nowhere. Bounds that cost next to nothing have few rungs (sessions, mask words), rows have many, for they are
what a product's time grows with.

Shapes: T rows, S sessions, R rows whose logits are wanted, W mask words.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 160, 192, 256, 320, 384, 512)
# Rows up to here have their logits computed whoever wants them: the output layer's weights are read all the same.
_FEW_TOKENS = 72
_LOGIT_ROWS = (_FEW_TOKENS, *(256 << doublings for doublings in range(16)))
_SESSIONS = (1, 4, 16, 64, 256)
# Steps without a graph are filled up to a multiple of this, so that kernels are not compiled for every length.
_UNCAPTURED_TOKENS = 128
_UNCAPTURED_KEYS = 1024
# What a tile of attention holds of packed rows (a row and a head of its group), where sessions have few of them.
_TILE_ROWS = 64


@dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """Bounds of a step.

    Attributes:
        tokens: T.
        sessions: S.
        keys: most keys of a session.
        query_len: most rows of a session.
        logit_rows: R.
        nodes: most rows of a session that are verified (a tree with its root); 0 where logits are all that is wanted.
        words: W.
        paths: keys of tree rows that are sessions of their own (`outrider.engine.step_staging`); 0 where none are.
    """

    tokens: int
    sessions: int
    keys: int
    query_len: int
    logit_rows: int
    nodes: int
    words: int
    paths: int = 0

    def holds(self, other: "Bucket") -> bool:
        """Whether a step of the other's size runs in this one."""
        return all(getattr(self, name) >= getattr(other, name) for name in self.__dataclass_fields__)


class BucketLadder:
    """Which buckets there are.

    Args:
        max_tokens: rows of the largest that is captured.
        max_sessions: sessions at a time.
        row_len: most keys of a session.
        max_nodes: most rows of a tree, its root included.
        group: query heads that share a key head.
        unrolled: whether tree rows are sessions of their own.
    """

    def __init__(
        self, *, max_tokens: int, max_sessions: int, row_len: int, max_nodes: int, group: int, unrolled: bool = False
    ) -> None:
        self._tokens = _up_to(_TOKENS, max_tokens)
        self._sessions = _up_to(_TOKENS if unrolled else _SESSIONS, max_tokens if unrolled else max_sessions)
        # Attention takes as long whatever bound it is given; with splits of a fixed length, partial results take memory
        # by it.
        self._keys = _up_to([1 << power for power in range(11, 31)] if unrolled else [], row_len)
        self._max_nodes = max_nodes
        self._short = max(_TILE_ROWS // group, 1)
        self._unrolled = unrolled

    @property
    def max_tokens(self) -> int:
        """Rows of the largest bucket that is captured."""
        return self._tokens[-1]

    def bucket(self, need: Bucket) -> Bucket:
        """The smallest bucket that holds a step of this size; beyond `max_tokens` one of its own."""
        captured = need.tokens <= self.max_tokens
        tokens = _rung(self._tokens, need.tokens) if captured else _multiple(need.tokens, _UNCAPTURED_TOKENS)
        keys = _rung(self._keys, need.keys) if captured else min(
            _multiple(need.keys, _UNCAPTURED_KEYS), self._keys[-1])  # fmt: skip
        query_len = self._short if need.query_len <= self._short < tokens else tokens
        logit_rows = tokens
        if tokens > _FEW_TOKENS:
            logit_rows = min(_rung((0, *_LOGIT_ROWS), need.logit_rows), tokens)
        # Unrolled, a tree's rows are not those of one session.
        most_nodes = tokens if self._unrolled else query_len
        words = 1 << (need.words - 1).bit_length()
        sessions = _rung(self._sessions, need.sessions) if need.sessions <= self._sessions[-1] else tokens
        if not captured:
            # As few kinds as can be: each is compiled when it first comes.
            sessions = max(sessions, self._sessions[-1])
            if need.nodes:
                words = max(words, 1 << ((self._max_nodes - 1) // 64).bit_length())
        return Bucket(
            tokens=tokens,
            sessions=sessions,
            keys=keys,
            query_len=query_len,
            logit_rows=logit_rows,
            nodes=min(most_nodes, logit_rows, max(self._max_nodes, need.nodes)) if need.nodes else 0,
            words=words,
            paths=64 * words * tokens if self._unrolled else 0,
        )

    def first_set(self) -> list[Bucket]:
        """The buckets that serving begins with, those that steps need most first.

        One session with trees of every size, some sessions and all of them with small trees, plain steps, prefill; a
        few that hold any mixture of so many rows; and steps too large to be captured, so that they are compiled.
        What is left is captured when it is asked for.
        """
        prompt = Bucket(tokens=1, sessions=1, keys=1, query_len=1, logit_rows=0, nodes=0, words=1)
        counts = [count for count in self._tokens if count > _FEW_TOKENS and not count & (count - 1)]
        found = {self.bucket(replace(prompt, tokens=count, query_len=count)): None
                 for count in (*counts, self.max_tokens + 1)}  # fmt: skip
        mixtures = [(count, count) for count in counts]
        # Past the largest graph, with few rows to verify beside a prompt and with many.
        mixtures += [(self.max_tokens + 1, rows) for rows in _LOGIT_ROWS if rows <= self.max_tokens]
        for count, logit_rows in mixtures:
            nodes = min(logit_rows, self._max_nodes)
            mixture = replace(
                prompt, tokens=count, sessions=min(count, self._sessions[-1]), query_len=count, logit_rows=logit_rows,
                nodes=nodes, words=(nodes + 63) // 64 or 1,
            )  # fmt: skip
            found[self.bucket(mixture)] = None
        if self._unrolled:
            for tokens in (count for count in self._tokens if count <= 2 * _FEW_TOKENS):
                nodes = min(tokens, self._max_nodes)
                need = replace(prompt, tokens=tokens, sessions=tokens, logit_rows=tokens, nodes=nodes)
                found[self.bucket(need)] = None
            return list(found)
        one_tree = [count for count in self._tokens if count <= _rung(self._tokens, self._max_nodes)]
        for sessions in self._sessions:
            counts = one_tree if sessions == 1 else [
                count for count in self._tokens if sessions // 2 <= count <= max(8 * sessions, 64)]  # fmt: skip
            for tokens in counts:
                query_len = tokens if sessions == 1 else min(tokens, self._short)
                nodes = min(query_len, self._max_nodes)
                need = Bucket(
                    tokens=tokens, sessions=min(sessions, tokens), keys=1, query_len=query_len, logit_rows=tokens,
                    nodes=nodes, words=(nodes + 63) // 64 or 1,
                )  # fmt: skip
                found[self.bucket(need)] = None
        return list(found)

    def rehearsal(self) -> list[Bucket]:
        """Buckets whose layers need, between them, every kernel that the layers of any step need.

        Kernels are compiled for what a bucket bounds: by rows and sessions, by whether a session has many of them, by
        words. Those of the captured set are a part of it; what is captured later, and what runs without a graph, would
        be compiled when it first comes, for seconds, while everybody waits. Neighbours differ, for several are compiled
        at a time. Empty where tree rows are sessions of their own: there the kernels are few.
        """
        if self._unrolled:
            return []
        found: dict[Bucket, None] = {}
        need = Bucket(tokens=1, sessions=1, keys=1, query_len=1, logit_rows=0, nodes=0, words=1)
        # Past the largest graph, some rows more, and so many that they fill the device by themselves.
        for tokens in (*self._tokens, self.max_tokens + 1, 4 * self.max_tokens):
            for query_len in (tokens, 1):
                # Each may be the bound of as few as one more than the one before it.
                for sessions in self._sessions[: 1 + bisect_left(self._sessions, tokens)]:
                    for words in self.words:
                        # Without a graph, bounds of keys are the steps' own.
                        for keys in _doublings(_UNCAPTURED_KEYS, self._keys[-1]) if tokens > self.max_tokens else (1,):
                            own = replace(need, tokens=tokens, sessions=sessions, query_len=query_len, keys=keys)
                            found[self.bucket(replace(own, words=words))] = None
        return list(found)

    @property
    def words(self) -> list[int]:
        """W of the steps that verify trees."""
        most = 1 << ((self._max_nodes + 63) // 64 - 1).bit_length()
        return [1 << power for power in range(most.bit_length())]


def _doublings(first: int, most: int) -> list[int]:
    """`first` and its doublings below `most`, and `most`."""
    return [*(first << power for power in range(most.bit_length()) if first << power < most), most]


def _up_to(rungs: Sequence[int], most: int) -> tuple[int, ...]:
    """The rungs below `most`, and `most`."""
    return (*(rung for rung in rungs if rung < most), most)


def _rung(rungs: Sequence[int], need: int) -> int:
    return rungs[bisect_left(rungs, need)]


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of
