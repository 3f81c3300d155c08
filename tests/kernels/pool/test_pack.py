"""The buffer behind a step's columns."""

from __future__ import annotations

import torch

from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed, PackedArrays

BUCKET = (33, 5, 70, 80)
"""Rows, sessions, most rows of a session, most entries."""


def _columns(packed: Packed) -> dict[str, torch.Tensor]:
    return {name: getattr(packed, name) for name in PackedArrays._fields}


def _layout(packed: Packed) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """Where each column begins in the buffer, in bytes, its shape and its type."""
    begin = packed.words.data_ptr()
    return {name: (column.data_ptr() - begin, column.shape, column.dtype) for name, column in _columns(packed).items()}


def test_columns_share_one_buffer() -> None:
    pool = Pool.allocate(sessions=8, max_len=99)
    packed = Packed.allocate(pool, BUCKET, scrap_slot=9, extra_rows=7)
    rows, sessions = (40,), (5,)
    shapes = dict.fromkeys(PackedArrays._fields, rows) | {
        "tree_mask": (40, 2), "pool_rows": sessions, "query_start": (6,), "tree_start": sessions, "key_len": sessions,
    }  # fmt: skip
    assert {name: tuple(column.shape) for name, column in _columns(packed).items()} == shapes
    layout, end = _layout(packed), 0
    assert packed.words.dtype == torch.int64 and packed.words.dim() == 1 and min(layout.values())[0] == 0
    for name, (begin, _, dtype) in sorted(layout.items(), key=lambda item: item[1][0]):
        column = getattr(packed, name)
        assert begin % 128 == 0 and begin >= end and column.is_contiguous(), name
        assert dtype == (torch.int64 if name == "tree_mask" else torch.int32)
        end = begin + column.numel() * column.itemsize
    assert packed.words.numel() * 8 - end < 128


def test_a_rank_without_a_pool_gets_a_step_whole() -> None:
    pool = Pool.allocate(sessions=8, max_len=99)
    packed = Packed.allocate(pool, BUCKET, scrap_slot=9, extra_rows=7)
    theirs = Packed.of_shape(rows=40, sessions=5, mask_words=2, scrap_slot=9, device=torch.device("cpu"), extra_rows=7)
    assert _layout(packed) == _layout(theirs) and packed.words.shape == theirs.words.shape
    assert (theirs.scrap_slot, theirs.extra_rows) == (9, 7)
    for number, column in enumerate(_columns(packed).values()):
        column.copy_(torch.arange(column.numel()).view_as(column) + 1000 * number)
    theirs.words.copy_(packed.words)
    for name, column in _columns(packed).items():
        assert torch.equal(getattr(theirs, name), column), name
