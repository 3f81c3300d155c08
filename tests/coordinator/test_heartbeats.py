"""Heartbeats that no worker sends: whoever asks for the service's state would be shown them."""

import json

import numpy as np
import pytest

from outrider.coordinator.commands.client import status_dict
from outrider.coordinator.workers.answers import check_load
from outrider.coordinator.workers.registered_worker import RegisteredWorker
from outrider.draft_worker.service import pack_calibrations
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import common_pb2, generation_pb2, registry_pb2
from outrider.wire import floats_to_bytes

WRONG = {
    "busy is no number": {"busy": float("nan")},
    "busy without end": {"busy": float("inf")},
    "busy below nothing": {"busy": -0.5},
    "edges that are none": {"edges": [float("nan")]},
    "bytes that are no floats": {"edges": b"abc"},
    "too few hits": {"hits": [1]},
    "too many bins": {"children": [1, 2, 3]},
    "estimates of one bin": {"predicted": [0.5]},
    "estimates that are none": {"predicted": [0.5, float("inf")]},
}


def load(**changes) -> common_pb2.WorkerLoad:
    """Of a draft that has observed something, two bins."""
    figures = {"busy": 0.5, "edges": [0.5], "children": [4, 6], "predicted": [0.2, 0.7], "hits": [1, 4]} | changes
    packed = {
        name: figures[name] if isinstance(figures[name], bytes) else floats_to_bytes(figures[name])
        for name in ("edges", "predicted")
    }
    found = common_pb2.WorkerLoad(sessions=2, slots_total=100, busy=figures["busy"])
    found.calibration.edges = packed["edges"]
    found.calibration.rules.add(
        rule="coupled", children=figures["children"], hits=figures["hits"], predicted=packed["predicted"]
    )
    return found


def test_what_drafts_report_is_taken():
    check_load(load())
    check_load(common_pb2.WorkerLoad())
    calibration = AcceptanceCalibration(branching=4)
    calibration.observe(np.array([0, 1]), 1)
    packed = pack_calibrations({GrowthSource.MODEL: calibration})
    assert packed.rules
    check_load(common_pb2.WorkerLoad(busy=1.0, calibration=packed))


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_what_no_worker_reports_is_refused_and_not_kept(changes):
    worker = RegisteredWorker(introduction=registry_pb2.WorkerIntroduction(worker_id="w", role="WORKER_ROLE_DRAFT"))
    worker.hear(registry_pb2.WorkerReport(load=load()))
    heard_ns = worker.reported_ns
    with pytest.raises(ValueError, match=r"busy|calibration|buffer"):
        worker.hear(registry_pb2.WorkerReport(load=load(**changes)))
    assert worker.reported_ns == heard_ns
    status = generation_pb2.WorkerStatus(introduction=worker.introduction, load=worker.load, state=worker.state)
    shown = json.dumps(status_dict(generation_pb2.ServerInfo(workers=[status])), allow_nan=False)
    assert json.loads(shown)["workers"][0]["calibration"]["coupled"]["children"] == np.sum([4, 6])
