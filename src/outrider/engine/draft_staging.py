"""A growth step's rows, as columns over all sessions, and how they are packed into the bytes of a step.

What `outrider.engine.step_staging` packs from a batch is written here straight into the step's arrays: trees grow by
one level a step, so a step's host time is one of its costs.

Shapes: T rows, S sessions, R rows whose children are ranked, W mask words, C children of a row.
"""

import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.batch import ForwardBatch
from outrider.engine.buckets import Bucket
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import Bytes, StagedStep, StepBuffer, StepLayout
from outrider.engine.step_staging import pack_changes
from outrider.engine.step_trees import RECORD
from outrider.engine.tree_rows import TreeRows

# Rows of a step whose best children the next step may have without the host knowing them.
MOST_PROMISED = 4096
_NOTHING_MORE = np.empty((3, 0), dtype=np.int32)


class GrowthRows:
    """The rows of a growth step: of each session either a chain of pending tokens or nodes of its tree.

    What is added session by session is held in lists; the trees that are added all at once stay arrays, and stand
    behind it. `unpack` moves them to the lists.

    Attributes:
        rows: [S] of the slot table.
        tree_starts: [S] key index of bit 0 of the masks.
        key_lens: [S] keys of each session.
        counts: [S] query rows of each session.
        tokens: [T]; -1 - r stands for the best child of row r of the R of the growth step that was launched before,
            r below `MOST_PROMISED`.
        positions: [T].
        write_index: [T] key index of each row's own key and value.
        prefix_lens: [T] keys before this index are seen by all.
        masks: [T] which keys from `tree_starts` on a row sees.
        wanted: [R] the query rows whose children are ranked, ascending.
        records: [R] `SamplingSpec.record` of each.
        trees: what was added all at once, if anything.
    """

    __slots__ = (
        "_sampling", "counts", "key_lens", "masks", "positions", "prefix_lens", "records", "rows", "tokens",
        "tree_starts", "trees", "wanted", "write_index",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tree_starts: list[int] = []
        self.key_lens: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.write_index: list[int] = []
        self.prefix_lens: list[int] = []
        self.masks: list[int] = []
        self.wanted: list[int] = []
        self.records: list[bytes] = []
        self.trees: TreeRows | None = None
        self._sampling: npt.NDArray[np.int32] | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.tokens) + (0 if self.trees is None else self.trees.rows.shape[1])

    @property
    def num_sessions(self) -> int:
        """S."""
        return len(self.rows) + (0 if self.trees is None else self.trees.sessions.shape[1])

    @property
    def num_wanted(self) -> int:
        """R."""
        return len(self.wanted) + (0 if self.trees is None else self.trees.rows.shape[1])

    def words_needed(self, least: int) -> int:
        """Words that every mask fits into, at least so many."""
        words = max(least, (max(self.masks, default=0).bit_length() + 63) // 64)
        if self.trees is not None and self.trees.masks.shape[1] > words:
            used = np.flatnonzero(self.trees.masks.any(axis=0))
            words = max(words, int(used[-1]) + 1)
        return words

    @property
    def most_keys(self) -> int:
        """Of a session."""
        keys = max(self.key_lens, default=0)
        return keys if self.trees is None else max(keys, self.trees.most_keys)

    @property
    def most_queries(self) -> int:
        """Of a session."""
        rows = max(self.counts, default=0)
        return rows if self.trees is None else max(rows, self.trees.most_queries)

    def add_chain(self, row: int, token_ids: Sequence[int], first_index: int, record: bytes | None) -> None:
        """Consecutive tokens, each of which sees all before it and itself.

        Args:
            row: the session's row of the slot table.
            token_ids: the tokens at key indices, which are their positions, from `first_index` on.
            first_index: key index of the first.
            record: how the children of the last are ranked; None if it has none yet.
        """
        count, end = len(token_ids), first_index + len(token_ids)
        self._session(row, end, end, count)
        self.tokens += token_ids
        self.positions += range(first_index, end)
        self.write_index += range(first_index, end)
        self.prefix_lens += range(first_index + 1, end + 1)
        self.masks += [0] * count
        if record is not None:
            self.wanted.append(len(self.tokens) - 1)
            self.records.append(record)

    def add_tree(
        self,
        row: int,
        *,
        tree_start: int,
        first_index: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        masks: Sequence[int],
        record: bytes,
    ) -> None:
        """Nodes of a tree: each sees the keys before `tree_start` and those its mask names.

        Args:
            row: the session's row of the slot table.
            tree_start: key index of bit 0 of the masks.
            first_index: key index of the first node, after which the others stand.
            token_ids: [n].
            positions: [n].
            masks: [n], the node's own bit included.
            record: how their children are ranked.
        """
        count, begin = len(token_ids), len(self.tokens)
        self._session(row, tree_start, first_index + count, count)
        self.tokens += token_ids
        self.positions += positions
        self.write_index += range(first_index, first_index + count)
        self.prefix_lens += [tree_start] * count
        self.masks += masks
        self.wanted += range(begin, begin + count)
        self.records += [record] * count

    def add_trees(self, trees: TreeRows) -> None:
        """Nodes of several sessions' trees; nothing is added behind them."""
        assert self.trees is None, "trees are added once"
        self.trees = trees

    def unpack(self) -> None:
        """Moves what was added all at once to the lists."""
        if self.trees is None:
            return
        trees, self.trees = self.trees, None
        begin = len(self.tokens)
        for held, more in zip(self._of_sessions(), trees.sessions.tolist(), strict=True):
            held.extend(more)
        for held, more in zip(self._of_rows(), trees.rows.tolist(), strict=True):
            held.extend(more)
        self.masks += [int.from_bytes(words.tobytes(), "little") for words in trees.masks]
        self.wanted += range(begin, len(self.tokens))
        self.records += [record.tobytes() for record in trees.records]

    def session_columns(self) -> npt.NDArray[np.int64]:
        """[4, S] rows of the slot table, key index of bit 0 of the masks, keys and query rows of each session."""
        return _joined(self._of_sessions(), None if self.trees is None else self.trees.sessions)

    def row_columns(self) -> npt.NDArray[np.int64]:
        """[4, T] tokens, positions, key indices of own keys, keys before which all see all."""
        return _joined(self._of_rows(), None if self.trees is None else self.trees.rows)

    def wanted_rows(self) -> npt.NDArray[np.int64]:
        """[R] `wanted`, those of the trees included."""
        if self.trees is None:
            return np.array(self.wanted, dtype=np.int64)
        behind = np.arange(len(self.tokens), self.num_rows)
        return np.concatenate([np.array(self.wanted, dtype=np.int64), behind]) if self.wanted else behind

    def mask_words(self, words: int) -> npt.NDArray[np.int64]:
        """[T words] the masks."""
        parts = [mask_words(self.masks, words).ravel()] if self.masks else []
        if self.trees is not None:
            masks, count = self.trees.masks, self.trees.masks.shape[1]
            if count < words:
                masks = np.pad(masks, ((0, 0), (0, words - count)))
            parts.append(masks.ravel() if count == words else masks[:, :words].ravel())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def batch(self, words: int = 1) -> ForwardBatch:
        """The rows as a forward whose logits are wanted where children are; masks have `words` words, or as many as it
        takes.
        """
        self.unpack()
        count = self.num_rows
        words = max((max(self.masks).bit_length() + 63) // 64, words)
        rows, tree_starts, key_lens = np.array([self.rows, self.tree_starts, self.key_lens], dtype=np.int32)
        positions, write_index, prefix_len = np.array(
            [self.positions, self.write_index, self.prefix_lens], dtype=np.int32
        )
        return ForwardBatch(
            token_ids=np.array(self.tokens, dtype=np.int64),
            positions=positions,
            rows=rows,
            query_start=np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32),
            tree_start=tree_starts,
            prefix_len=prefix_len,
            tree_mask=mask_words(self.masks, words).reshape(count, words),
            write_index=write_index,
            key_len=key_lens,
            logit_rows=np.array(self.wanted, dtype=np.int64),
        )

    def sampling(self) -> npt.NDArray[np.int32]:
        """[8 R] `records` one after the other, made once; when the rows are whole."""
        if self._sampling is None:
            sampling = np.frombuffer(b"".join(self.records), dtype=np.int32).copy()
            if self.trees is not None:
                behind = self.trees.records.ravel()
                sampling = np.concatenate([sampling, behind]) if self.records else behind
            self._sampling = sampling
        return self._sampling

    def temperatures(self) -> npt.NDArray[np.float32]:
        """[R] of the rows whose children are ranked."""
        return self.sampling().view(RECORD)["temperature"].copy()

    def _of_sessions(self) -> tuple[list[int], ...]:
        return self.rows, self.tree_starts, self.key_lens, self.counts

    def _of_rows(self) -> tuple[list[int], ...]:
        return self.tokens, self.positions, self.write_index, self.prefix_lens

    def _session(self, row: int, tree_start: int, key_len: int, count: int) -> None:
        assert self.trees is None, "nothing is added behind the trees"
        self.rows.append(row)
        self.tree_starts.append(tree_start)
        self.key_lens.append(key_len)
        self.counts.append(count)


def stage_growth(
    growth: GrowthRows,
    *,
    children: int,
    words: int,
    slots: SlotTable,
    choose: Callable[[Bucket], Bucket],
    buffer: StepBuffer,
) -> StagedStep:
    """The step, packed into `buffer`; its rows' slots are reserved in `slots`.

    Args:
        growth: the rows.
        children: C.
        words: W of every step, so that deep trees need no graphs of their own.
        slots: the slot table; what changed in it counts as sent.
        choose: the bucket that holds a step of a given size.
        buffer: free to be written.
    """
    total, sessions = growth.num_rows, growth.num_sessions
    bucket = choose(Bucket(
        tokens=total, sessions=sessions, keys=growth.most_keys, query_len=growth.most_queries,
        logit_rows=growth.num_wanted, nodes=0, words=growth.words_needed(words), children=children,
    ))  # fmt: skip
    data, more = _packer()(growth, StepLayout.of(bucket), slots, buffer)
    return StagedStep(bucket=bucket, data=data, more_updates=more, logit_rows=growth.num_wanted, trees=0, buffer=buffer)


def _pack_compiled(
    growth: GrowthRows, layout: StepLayout, slots: SlotTable, buffer: StepBuffer
) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """`pack_columns` as one loop."""
    sessions = growth.session_columns()
    rows = sessions[0].tolist()
    begins, ends = slots.take_changes(rows)
    width, views = layout.bucket.words, buffer.views(layout.nbytes)
    places, template = _places(layout)
    changed = _kernels().pack_growth(
        width,
        sessions,
        np.array(begins + ends),
        growth.row_columns(),
        growth.wanted_rows(),
        growth.mask_words(width),
        growth.sampling(),
        slots.table,
        places,
        template,
        views.wide,
        views.words,
    )
    assert changed >= 0, "a row writes to a slot that was not reserved"
    if changed <= layout.updates:
        return views.data, _NOTHING_MORE
    # Rare: a commit that moves more than usual.
    spans = zip(rows, begins, ends, strict=True)
    entries = np.array([(row, index) for row, begin, end in spans for index in range(begin, end)]).T
    more = np.stack([*entries, slots.table[entries[0], entries[1]]])[:, layout.updates :]
    return views.data, more.astype(np.int32)


def pack_columns(
    growth: GrowthRows, layout: StepLayout, slots: SlotTable, buffer: StepBuffer
) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """A step's bytes, and the changed entries of the slot table that find no place there."""
    growth.unpack()
    total, ranked, sessions = growth.num_rows, len(growth.wanted), growth.num_sessions
    data, arrays = buffer.step(layout)
    rows, tree_starts, key_lens, counts = np.array(
        [growth.rows, growth.tree_starts, growth.key_lens, growth.counts], dtype=np.int32
    )
    arrays["rows"][:sessions] = rows
    arrays["tree_start"][:sessions] = tree_starts
    arrays["key_len"][:sessions] = key_lens
    query_start = arrays["query_start"]
    np.cumsum(counts, dtype=np.int32, out=query_start[1 : sessions + 1])
    query_start[sessions + 1 :] = total
    of_row = np.array([growth.positions, growth.write_index, growth.prefix_lens, growth.tokens], dtype=np.int32)
    write_slots = slots.table[np.repeat(rows, counts), of_row[1]]
    assert write_slots.min() >= 0, "a row writes to a slot that was not reserved"
    arrays["token_ids"][:total] = of_row[3]
    arrays["positions"][:total] = of_row[0]
    arrays["write_slots"][:total] = write_slots
    arrays["prefix_len"][:total] = of_row[2]
    arrays["tree_mask"][:total] = mask_words(growth.masks, layout.bucket.words)
    if ranked:
        wanted = np.array(growth.wanted)
        arrays["logit_rows"][:ranked] = wanted
        arrays["choice_positions"][:ranked] = of_row[0][wanted] + 1
        columns = growth.sampling().view(RECORD)
        for name in RECORD.names or ():
            arrays[name][:ranked] = columns[name]
    return data, pack_changes(rows, slots, arrays)


@functools.cache
def _packer() -> "Callable[[GrowthRows, StepLayout, SlotTable, StepBuffer], tuple[Bytes, npt.NDArray[np.int32]]]":
    # Whoever stages trees of a target alone has no use for a compiler.
    from outrider.compiled import IS_COMPILED

    return _pack_compiled if IS_COMPILED else pack_columns


@functools.cache
def _kernels() -> Any:
    from outrider.engine import growth_kernels

    return growth_kernels


@functools.lru_cache(maxsize=512)
def _places(layout: StepLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the arrays of a layout lie, and a step of nothing, as the loop takes them."""
    places = [layout.begins[name] for name in _kernels().ARRAYS]
    return np.array([*places, layout.updates], dtype=np.int64), layout.template.view(np.int64)


class RankedChildren:
    """What comes back of a growth step: the C best children of each of the R rows, best first.

    Attributes:
        tokens: [R, C] int32; -1 past the last that may be chosen.
        log_q: [R, C] float32.
        scores: [R, C] float32, log q + G.
    """

    __slots__ = ("log_q", "scores", "tokens")

    def __init__(self, answer: npt.NDArray[np.int32], staged: StagedStep) -> None:
        """From the words that the device sent, which are copied: their buffer is used again."""
        bucket, ranked = staged.bucket, staged.logit_rows
        words = answer.reshape(3, bucket.logit_rows, bucket.children)[:, :ranked].copy()
        self.tokens = words[0]
        self.log_q, self.scores = words[1:].view(np.float32)


def mask_words(masks: Sequence[int], words: int) -> npt.NDArray[np.int64]:
    """Masks as int64 words [T, words], bit j little-endian over the words."""
    # A copy may be written to, which torch wants of what it reads.
    return np.frombuffer(_mask_bytes(masks, words), dtype="<i8").reshape(len(masks), words).copy()


def _joined(lists: Sequence[list[int]], behind: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    """Columns of the same length, and what stands behind them."""
    if behind is not None and not lists[0]:
        return behind
    columns = array("q")
    for column in lists:
        columns.extend(column)
    before = np.frombuffer(columns, dtype=np.int64).reshape(len(lists), -1)
    # What is read of bytes cannot be written, which is a type of its own to the compiler.
    return before.copy() if behind is None else np.concatenate([before, behind], axis=1)


def _mask_bytes(masks: Sequence[int], words: int) -> bytes:
    if words == 1:
        return struct.pack(f"<{len(masks)}Q", *masks)
    size = 8 * words
    return b"".join([mask.to_bytes(size, "little") for mask in masks])
