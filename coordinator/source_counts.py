"""What sources of growth are worth beside each other, in numbers."""

from collections.abc import Mapping

from outrider.coordinator.messages import SourceCounts
from outrider.growth_source import GrowthSource


def source_counts(
    grown: Mapping[GrowthSource, int], submitted: Mapping[GrowthSource, int], accepted: Mapping[GrowthSource, int]
) -> list[SourceCounts]:
    """Return counts of the sources that have grown anything.

    Args:
        grown: nodes.
        submitted: nodes that were verified, of trees that one source alone has grown: of others a target tells the
            sources of accepted nodes only.
        accepted: nodes; one that several have grown counts for each.
    """
    used = [source for source in GrowthSource if grown[source] or accepted[source]]
    return [SourceCounts(source, grown[source], submitted[source], accepted[source]) for source in used]
