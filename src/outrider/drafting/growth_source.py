"""Sources of tree nodes, by name and number (torch-free).

A node's source changes nothing of how it is verified: it is told so that what each source is worth can be learned and
shown, and so that a request can choose.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import cast

from outrider.v1 import common_pb2


class GrowthSource(IntEnum):
    """The numbers are those of common.proto."""

    MODEL = common_pb2.GROWTH_SOURCE_MODEL
    NGRAM = common_pb2.GROWTH_SOURCE_NGRAM
    EAGLE = common_pb2.GROWTH_SOURCE_EAGLE

    @property
    def word(self) -> str:
        """Name in options and metrics."""
        return self.name.lower()


NUM_SOURCES = len(GrowthSource)
"""Entries of counts by source, in the order of the sources' numbers, which begin with 1."""
WORDS = tuple(source.word for source in GrowthSource)
ALL_SOURCES = frozenset(GrowthSource)


def source_of_word(word: str) -> GrowthSource:
    """Return the source that users call so; ValueError where there is none."""
    if word not in WORDS:
        raise ValueError(f"{word!r} given, {' or '.join(WORDS)} needed")
    return GrowthSource(WORDS.index(word) + 1)


def sources_from_proto(numbers: Iterable[int], *, default: Iterable[GrowthSource] = ()) -> frozenset[GrowthSource]:
    """A field's sources; `default` where it is empty. Numbers that stand for none are left out: a newer peer's."""
    numbers = tuple(numbers)
    if not numbers:
        return frozenset(default)
    return frozenset(GrowthSource(number) for number in numbers if number in set(GrowthSource))


def to_proto(source: GrowthSource) -> common_pb2.GrowthSource:
    """Return the source as its protocol enum."""
    return cast("common_pb2.GrowthSource", source.value)


def sources_to_proto(sources: Iterable[GrowthSource]) -> list[common_pb2.GrowthSource]:
    """In the order of their numbers."""
    return [to_proto(source) for source in sorted(sources)]
