"""The calibrations' reliability diagrams as they travel with a heartbeat."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from outrider.acceptance_calibration import RELIABILITY_EDGES, Reliability
from outrider.growth_source import GrowthSource, sources_to_proto
from outrider.v1 import common_pb2
from outrider.wire import floats_to_bytes


class Calibration(Protocol):
    """What has learned how its estimates came true."""

    def reliability(self) -> Sequence[Reliability]:
        """For each rule with observations; any thread may ask."""
        ...


def pack_calibrations(calibrations: Mapping[GrowthSource, Calibration]) -> common_pb2.CalibrationReport:
    """What each source's estimates were worth since start; any thread may ask."""
    rules = [
        common_pb2.RuleReliability(
            rule=found.rule,
            children=found.children,
            predicted=floats_to_bytes(
                [total / max(count, 1) for total, count in zip(found.predicted, found.children, strict=True)]
            ),
            hits=found.hits,
            source=sources_to_proto([source])[0],
        )
        for source, calibration in sorted(calibrations.items())
        for found in calibration.reliability()
    ]
    return common_pb2.CalibrationReport(edges=floats_to_bytes(RELIABILITY_EDGES), rules=rules)
