"""Workers' answers that must not be used; each brought a coordinator into trouble before it was refused."""

import json
import math

import numpy as np
import pytest

from outrider.coordinator.commands.client import status_dict
from outrider.coordinator.workers.answers import check_load, check_report, check_results, growth_batch
from outrider.coordinator.workers.registered_worker import RegisteredWorker
from outrider.draft_worker.service import pack_calibrations
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import common_pb2, draft_pb2, generation_pb2, registry_pb2, target_pb2
from outrider.wire import MOST_NODES, floats_to_bytes, uints_to_bytes


def results(**changes) -> target_pb2.RoundResults:
    """Two sessions: one accepted two nodes of three, the other one emitted a token alone."""
    columns = {
        "session_ids": [7, 9],
        "epochs": [1, 1],
        "token_counts": [3, 1],
        "tokens": [5, 6, 7, 8],
        "accepted_counts": [2, 0],
        "selected_counts": [3, 0],
        "accepted_sources": [2, 6],
        "finishes": [target_pb2.FINISH_UNSPECIFIED, target_pb2.FINISH_LENGTH],
        "cached_tokens": [0, 4],
        "lost": [0, 1],
        "selected_by_source": [3, 1, 0, 0, 0, 0],
        "tree_ends": [target_pb2.TREE_END_MISSED, target_pb2.TREE_END_STARVED],
    }
    return target_pb2.RoundResults(**columns | changes)


def check(response: target_pb2.RoundResults) -> None:
    check_results(response, vocab_size=100)


def test_what_a_target_says_is_taken():
    check(results())
    # A walk that ended at a stop token has no final one.
    check(results(token_counts=[2, 1], tokens=[5, 6, 8]))
    # All nodes are of one source.
    check(results(selected_by_source=[]))
    # Nothing was committed: growth was lost.
    check(results(token_counts=[3, 0], tokens=[5, 6, 7]))
    # No round has ended: a session was not opened.
    check(target_pb2.RoundResults(errors=[common_pb2.SessionError(session_id=1, epoch=1, code=8)]))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 6, 7, 100]},
        {"tokens": uints_to_bytes([5, 6, 7])},
        {"tokens": [5, 6, 7, 8, 9]},
        {"token_counts": [4, 0]},
        {"session_ids": [7, 7]},
        {"session_ids": [7]},
        {"epochs": [1]},
        {"selected_counts": [3, 0, 0]},
        {"selected_counts": [1, 0]},
        {"finishes": []},
        {"cached_tokens": [0]},
        {"lost": []},
        {"tree_ends": [target_pb2.TREE_END_COVERED]},
        {"selected_by_source": [3, 0, 0]},
        {"selected_by_source": [3, 1, 0, 0, 1, 0]},
        {"grown_by_source": [3, 0, 0]},
        {"accepted_sources": [2]},
        # Each set of sources is counted by itself.
        {"accepted_sources": [2, 256]},
        {"logprobs": [target_pb2.Logprobs(row=2)]},
        {"logprobs": [target_pb2.Logprobs(token_logprobs=bytes(4), top_count=2, top_logprobs=bytes(4))]},
        {"logprobs": [target_pb2.Logprobs(token_logprobs=bytes(4), top_count=1, top_logprobs=bytes(4))]},
        # Of two tokens without an accepted node, what follows would hang below no node that anybody has grown.
        {"token_counts": [3, 2], "tokens": [5, 6, 7, 8, 9]},
        {"accepted_counts": [0, 0], "accepted_sources": [], "token_counts": [2, 1], "tokens": [5, 6, 8]},
        {"token_counts": [1, 1], "tokens": [5, 8]},
        {"accepted_counts": [2, 0, 0]},
        # 2^64 - 1 ns in one report, and no one could be told of the server's state any more.
        {"report": common_pb2.StepReport(step_ns=(1 << 64) - 1)},
        {"report": common_pb2.StepReport(forward_ns=1 << 63)},
        {"report": common_pb2.StepReport(plain_ns=1 << 63)},
    ],
)
def test_what_no_target_says_is_refused(changes):
    with pytest.raises(ValueError, match=r"needed|given|reported|twice|there is not|lengths|no set|or one more"):
        check(results(**changes))


def growth(**changes) -> draft_pb2.DraftGrowth:
    """Two nodes of one session, none of another."""
    columns = {
        "session_ids": [7, 9],
        "epochs": [1, 1],
        "as_of": [3, 5],
        "node_counts": [2, 0],
        "node_ids": uints_to_bytes([1, 2]),
        "parents": uints_to_bytes([0, 1]),
        "tokens": uints_to_bytes([5, 6]),
        "acceptance": floats_to_bytes([-0.5, 1.5]),
    }
    return draft_pb2.DraftGrowth(**columns | changes)


def test_what_a_draft_says_is_taken():
    batch = growth_batch(growth(source=2, again=[True, False]), 100)
    columns = (batch.node_ids, batch.parents, batch.tokens)
    assert [column.tolist() for column in columns] == [[1, 2], [0, 1], [5, 6]]
    assert batch.acceptance.tolist() == [0.0, 1.0]
    assert (batch.again, batch.forgot, batch.complete) == ([True, False], [False] * 2, [False] * 2)
    assert batch.source is GrowthSource.NGRAM
    # What a newer worker may say counts as a model's.
    assert {growth_batch(growth(source=source), 100).source for source in (0, 1, 77)} == {GrowthSource.MODEL}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": uints_to_bytes([5, 100])},
        {"tokens": uints_to_bytes([5])},
        {"node_counts": [1, 0]},
        # Wrong in two columns, alike.
        {"node_counts": [2, 1], "tokens": uints_to_bytes([5, 6, 7])},
        {"node_counts": [2, 1], "parents": uints_to_bytes([0, 1, 0]), "tokens": uints_to_bytes([5, 6, 7])},
        {"as_of": [3]},
        {"epochs": []},
        {"again": [True]},
        {"forgot": [True] * 3},
        *({"acceptance": floats_to_bytes([0.5, wrong])} for wrong in (math.nan, math.inf, -math.inf)),
        # A target ends the whole coordinator's stream for any of these.
        {"node_ids": uints_to_bytes([0, 1])},
        {"node_ids": uints_to_bytes([1, 1 << 31])},
        {"parents": uints_to_bytes([0, 1 << 31])},
        {"as_of": [1 << 31, 5]},
        {"as_of": [0, 5]},
    ],
)
def test_growth_that_no_target_would_take_is_refused(changes):
    with pytest.raises(ValueError, match=r"needed|different lengths|beyond|no numbers|without a token"):
        growth_batch(growth(**changes), 100)


def test_a_message_has_no_more_nodes_of_a_session_than_a_pool_holds():
    def nodes(count: int) -> draft_pb2.DraftGrowth:
        columns = {"node_ids": range(1, count + 1), "parents": range(count), "tokens": [5] * count}
        columns = {name: uints_to_bytes(column) for name, column in columns.items()}
        return growth(**columns, node_counts=[count, 0], acceptance=floats_to_bytes([0.5] * count))

    assert len(growth_batch(nodes(MOST_NODES), 100).node_ids) == MOST_NODES
    with pytest.raises(ValueError, match="257 nodes of a session in one message, at most 256 needed"):
        growth_batch(nodes(MOST_NODES + 1), 100)


def test_a_long_step_is_taken():
    check_report(common_pb2.StepReport(step_ns=10**11))


# ---------------------------------------------------------------------------------------------------------- heartbeats

NO_LOADS = {
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
    """Two bins of a draft that has observed something."""
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
    calibration.observe_parents(np.array([[1, 2, 0, 1]]))
    packed = pack_calibrations({GrowthSource.MODEL: calibration})
    assert packed.rules
    check_load(common_pb2.WorkerLoad(busy=1.0, calibration=packed))


@pytest.mark.parametrize("changes", NO_LOADS.values(), ids=NO_LOADS)
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
