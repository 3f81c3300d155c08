"""Counts that show what each source of growth is worth beside the others."""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Self

from outrider.coordinator.sessions.messages import Outcome
from outrider.drafting.growth_source import NUM_SOURCES, GrowthSource, to_proto
from outrider.v1 import generation_pb2


class SourceTally:
    """Nodes of each source, grown, verified and accepted, of one choice or of a whole server."""

    __slots__ = ("_accepted", "_grown", "_submitted")

    def __init__(self) -> None:
        self._grown, self._submitted = ([0] * NUM_SOURCES for _ in range(2))
        # By bit set, since that is how nodes come: which sources have proposed them.
        self._accepted = Counter[int]()

    def __add__(self, other: Self) -> Self:
        total = type(self)()
        total._grown = _sums(self._grown, other._grown)
        total._submitted = _sums(self._submitted, other._submitted)
        total._accepted = self._accepted + other._accepted
        return total

    def note_growth(self, source: GrowthSource, nodes: int) -> None:
        """So many nodes of a source have come."""
        self._grown[source - 1] += nodes

    def note_round(self, outcome: Outcome) -> None:
        """Count the nodes of a round that were verified, those that were accepted, and what has grown at the target."""
        if any(outcome.grown_by_source):
            self._grown = _sums(self._grown, outcome.grown_by_source)
        if outcome.selected:
            self._submitted, accepted = _sums(self._submitted, outcome.selected_by_source), self._accepted
            for sources in outcome.sources:
                accepted[sources] += 1

    def counts(self) -> list[generation_pb2.SourceStats]:
        """By source, those that have grown anything; a node that several have proposed counts for each."""
        accepted = {
            source: sum(count for sources, count in self._accepted.items() if sources >> source & 1)
            for source in GrowthSource
        }
        return [
            generation_pb2.SourceStats(
                source=to_proto(source),
                drafted_tokens=grown,
                submitted_tokens=submitted,
                accepted_tokens=accepted[source],
            )
            for source, grown, submitted in zip(GrowthSource, self._grown, self._submitted, strict=True)
            if grown or accepted[source]
        ]


def _sums(own: Sequence[int], more: Sequence[int]) -> list[int]:
    return list(map(operator.add, own, more))
