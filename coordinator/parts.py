"""S lists of whole numbers, one behind the other, as they travel: cut apart only for who asks."""

import itertools
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from outrider.coordinator.rows import Ints


class Parts(Sequence[Sequence[int]]):
    """S lists.

    Attributes:
        values: [n] of all.
        counts: [S] how many of them each has.
    """

    def __init__(self, values: list[int], counts: Ints) -> None:
        self.values, self.counts = values, counts
        self._lists: list[Sequence[int]] | None = None

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "Parts":
        """These one behind the other; themselves where they are."""
        if isinstance(lists, Parts):
            return lists
        counts = np.array(list(map(len, lists)), dtype=np.int64)
        parts = cls(list(itertools.chain.from_iterable(lists)), counts)
        parts._lists = list(lists)
        return parts

    @property
    def array(self) -> Ints:
        """`values` as a column."""
        return np.array(self.values, dtype=np.int64)

    @property
    def lists(self) -> list[Sequence[int]]:
        """[S] cut apart."""
        if self._lists is None:
            values, ends = self.values, np.cumsum(self.counts).tolist()
            starts = itertools.chain((0,), ends)
            self._lists = [values[start:end] for start, end in zip(starts, ends, strict=False)]
        return self._lists

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.lists)

    @overload
    def __getitem__(self, place: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, place: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        return self.lists[place]
