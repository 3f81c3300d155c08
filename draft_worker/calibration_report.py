"""The calibration's reliability diagram as it travels with a heartbeat."""

from outrider.acceptance_calibration import RELIABILITY_EDGES, AcceptanceCalibration
from outrider.v1 import common_pb2
from outrider.wire import floats_to_bytes


def pack_calibration(calibration: AcceptanceCalibration) -> common_pb2.CalibrationReport:
    """What the estimates were worth since start; any thread may ask."""
    rules = [
        common_pb2.RuleReliability(
            rule=found.rule,
            children=found.children,
            predicted=floats_to_bytes(
                [total / max(count, 1) for total, count in zip(found.predicted, found.children, strict=True)]
            ),
            hits=found.hits,
        )
        for found in calibration.reliability()
    ]
    return common_pb2.CalibrationReport(edges=floats_to_bytes(RELIABILITY_EDGES), rules=rules)
