"""What a resident draft hears and says over the wire, and its options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.target_worker.resident_support import PROMPT, make_rig, random_head

from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.resident_growth import DraftLimits
from outrider.target_worker.service import pack
from outrider.target_worker.step_jobs import BatchResult
from outrider.target_worker.step_thread import Load
from outrider.target_worker.unpacking import unpack
from outrider.v1 import common_pb2, target_pb2
from outrider.v1.common_pb2 import (
    GROWTH_SOURCE_EAGLE,
    GROWTH_SOURCE_MODEL,
    GROWTH_SOURCE_NGRAM,
    SPECULATION_MODE_OFF,
    SPECULATION_MODE_SYNC,
    SpeculationLimits,
)
from outrider.wire import floats_from_bytes, tokens_to_bytes


def opening(**changes: Any) -> target_pb2.VerifyRequest:
    """A request that opens one session and verifies its root."""
    opened = common_pb2.SessionOpen(
        session_id=4,
        epoch=2,
        prompt=tokens_to_bytes(PROMPT),
        sampling=SamplingSpec(max_new_tokens=9).to_proto(),
        limits=common_pb2.SpeculationLimits(mode=common_pb2.SPECULATION_MODE_ASYNC, max_depth=6, sync_nodes=3),
    )
    opened.MergeFrom(common_pb2.SessionOpen(**changes))
    trees = target_pb2.TreeBatch(session_ids=[4], epochs=[2], lengths=[len(PROMPT)], node_counts=[0])
    return target_pb2.VerifyRequest(incarnation=7, step=1, opens=[opened], trees=trees)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DraftLimits(max_depth=6)),
        ({"sources": [GROWTH_SOURCE_NGRAM, GROWTH_SOURCE_EAGLE]}, DraftLimits(max_depth=6)),
        ({"sources": [GROWTH_SOURCE_MODEL, GROWTH_SOURCE_NGRAM]}, None),
        ({"limits": SpeculationLimits(mode=SPECULATION_MODE_OFF)}, None),
        (
            {"limits": SpeculationLimits(mode=SPECULATION_MODE_SYNC)},
            DraftLimits(max_depth=6, max_nodes=3, is_fixed=True),
        ),
    ],
    ids=str,
)
def test_an_open_says_what_may_be_grown(changes: dict[str, Any], expected: DraftLimits | None) -> None:
    batch, unreadable = unpack(opening(**changes))
    assert not unreadable
    assert batch.opens[0].draft == expected


def test_growth_travels_in_the_result(checkpoint: Path, tmp_path: Path) -> None:
    rig = make_rig(checkpoint, random_head(tmp_path, checkpoint))
    request = opening()
    batch, _ = unpack(request)
    rig.verifier.open(batch.opens[0])
    step = rig.verifier.step(batch.trees)
    response = pack(request, BatchResult(results=step.results, faults=[], step=step), Load())
    rig.verifier.close((7, 4), 2)
    grown = step.results[0].growth
    assert grown is not None
    growth = response.growth
    assert (list(growth.session_ids), list(growth.epochs)) == ([4], [2])
    assert (list(growth.as_of), list(growth.node_counts)) == ([len(PROMPT) + 1], [len(grown.tokens)])
    assert (list(growth.node_ids), list(growth.parents)) == (grown.node_ids, grown.parents)
    assert (list(growth.tokens), list(growth.sources)) == (grown.tokens, [GROWTH_SOURCE_EAGLE] * len(grown.tokens))
    np.testing.assert_allclose(floats_from_bytes(growth.acceptance), grown.acceptance)
    plain = pack(request, BatchResult(results=[replace(step.results[0], growth=None)], faults=[], step=step), Load())
    assert not plain.HasField("growth")


def test_options_are_checked() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"resident_draft": "", "device": "cpu"}, "resident_draft"),
        ({"resident_draft": "x", "resident_depth": 0}, "resident_depth"),
        ({"resident_draft": "x", "tensor_parallel_size": 2, "device": "cuda"}, "tensor_parallel_size"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            TargetWorkerConfig(**options)
    resident = TargetWorkerConfig(resident_draft="some/folder", resident_topk=3).resident
    assert resident is not None
    assert (resident.head, resident.top_k) == (Path("some/folder"), 3)
    assert TargetWorkerConfig().resident is None
