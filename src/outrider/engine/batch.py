"""One forward's rows over many sessions, as numpy on the host: prefill chains and tree nodes mixed.

Shapes: T query rows, S sessions, W mask words, R rows whose logits are wanted. A session's rows stand together; key
indices count within its row of the slot table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """What one forward computes. Row r of session s sees key j when `j < prefix_len[r]` or bit
    `j - tree_start[s]` of `tree_mask[r]` is set.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int32.
        rows: [S] int32, rows of the slot table.
        query_start: [S + 1] int32.
        tree_start: [S] int32, key index that bit 0 of the masks stands for.
        prefix_len: [T] int32.
        tree_mask: [T, W] int64.
        write_index: [T] int32, key index under which each row's key and value are stored.
        key_len: [S] int32.
        logit_rows: [R] int64, ascending query rows.
    """

    token_ids: Int64Array
    positions: Int32Array
    rows: Int32Array
    query_start: Int32Array
    tree_start: Int32Array
    prefix_len: Int32Array
    tree_mask: Int64Array
    write_index: Int32Array
    key_len: Int32Array
    logit_rows: Int64Array

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeChoices:
    """How the R rows of logits choose, and the trees that the choices are walked down.

    Shapes: bs trees, n rows of the largest with its root.

    Attributes:
        seeds: [R] int64, bit patterns.
        positions: [R] int32, index in prompt + output of the token that the row chooses.
        temperature, top_p, min_p: [R] float32.
        top_k, choice_index: [R] int32.
        candidates: [bs, n] int32, tokens of the nodes, -1 for roots and padding.
        tree_rows: [bs, n] int32, of the R; -1 for padding.
        first_child, next_sibling: [bs, n] int32, -1 for none.
    """

    seeds: Int64Array
    positions: Int32Array
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: Int32Array
    choice_index: Int32Array
    candidates: Int32Array
    tree_rows: Int32Array
    first_child: Int32Array
    next_sibling: Int32Array


class BatchBuilder:
    """Puts a `ForwardBatch` together, session after session.

    Calls for the same row must follow one another: a session's rows are chains, then tree nodes.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[npt.NDArray[Any]] = []
        self._write_index: list[npt.NDArray[Any]] = []
        self._prefix_len: list[npt.NDArray[Any]] = []
        self._masks: list[tuple[int, Int64Array]] = []
        self._rows: list[int] = []
        self._seen: set[int] = set()
        self._query_start: list[int] = []
        self._tree_start: list[int] = []
        self._key_len: list[int] = []
        self._logit_rows: list[npt.NDArray[Any]] = []
        self._num_logits = 0

    @property
    def num_rows(self) -> int:
        """Query rows so far."""
        return len(self._token_ids)

    @property
    def num_sessions(self) -> int:
        """Sessions so far."""
        return len(self._rows)

    def add_chain(self, row: int, token_ids: Sequence[int], first_index: int, want_last_logits: bool) -> slice:
        """Consecutive tokens, each of which sees all before it and itself; position = key index.

        Args:
            row: the session's row of the slot table.
            token_ids: the tokens at key indices `first_index` on.
            first_index: key index of the first.
            want_last_logits: whether the last token's logits are wanted.

        Returns:
            The places of the wanted logits in the forward's result: one, or none.
        """
        end = first_index + len(token_ids)
        self._session(row, tree_start=end, key_len=end)
        self._token_ids.extend(token_ids)
        indices = np.arange(first_index, end + 1, dtype=np.int32)
        self._positions.append(indices[:-1])
        self._write_index.append(indices[:-1])
        self._prefix_len.append(indices[1:])
        return self._want(len(self._token_ids) - 1, int(want_last_logits))

    def add_tree(
        self,
        row: int,
        *,
        tree_start: int,
        token_ids: Sequence[int],
        positions: Sequence[int] | npt.NDArray[Any],
        masks: Int64Array,
        write_indices: Sequence[int],
        key_len: int | None = None,
        want_logits: bool = True,
    ) -> slice:
        """Tree nodes: each sees the keys before `tree_start` and those its mask names.

        Args:
            row: the session's row of the slot table.
            tree_start: key index of bit 0 of the masks.
            token_ids: [n].
            positions: [n] positions in the sequence, usually `tree_start` + depth.
            masks: [n, w] int64; bit j stands for key index `tree_start + j`, the node's own included.
            write_indices: [n] key indices of the nodes themselves.
            key_len: keys of the session that masks may name; by default up to the highest one written.
            want_logits: whether every node's logits are wanted.

        Returns:
            The places of the nodes' logits in the forward's result.
        """
        self._session(row, tree_start=tree_start, key_len=max(write_indices) + 1 if key_len is None else key_len)
        first, count = len(self._token_ids), len(token_ids)
        self._token_ids.extend(token_ids)
        self._positions.append(np.asarray(positions, dtype=np.int32))
        self._write_index.append(np.asarray(write_indices, dtype=np.int32))
        self._prefix_len.append(np.full(count, tree_start, dtype=np.int32))
        self._masks.append((first, masks))
        return self._want(first, count if want_logits else 0)

    def build(self) -> ForwardBatch:
        """The batch; at least one row must have been added."""
        assert self._token_ids, "an empty batch"
        count = len(self._token_ids)
        words = max((masks.shape[1] for _, masks in self._masks), default=1)
        tree_mask = np.zeros((count, words), dtype=np.int64)
        for first, masks in self._masks:
            tree_mask[first : first + masks.shape[0], : masks.shape[1]] = masks
        nothing = [np.empty(0, dtype=np.int64)]
        return ForwardBatch(
            token_ids=np.array(self._token_ids, dtype=np.int64),
            positions=np.concatenate(self._positions),
            rows=np.array(self._rows, dtype=np.int32),
            query_start=np.array([*self._query_start, count], dtype=np.int32),
            tree_start=np.array(self._tree_start, dtype=np.int32),
            prefix_len=np.concatenate(self._prefix_len),
            tree_mask=tree_mask,
            write_index=np.concatenate(self._write_index),
            key_len=np.array(self._key_len, dtype=np.int32),
            logit_rows=np.concatenate(self._logit_rows or nothing),
        )

    def _want(self, first: int, count: int) -> slice:
        """Asks for the logits of `count` rows from `first` on; their places in the result."""
        begin = self._num_logits
        if count:
            self._logit_rows.append(np.arange(first, first + count, dtype=np.int64))
            self._num_logits += count
        return slice(begin, self._num_logits)

    def _session(self, row: int, *, tree_start: int, key_len: int) -> None:
        if self._rows and self._rows[-1] == row:
            self._tree_start[-1] = tree_start
            self._key_len[-1] = max(self._key_len[-1], key_len)
            return
        assert row not in self._seen, f"the rows of session row {row} do not stand together"
        self._rows.append(row)
        self._seen.add(row)
        self._query_start.append(len(self._token_ids))
        self._tree_start.append(tree_start)
        self._key_len.append(key_len)
