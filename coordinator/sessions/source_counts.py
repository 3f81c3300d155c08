"""Counts that show what each source of growth is worth beside the others."""

from collections import Counter
from typing import Self

from outrider.coordinator.sessions.messages import Outcome, SourceCounts
from outrider.growth_source import GrowthSource

_SOURCES = tuple(GrowthSource)


class SourceTally:
    """Nodes of each source, grown, verified and accepted, of one choice or of a whole server."""

    __slots__ = ("_accepted", "_grown", "_submitted")

    def __init__(self) -> None:
        self._grown = Counter[GrowthSource]()
        self._submitted = Counter[GrowthSource]()
        # By bit set, since that is how nodes come: which sources have proposed them.
        self._accepted = Counter[int]()

    def __add__(self, other: Self) -> Self:
        total = type(self)()
        for name in self.__slots__:
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    def note_growth(self, source: GrowthSource, nodes: int) -> None:
        """So many nodes of a source have come."""
        if nodes:
            self._grown[source] += nodes

    def note_round(self, outcome: Outcome) -> None:
        """Count the nodes of a round that were verified, and those that were accepted."""
        if outcome.selected:
            for source, count in zip(_SOURCES, outcome.selected_by_source, strict=True):
                self._submitted[source] += count
        for sources in outcome.sources:
            self._accepted[sources] += 1

    def counts(self) -> list[SourceCounts]:
        """By source, those that have grown anything; a node that several have proposed counts for each."""
        accepted = {
            source: sum(count for sources, count in self._accepted.items() if sources >> source & 1)
            for source in GrowthSource
        }
        return [
            SourceCounts(source, self._grown[source], self._submitted[source], accepted[source])
            for source in GrowthSource
            if self._grown[source] or accepted[source]
        ]
