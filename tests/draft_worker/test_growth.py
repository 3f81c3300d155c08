"""Trees as they grow, are committed to, and grow on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.growth_step import GrowthStep
from outrider.draft_worker.session import GrowthLimits, GrowthMode
from outrider.draft_worker.session_checks import CommitMismatch
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]
KEY = (7, 1)


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(temperature=0.8, seed=2**63 + 5, choice_index=2)])
def test_children_are_the_best_under_the_targets_rule_and_noise(
    tools: Any, make_growth: Make, make_start: Make, logits_after: Make, spec: SamplingSpec
):
    growth, _ = make_growth()
    growth.open(make_start(sampling=spec, prompt=[3, 1, 4, 1, 5]))
    tools.finish(growth)
    tools.check_children(tools.open_session(growth), logits_after, least=10)


def test_each_step_expands_the_best_of_all_sessions(tools: Any, make_growth: Make, make_start: Make):
    growth, runner = make_growth(max_step_nodes=4)
    for number in (1, 2, 3):
        growth.open(make_start(number, prompt=[number], limits=GrowthLimits(max_live_nodes=400, max_depth=30)))
    growth.step()
    sessions = [tools.open_session(growth, (7, number)) for number in (1, 2, 3)]
    for _ in range(6):
        frontier = [
            (node.path_value, index)
            for index, session in enumerate(sessions)
            for node in session.tree.nodes()
            if node.child_tokens is None
        ]
        before = {node for session in sessions for node in session.tree.nodes() if node.child_tokens is not None}
        growth.step()
        chosen = [
            (node.path_value, index)
            for index, session in enumerate(sessions)
            for node in session.tree.nodes()
            if node.child_tokens is not None and node not in before
        ]
        # One node is everybody's share; the fourth is the best of what is left.
        shares = [max(value for value, owner in frontier if owner == index) for index in range(3)]
        rest = sorted(value for value, _ in frontier)
        for value in shares:
            rest.remove(value)
        assert sorted(value for value, _ in chosen) == sorted([*shares, rest[-1]])
    assert [len(batch.token_ids) for batch in runner.batches[1:]] == [4] * 6


def test_a_session_has_no_more_of_a_step_than_its_share(make_growth: Make, make_start: Make):
    growth, runner = make_growth(max_step_nodes=8, max_session_nodes=3)
    limits = GrowthLimits(max_live_nodes=400, max_depth=30)
    growth.open(make_start(1, prompt=[1], limits=limits))
    growth.step()
    growth.step()
    growth.open(make_start(2, prompt=[2], limits=limits))
    for _ in range(4):
        growth.step()
    # Below a root there is less than that: its own children.
    assert [len(batch.token_ids) for batch in runner.batches] == [1, 3, 4, 6, 6, 6]


def test_no_session_starves_where_there_are_more_than_the_step_is_wide(make_growth: Make, make_start: Make):
    growth, runner = make_growth(max_step_nodes=2)
    for number in range(1, 6):
        growth.open(make_start(number, prompt=[number], limits=GrowthLimits(max_live_nodes=400, max_depth=30)))
    growth.step()
    for _ in range(10):
        growth.step()
    rows = [row for batch in runner.batches[1:] for row in batch.rows.tolist()]
    assert {rows.count(row) for row in range(5)} == {4}


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_after_any_commits_the_tree_is_that_of_the_committed_tokens(
    tools: Any, make_growth: Make, make_start: Make, logits_after: Make, *, seed: int, overlapping: bool
):
    rng = np.random.default_rng(seed)
    spec = SamplingSpec(max_new_tokens=150, temperature=float(seed % 2), seed=seed)
    growth, runner = make_growth(max_step_nodes=3, max_step_tokens=5)
    growth.open(make_start(prompt=rng.integers(0, 24, 7).tolist(), sampling=spec, limits=GrowthLimits(max_depth=6)))
    session, seen, survived = tools.open_session(growth), set[int](), 0

    def note(step: GrowthStep | None) -> None:
        for growth_record in tools.growths_of([step] if step else []):
            assert growth_record.as_of == session.length
            assert not seen & set(growth_record.node_ids)
            live = {node.node_id for node in session.tree.nodes()} | {0}
            assert set(growth_record.parents) <= live
            seen.update(growth_record.node_ids)

    for _ in range(40):
        for _ in range(int(rng.integers(0, 9))):
            note(growth.step())
        tokens, node = [], session.tree.root
        for _ in range(int(rng.integers(0, 4))):
            if node.children:
                node = list(node.children.values())[min(int(rng.exponential(0.7)), len(node.children) - 1)]
                tokens.append(node.token)
        if not tokens or rng.random() < 0.3:
            tokens += rng.integers(0, 24, int(rng.integers(1, 4))).tolist()
        in_flight = overlapping and growth.begin()
        growth.commit(KEY, 1, session.length, tokens)
        if in_flight:
            note(growth.finish())
        used = runner.slots.length(session.row)
        assert used == runner.slots.used
        if session.kv_len == session.length:
            expanded = [node for node in session.tree.nodes() if node.child_tokens is not None]
            assert used == session.length + len(expanded)
            tools.check_children(session, logits_after)
            survived += len(expanded) > 0
        else:
            assert used == session.kv_len
            assert session.tree.size == 0
    tools.finish(growth)
    tools.check_children(session, logits_after, least=5)
    assert survived > 3, "hardly a tree survived its commit"
    assert seen == set(range(1, max(seen) + 1))
    growth.close(KEY, 1)
    assert runner.slots.used == 0
    assert runner.slots.free_rows == 8


def test_sessions_come_and_go_while_a_step_runs(tools: Any, make_growth: Make, make_start: Make, logits_after: Make):
    growth, runner = make_growth()
    growth.open(make_start(1))
    growth.open(make_start(2, prompt=[4, 5]))
    growth.step()
    assert growth.begin()
    growth.close((7, 1), 1)
    growth.open(make_start(1, epoch=2, prompt=[9, 9, 9]))
    growth.open(make_start(3, prompt=[6]))
    step = growth.finish()
    assert [record.session_id for record in step.growths] == [2]
    tools.finish(growth)
    for number in (1, 2, 3):
        tools.check_children(tools.open_session(growth, (7, number)), logits_after)
    growth.close_owned("owner")
    assert runner.slots.used == 0


def test_growth_that_leaves_late_is_that_of_its_step(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start())
    growth.step()
    session = tools.open_session(growth)
    assert growth.begin()
    parent = next(iter(session.tree.root.taken.values()))
    step = growth.finish()
    children = [(child.node_id, child.token) for child in parent.children.values()]
    growth.commit(KEY, 1, 3, [parent.token])
    growth.close(KEY, 1)
    (record,) = step.growths
    assert (record.as_of, record.epoch, record.parents[0]) == (3, 1, parent.node_id)
    assert list(zip(record.node_ids, record.tokens, strict=True))[:4] == children


def test_a_session_that_is_left_out_has_no_part_in_a_step(tools: Any, make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(1))
    growth.open(make_start(2))
    for _ in range(2):
        assert growth.begin({(7, 1)})
        assert runner.batches[-1].rows.tolist() == [tools.open_session(growth, (7, 2)).row]
        assert {record.session_id for record in growth.finish().growths} == {2}
    assert growth.begin()
    assert len(runner.batches[-1].rows) == 2
    growth.finish()
    growth.close((7, 2), 1)
    assert not growth.begin({(7, 1)})


def test_a_surviving_branch_is_not_computed_again(tools: Any, make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start())
    tools.finish(growth)
    session = tools.open_session(growth)
    best = max(session.tree.root.children.values(), key=lambda node: node.path_value)
    before = {node.node_id for node in session.tree.nodes() if node.child_tokens is not None}
    survivors = [node.node_id for node in session.tree.nodes() if best in tools.ancestors(node)]
    runner.batches.clear()
    growth.commit(KEY, 1, 3, [best.token])
    assert [node.node_id for node in session.tree.nodes()] == survivors
    assert session.kv_len == session.length
    tools.finish(growth)
    after = {node.node_id for node in session.tree.nodes() if node.child_tokens is not None}
    assert len(before & after) > 3
    assert sum(len(batch.token_ids) for batch in runner.batches) == len(after - before) > 0


def test_the_prompt_is_computed_in_chunks_that_leave_others_growing(tools: Any, make_growth: Make, make_start: Make):
    growth, runner = make_growth(max_step_tokens=16)
    growth.open(make_start(1))
    growth.step()
    growth.open(make_start(2, prompt=[5] * 40))
    steps = [growth.step() for _ in range(3)]
    assert [len(batch.logit_rows) > 0 for batch in runner.batches] == [True] * 4
    chains = [(np.diff(batch.query_start)).max() for batch in runner.batches[1:]]
    assert chains == [16, 16, 8]
    assert [len(tools.growths_of([step], 2)) for step in steps if step] == [0, 0, 1]
    assert all(tools.growths_of([step], 1) for step in steps if step)


def test_a_gap_is_prefilled_and_the_tree_restarts_there(
    tools: Any, make_growth: Make, make_start: Make, logits_after: Make
):
    growth, runner = make_growth()
    growth.open(make_start())
    tools.finish(growth)
    runner.batches.clear()
    session = tools.open_session(growth)
    first = next(iter(session.tree.root.children.values()))
    missing = next(token for token in range(24) if token not in first.children)
    growth.commit(KEY, 1, 3, [first.token, missing, 7])
    step = growth.step()
    assert step is not None
    assert runner.batches[0].token_ids.tolist() == [missing, 7]
    assert step.growths[0].as_of == 6
    assert step.growths[0].parents == [0] * 4
    tools.finish(growth)
    tools.check_children(session, logits_after)


def test_commits_that_overlap_or_leave_a_hole(tools: Any, make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(prompt=[1, 2, 3]))
    growth.commit(KEY, 1, 3, [4, 5])
    growth.commit(KEY, 1, 4, [5, 6])
    growth.commit(KEY, 1, 3, [4])
    assert tools.open_session(growth).tokens == [1, 2, 3, 4, 5, 6]
    with pytest.raises(CommitMismatch, match="only 6"):
        growth.commit(KEY, 1, 8, [1])
    assert growth.num_sessions == 0
    growth.open(make_start(prompt=[1, 2, 3]))
    with pytest.raises(CommitMismatch, match="differs"):
        growth.commit(KEY, 1, 2, [9])
    assert (growth.num_sessions, runner.slots.used) == (0, 0)


def test_every_parent_on_a_committed_path_is_a_trial(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start())
    tools.finish(growth)
    first = next(node for node in tools.open_session(growth).tree.root.taken.values() if node.taken)
    second = next(node for node in first.taken.values() if node.child_tokens)
    assert second.child_tokens is not None
    missed = next(token for token in range(24) if token not in second.child_tokens)
    growth.commit(KEY, 1, 3, [first.token, second.token, missed, 7])
    (reliability,) = growth.calibration.reliability()
    assert (sum(reliability.children), sum(reliability.hits)) == (12, 2)


def test_commits_teach_the_calibration(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(sampling=SamplingSpec(max_new_tokens=150)))
    growth.step()
    session = tools.open_session(growth)
    before = [node.acceptance for node in session.tree.root.children.values()]
    assert before[0] > before[3]
    for _ in range(60):  # the target always takes the fourth
        while not session.tree.root.children:
            growth.step()
        growth.commit(KEY, 1, session.length, [list(session.tree.root.children)[3]])
    growth.step()
    after = [node.acceptance for node in session.tree.root.children.values()]
    assert after[3] > after[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": GrowthLimits(mode=GrowthMode.SYNC)},
        {"sampling": SamplingSpec(repetition_penalty=1.5, max_new_tokens=100)},
    ],
)
def test_no_step_overlaps_another_beside_a_session_that_needs_its_results(
    make_queued_growth: Make, make_start: Make, changes: dict[str, Any]
):
    growth, _ = make_queued_growth()
    growth.open(make_start(1))
    assert growth.begin()
    assert growth.takes_another
    growth.open(make_start(2, **changes))
    assert not growth.takes_another
    assert not growth.begin()
    growth.close((7, 2), 1)
    assert growth.begin()
    # No third one.
    assert not growth.takes_another
    assert not growth.begin()
    assert [growth.finish().tokens for _ in range(2)] == [3, 1]
    assert growth.num_begun == 0


def test_a_graph_is_captured_while_no_step_is_under_way(make_queued_growth: Make, make_start: Make):
    growth, steps = make_queued_growth()
    growth.open(make_start(1))
    assert growth.begin()
    steps.due = "bucket"
    assert not growth.begin()
    growth.finish()
    assert steps.due == "bucket"
    assert growth.begin()
    assert steps.due is None
    # What is promised from here on is the new step's.
    assert growth.begin()
    assert steps.promised > 0
    growth.finish()


def test_what_waits_for_its_children_has_credit_for_them(make_queued_growth: Make, make_start: Make):
    for credit, begun in ((7, False), (8, True)):
        growth, _ = make_queued_growth()
        session = growth.open(make_start(1, limits=GrowthLimits(max_live_nodes=credit)))
        assert growth.begin()
        # The root's four children come; its best child may have four of its own.
        assert growth.begin() == begun
        while growth.num_begun:
            growth.finish()
        assert session.tree.size == (8 if begun else 4)
