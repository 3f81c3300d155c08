"""What sources of growth are worth beside each other, in numbers."""

from collections.abc import Mapping

from outrider.coordinator.messages import SourceCounts
from outrider.growth_source import GrowthSource


def source_counts(
    grown: Mapping[GrowthSource, int], selected: int, accepted: Mapping[GrowthSource, int]
) -> list[SourceCounts]:
    """Return counts of the sources that have grown anything."""
    used = [source for source in GrowthSource if grown[source] or accepted[source]]
    # Which source a verified node is of is told of accepted ones alone.
    submitted = selected if len(used) == 1 else 0
    return [SourceCounts(source, grown[source], submitted, accepted[source]) for source in used]
