"""Sync mode: one complete tree a round, the best nodes below the root, whatever else the worker does."""

import heapq
from typing import Any

import numpy as np
import pytest
import torch
from tests.draft_worker.session_growth import SessionGrowth
from tests.draft_worker.table_model import BRANCHING, Bench, Context, sync_start, table_logits

from outrider.draft_worker.rounds.session import SessionStart
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.sampling import SamplingSpec

BEST = -1
GREEDY, WARM = SamplingSpec(max_new_tokens=40), SamplingSpec(temperature=0.7, seed=3, top_p=0.95, max_new_tokens=40)


def naive_tree(start: SessionStart, tokens: list[int]) -> list[tuple[Context, np.float32]]:
    """The best nodes, expanded one after the other by the model and the calibration's prior: paths and values."""
    calibration, spec, limits = AcceptanceCalibration(branching=BRANCHING), start.sampling, start.limits
    columns = np.frombuffer(spec.record, dtype=[("seed", "<i8"), ("floats", "<f4", 3), ("ints", "<i4", 3)])[0]
    most_depth = min(limits.max_depth, start.end(200) - len(tokens))
    found: list[tuple[Context, np.float32]] = []
    waiting: list[tuple[float, Context]] = [(-1.0, ())]
    while waiting:
        value, path = heapq.heappop(waiting)
        if path:
            found.append((path, np.float32(-value)))
        if len(found) == limits.sync_nodes:
            break
        if len(path) == most_depth or (path and path[-1] in start.stop_ids):
            continue
        context = (*tokens, *path)
        children = coupled_topk_scored(
            torch.from_numpy(table_logits(context))[None],
            torch.tensor([int(columns["seed"])]),
            torch.tensor([len(context)]),
            *(torch.tensor([number]) for number in (spec.temperature, spec.top_k, spec.top_p, spec.min_p)),
            k=BRANCHING,
        )
        ids, log_q, scores = (column.numpy() for column in children)
        buckets = calibration.buckets(log_q, scores, np.array([spec.temperature], np.float32))
        for token, acceptance in zip(ids[0].tolist(), calibration.estimate(buckets, False)[0], strict=True):
            if token >= 0:
                heapq.heappush(waiting, (-float(np.float32(-value) * acceptance), (*path, token)))
    return found


def tree_of(own: SessionGrowth) -> list[tuple[Context, np.float32]]:
    """Paths and values of a round's nodes."""
    found: dict[int, tuple[Context, np.float32]] = {0: ((), np.float32(1))}
    for node, parent, token, acceptance in zip(own.node_ids, own.parents, own.tokens, own.acceptance, strict=True):
        path, value = found[parent]
        found[node] = (*path, token), value * np.float32(acceptance)
    return list(found.values())[1:]


@pytest.mark.parametrize("spec", [GREEDY, WARM])
@pytest.mark.parametrize("step_nodes", [1, 8])
def test_a_round_is_the_naive_best_first_tree(spec: SamplingSpec, step_nodes: int):
    bench = Bench(max_live_nodes=256, max_step_nodes=step_nodes)
    mirror = bench.open_start(sync_start(sampling=spec, sync_nodes=20))
    # Beside the tree, and along it: its best node is a child of the root.
    for committed in ([], [5], [BEST], [7, 7], [BEST], [BEST, 23]):
        bench.commit(1, [mirror.growths[-1].tokens[0] if token == BEST else token for token in committed])
        before = len(mirror.growths)
        bench.finish()
        (own,) = mirror.growths[before:]
        assert own.complete
        assert own.as_of == len(mirror.tokens)
        found, expected = tree_of(own), naive_tree(mirror.start, mirror.tokens)
        assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
        np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=1e-6)
        # Of nodes worth the same any may be left out.
        least = found[-1][1]
        assert {path for path, value in found if value > least} == {path for path, value in expected if value > least}
    bench.check_all_given_back()


@pytest.mark.parametrize("config", [{}, {"max_step_nodes": 2, "max_step_tokens": 2}])
def test_a_round_hangs_neither_on_other_sessions_nor_on_what_was_learned(config: dict[str, Any]):
    bench = Bench(max_live_nodes=256, **config)
    mirror = bench.open_start(sync_start())
    others = [bench.open(number, prompt=[number], sampling=SamplingSpec(max_new_tokens=190)) for number in (2, 3)]
    bench.finish()
    for _ in range(10):
        for number, other in enumerate(others, start=2):
            bench.commit(number, [other.live[2].context[-1]])
        bench.finish()
    bench.commit(1, [9, 8])
    bench.commit(2, [others[0].live[0].context[-1]])
    bench.finish()
    alone = Bench(max_live_nodes=256)
    expected = alone.open_start(sync_start(output=[9, 8]))
    alone.finish()
    first, second = mirror.growths
    assert tree_of(second) == tree_of(expected.growths[0])
    assert second.as_of == 5
    assert not set(second.node_ids) & set(first.node_ids)


def test_a_round_that_a_commit_ends_starts_afresh():
    bench = Bench()
    mirror = bench.open_start(sync_start(sync_nodes=12))
    bench.step()
    bench.step()
    assert not mirror.growths
    bench.commit(1, [4])
    bench.finish()
    (own,) = mirror.growths
    assert (own.as_of, len(own.node_ids), own.complete) == (4, 12, True)


def test_the_last_rounds_are_complete_and_in_the_end_empty():
    bench = Bench()
    mirror = bench.open_start(sync_start(sampling=SamplingSpec(max_new_tokens=2)))
    for _ in range(2):
        bench.finish()
        bench.commit(1, [5])
    bench.finish()
    assert [own.complete for own in mirror.growths] == [True] * 3
    assert [own.as_of for own in mirror.growths] == [3, 4, 5]
    assert [max((len(path) for path, _ in tree_of(own)), default=0) for own in mirror.growths] == [2, 1, 0]


def test_after_a_commit_of_more_tokens_than_a_step_takes_rounds_go_on():
    bench = Bench(max_model_len=700, num_slots=900)
    mirror = bench.open_start(sync_start(sampling=SamplingSpec(max_new_tokens=600)))
    bench.finish()
    bench.commit(1, [5] * 300)
    bench.finish()
    bench.commit(1, [5])
    bench.finish()
    assert [(own.as_of, len(own.node_ids), own.complete) for own in mirror.growths] == [
        (3, 24, True), (303, 24, True), (304, 24, True),
    ]  # fmt: skip
    bench.check_all_given_back()


def test_a_tree_that_lacks_slots_is_what_there_is():
    bench = Bench(num_slots=12)
    mirror = bench.open_start(sync_start(prompt=[1] * 8))
    for tokens in ([], [5]):
        bench.commit(1, tokens)
        bench.finish()
    assert [(own.as_of, own.complete) for own in mirror.growths] == [(8, True), (9, True)]
    assert all(0 < len(own.node_ids) < 24 for own in mirror.growths)
    bench.check_all_given_back()
