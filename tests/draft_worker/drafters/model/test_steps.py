"""Nodes that a step takes, ends of branches, and configurations that cannot work."""

from typing import Any

import pytest
from tests.draft_worker.table_model import VOCAB, Bench, Mirror

from outrider.drafting.config import GrowthConfig, step_defaults
from outrider.drafting.program import CommittedRows, GrowthProgram, growth_buckets
from outrider.kernels.pool.select import SHORT_GAP
from outrider.sampling import SamplingSpec

WIDE: dict[str, Any] = {"max_live_nodes": 400, "max_depth": 30}


def unexpanded(mirror: Mirror) -> list[float]:
    """Values of live nodes without children."""
    return [mirror.value(node) for node in mirror.live if node.context not in mirror.expanded]


def test_each_step_expands_the_best_nodes_of_all_sessions():
    bench = Bench(max_step_nodes=4, max_live_nodes=400)
    mirrors = [bench.open(number, prompt=[number], **WIDE) for number in (1, 2, 3)]
    bench.step()
    for _ in range(6):
        before = {context for mirror in mirrors for context in mirror.expanded}
        best = sorted((value for mirror in mirrors for value in unexpanded(mirror)), reverse=True)[:4]
        growth = bench.step()
        assert growth is not None
        assert growth.rows == len(bench.model.steps[-1]) == 4
        taken = [
            mirror.value(node)
            for mirror in mirrors
            for node in mirror.live
            if node.context in mirror.expanded and node.context not in before
        ]
        assert sorted(taken, reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("committed", [CommittedRows(), CommittedRows(each=9), CommittedRows(each=9, total=512)])
@pytest.mark.parametrize("sessions", [1, 16, 64, 256])
def test_there_are_buckets_for_nodes_and_for_commits_of_all_sessions(sessions: int, committed: CommittedRows):
    config = GrowthConfig(**step_defaults("cuda"))
    buckets = growth_buckets(config, 256, on_gpu=True, committed=committed)
    *rows, chunk = [bucket.rows for bucket in buckets if bucket.sessions == sessions and bucket.most <= SHORT_GAP] + [
        buckets[-1].rows
    ]
    assert sessions <= min(rows) <= max(2 * sessions, 8)
    # A long gap's bucket computes attention for long gaps, which all sessions' commits should not need.
    assert committed.of(sessions) <= max(rows) < chunk
    assert all(bucket.sessions <= bucket.rows and bucket.entries <= bucket.rows for bucket in buckets)
    assert max(bucket.entries for bucket in buckets) == config.max_step_nodes


def test_short_prompts_have_smaller_buckets_than_a_chunk():
    config = GrowthConfig(**step_defaults("cuda"), max_step_tokens=2048)
    buckets = growth_buckets(config, 64, on_gpu=True, committed=CommittedRows())
    numbers = [number for number, bucket in enumerate(buckets) if bucket.holds_prompts]
    assert numbers == list(range(numbers[0], len(buckets)))
    widest = max(bucket.rows for bucket in buckets[: numbers[0]])
    assert [buckets[number].rows for number in numbers] == [256, 512, 1024, 2048 + widest]
    assert [buckets[number].most for number in numbers] == [256, 512, 1024, 2048 + SHORT_GAP]
    assert all(buckets[number].sessions == 64 for number in numbers)


@pytest.mark.parametrize("sessions", [1, 64, 256])
def test_a_step_with_a_part_of_the_host_has_room_for_its_prompt(sessions: int):
    program, config = object.__new__(GrowthProgram), GrowthConfig(**step_defaults("cuda"), max_step_tokens=2048)
    program.buckets = growth_buckets(config, sessions, on_gpu=True, committed=CommittedRows())
    captured = [number for number in range(len(program.buckets)) if program._is_hosted(number)]
    for number, wanted in enumerate(program.buckets):
        own = program.buckets[program.bucket_among(captured, number)]
        assert own.rows >= wanted.rows and own.sessions >= wanted.sessions and own.most >= wanted.most
        assert program.bucket_among(captured, number) in captured


def test_the_prompt_is_computed_in_chunks_beside_which_others_grow():
    bench = Bench(max_step_tokens=20)
    first = bench.open(1, max_depth=30)
    bench.step()
    second = bench.open(2, prompt=[5] * 50)
    for own_rows in (20, 20, 10):
        assert not second.live
        before = len(first.live)
        # A short gap waits for nobody's prompt.
        bench.commit(1, [first.live[0].context[-1], 7])
        bench.step()
        rows = bench.model.steps[-1]
        assert sum(context[:1] == (5,) for context in rows) == own_rows
        assert len(first.live) >= 4 < before + 5
        assert first.growths[-1].as_of == len(first.tokens)
    assert second.live
    bench.finish()
    second.check_children(least=10)


def test_sessions_share_a_steps_prompt_tokens_and_all_get_there():
    bench = Bench(max_step_tokens=30)
    mirrors = [bench.open(number, prompt=[number] * 50) for number in range(1, 6)]
    bench.finish()
    for mirror in mirrors:
        mirror.check_children(least=10)
    prompts = [context for context in bench.model.computed if len(context) <= 50]
    assert (len(bench.model.steps[0]), len(prompts), len(set(prompts))) == (30, 5 * 50, 5 * 50)


@pytest.mark.parametrize("credit", [4, 10, 33])
def test_live_nodes_stay_within_the_credit_and_go_on_after_a_commit(credit: int):
    bench = Bench()
    mirror = bench.open(max_live_nodes=credit, max_depth=50)
    for _ in range(12):
        while bench.step() is not None:
            assert len(mirror.live) <= credit
        assert len(mirror.live) > credit - 4
        bench.commit(1, [mirror.live[0].context[-1]])


def test_the_workers_own_bound_holds_whatever_the_credit():
    bench = Bench(max_live_nodes=20)
    mirror = bench.open(max_live_nodes=1000)
    bench.finish()
    assert len(mirror.live) == 20


def test_depth_is_bounded_below_the_current_root():
    bench = Bench(max_live_nodes=256)
    mirror = bench.open(max_live_nodes=200, max_depth=2)
    for length in (3, 4):
        bench.finish()
        assert {len(node.context) - length for node in mirror.live} == {1, 2}
        assert len(mirror.live) == 20
        bench.commit(1, [mirror.live[0].context[-1]])


def test_stop_tokens_and_the_sessions_end_end_branches():
    stops, bench = tuple(range(0, VOCAB, 2)), Bench(max_live_nodes=256)
    # A stop token within the prompt stops nothing.
    spec = SamplingSpec(max_new_tokens=3, stop_token_ids=stops)
    mirror = bench.open(prompt=[5, 2], sampling=spec, max_live_nodes=256)
    bench.finish()
    assert any(node.context[-1] in stops for node in mirror.live)
    for node in mirror.live:
        # Nothing follows a stop token, nor the last of three tokens.
        assert (node.context in mirror.expanded) == (node.context[-1] not in stops and len(node.context) < 5)
    bench.commit(1, [7, 7])
    bench.finish()
    assert {len(node.context) for node in mirror.live} == {5}
    bench.commit(1, [7])
    assert bench.finish() == []


def test_stop_tokens_end_nothing_before_the_minimum():
    bench = Bench(max_live_nodes=256)
    # Without the ban of before the minimum no stop token would be drafted there, so one is committed.
    spec = SamplingSpec(max_new_tokens=20, stop_token_ids=tuple(range(12)), min_new_tokens=2)
    mirror = bench.open(prompt=[5, 2], output=[3], sampling=spec, max_depth=3)
    bench.finish()
    mirror.check_children(least=4)
    for context in mirror.expanded:
        assert all(token >= 12 for token in context[4:])
    assert any(node.context[-1] < 12 for node in mirror.live if len(node.context) > 4)


def test_unlikely_nodes_are_neither_made_nor_expanded():
    bench = Bench(min_path_value=0.2, min_acceptance=0.1, max_live_nodes=512)
    mirror = bench.open(max_live_nodes=500, max_depth=50)
    bench.finish()
    expanded = {context[len(mirror.tokens) :] for context in mirror.expanded}
    assert len(mirror.live) > 5
    for node in mirror.live:
        assert node.acceptance >= 0.1
        # One whose children are all unlikely looks like one that was not expanded.
        assert node.context[3:] not in expanded or mirror.value(node) >= 0.2
    computed = {context for context in bench.model.computed if len(context) > 3}
    assert computed == {node.context for node in mirror.live if mirror.value(node) >= 0.2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejection_acceptance": 0.1, "min_acceptance": 0.2}, "at least min_acceptance"),
        *(({name: -1}, name) for name in ("branching", "max_step_nodes", "max_session_nodes", "max_step_tokens")),
        ({"min_path_value": 1.0}, "min_path_value"),
    ],
)
def test_a_config_that_cannot_work_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        GrowthConfig(**changes)
