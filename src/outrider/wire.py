"""Arrays as they travel: little-endian bytes for prompts, nodes and floats (torch-free).

Packed repeated uint32 is used for columns with an entry a session, and for committed tokens; bytes where an array is
long (a prompt, the nodes of a step) or of floats. Python takes 20 to 60 us for a packed column of 512 nodes, and less
than 1 us for bytes.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
UInt32Array = npt.NDArray[np.uint32]
T = TypeVar("T")

WIRE_VERSION = 3
"""Version of the messages between coordinator and workers. Raise it when any of them changes its meaning, so that roles
of different releases refuse each other instead of misreading each other. A field that receivers may ignore needs none.
"""
MOST_NODES = 256
"""Nodes of one session that a pool holds, and so that one message brings."""


def uints_to_bytes(values: Sequence[int] | UInt32Array) -> bytes:
    """Token ids, or ids of nodes, as little-endian uint32, 4 bytes each."""
    return np.asarray(values, dtype="<u4").tobytes()


def uints_from_bytes(data: bytes) -> UInt32Array:
    """Invert `uints_to_bytes`: a read-only uint32 array; ValueError where the length is no multiple of 4."""
    return np.frombuffer(data, dtype="<u4")


def floats_to_bytes(values: Sequence[float] | Float32Array) -> bytes:
    """Numbers as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def floats_from_bytes(data: bytes) -> Float32Array:
    """Invert `floats_to_bytes`: a read-only float32 array; ValueError where the length is no multiple of 4."""
    return np.frombuffer(data, dtype="<f4")


def split_by_counts(counts: Sequence[int]) -> Iterator[slice]:
    """Yield the slice of each session's entries in a columnar batch, from the counts."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


def rows_of(column: Sequence[T], rows: Sequence[int]) -> Sequence[T]:
    """Return some rows, in rising order, of a column with one entry a session.

    All rows are the column itself: where it is a message's, another message copies it as a block of memory.
    """
    return column if len(rows) == len(column) else [column[row] for row in rows]


def entries_of(column: Sequence[T], counts: Sequence[int], rows: Sequence[int]) -> Sequence[T]:
    """Return the entries of some rows, in rising order, of a column with `counts` entries a session."""
    if len(rows) == len(counts):
        return column
    spans = list(split_by_counts(counts))
    return [entry for row in rows for entry in column[spans[row]]]
