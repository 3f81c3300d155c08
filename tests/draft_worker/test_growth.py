from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_step import GrowthConfig, GrowthStep, SessionGrowth
from outrider.draft_worker.session import CommitMismatch, DraftSession, GrowthLimits, GrowthMode
from outrider.errors import InvalidRequest, OutOfSlots, Superseded
from outrider.kernels.noise import gumbel_noise
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]
KEY = (7, 1)


def finish(growth: TreeGrowth, steps: int = 200) -> list[GrowthStep]:
    """Steps until there is nothing to do."""
    done = []
    while (step := growth.step()) is not None:
        done.append(step)
        assert len(done) < steps, "does not come to rest"
    return done


def growths_of(steps: list[GrowthStep], session_id: int = 1) -> list[SessionGrowth]:
    return [growth for step in steps for growth in step.growths if growth.session_id == session_id]


def open_session(growth: TreeGrowth, key: tuple[int, int] = KEY) -> DraftSession:
    session = growth.session(key)
    assert session is not None
    return session


def ancestors(node: DraftNode) -> list[DraftNode]:
    return [] if node.parent is None else [node.parent, *ancestors(node.parent)]


def path_tokens(node: DraftNode) -> list[int]:
    tokens: list[int] = []
    walk: Any = node
    while walk.parent is not None:
        tokens.insert(0, walk.token)
        walk = walk.parent
    return tokens


def expected_children(logits: np.ndarray, spec: SamplingSpec, position: int, count: int = 4) -> list[int]:
    values = torch.from_numpy(logits)
    if spec.temperature > 0:
        values = torch.log_softmax(values / spec.temperature, dim=0)
        seeds = torch.from_numpy(np.array([spec.seed], dtype=np.uint64).view(np.int64))
        positions = torch.tensor([position])
        values = values + gumbel_noise(seeds, positions, len(values), 0, spec.choice_index)[0]
    return values.topk(count).indices.tolist()


def check_children(session: DraftSession, logits_after: Make, least: int = 1) -> None:
    """Every expanded node has the children that the model gives for exactly its own path."""
    expanded = [node for node in (session.tree.root, *session.tree.nodes()) if node.child_tokens is not None]
    assert len(expanded) >= least
    for node in expanded:
        context = session.tokens + path_tokens(node)
        assert node.position == len(context) - 1
        assert node.child_tokens == expected_children(logits_after(context), session.sampling, len(context))


@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(temperature=0.8, seed=2**63 + 5, choice_index=2)])
def test_children_are_the_best_under_the_targets_rule_and_noise(
    make_growth: Make, make_start: Make, logits_after: Make, spec: SamplingSpec
):
    growth, _ = make_growth()
    growth.open(make_start(sampling=spec, prompt=[3, 1, 4, 1, 5]))
    finish(growth)
    check_children(open_session(growth), logits_after, least=10)


def test_each_step_expands_the_best_of_all_sessions(make_growth: Make, make_start: Make):
    growth, runner = make_growth(max_step_nodes=4)
    for number in (1, 2, 3):
        growth.open(make_start(number, prompt=[number], limits=GrowthLimits(max_live_nodes=400, max_depth=30)))
    growth.step()
    sessions = [open_session(growth, (7, number)) for number in (1, 2, 3)]
    for _ in range(6):
        frontier = [
            (node.path_value, index)
            for index, session in enumerate(sessions)
            for node in session.tree.nodes()
            if node.child_tokens is None
        ]
        before = {id(node) for session in sessions for node in session.tree.nodes() if node.child_tokens is not None}
        growth.step()
        chosen = [
            (node.path_value, index)
            for index, session in enumerate(sessions)
            for node in session.tree.nodes()
            if node.child_tokens is not None and id(node) not in before
        ]
        # One node is everybody's share; the fourth is the best of what is left.
        shares = [max(value for value, owner in frontier if owner == index) for index in range(3)]
        rest = sorted(value for value, _ in frontier)
        for value in shares:
            rest.remove(value)
        assert sorted(value for value, _ in chosen) == sorted([*shares, rest[-1]])
    assert [len(batch.token_ids) for batch in runner.batches[1:]] == [4] * 6


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
    make_growth: Make, make_start: Make, logits_after: Make, seed: int, overlapping: bool
):
    rng = np.random.default_rng(seed)
    spec = SamplingSpec(max_new_tokens=150, temperature=float(seed % 2), seed=seed)
    growth, runner = make_growth(max_step_nodes=3, max_step_tokens=5)
    growth.open(make_start(prompt=rng.integers(0, 24, 7).tolist(), sampling=spec, limits=GrowthLimits(max_depth=6)))
    session, seen, survived = open_session(growth), set[int](), 0

    def note(step: GrowthStep | None) -> None:
        for growth_record in growths_of([step] if step else []):
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
            check_children(session, logits_after)
            survived += len(expanded) > 0
        else:
            assert used == session.kv_len
            assert session.tree.size == 0
    finish(growth)
    check_children(session, logits_after, least=5)
    assert survived > 3, "hardly a tree survived its commit"
    assert seen == set(range(1, max(seen) + 1))
    growth.close(KEY, 1)
    assert runner.slots.used == 0
    assert runner.slots.free_rows == 8


def test_sessions_come_and_go_while_a_step_runs(make_growth: Make, make_start: Make, logits_after: Make):
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
    finish(growth)
    for number in (1, 2, 3):
        check_children(open_session(growth, (7, number)), logits_after)
    growth.close_owned("owner")
    assert runner.slots.used == 0


def test_growth_that_leaves_late_is_that_of_its_step(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start())
    growth.step()
    session = open_session(growth)
    assert growth.begin()
    parent = next(iter(session.tree.root.taken.values()))
    step = growth.finish()
    children = [(child.node_id, child.token) for child in parent.children.values()]
    growth.commit(KEY, 1, 3, [parent.token])
    growth.close(KEY, 1)
    (record,) = step.growths
    assert (record.as_of, record.epoch, record.parents[0]) == (3, 1, parent.node_id)
    assert list(zip(record.node_ids, record.tokens, strict=True))[:4] == children


def test_a_session_that_is_left_out_has_no_part_in_a_step(make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(1))
    growth.open(make_start(2))
    for _ in range(2):
        assert growth.begin({(7, 1)})
        assert runner.batches[-1].rows.tolist() == [open_session(growth, (7, 2)).row]
        assert {record.session_id for record in growth.finish().growths} == {2}
    assert growth.begin()
    assert len(runner.batches[-1].rows) == 2
    growth.finish()
    growth.close((7, 2), 1)
    assert not growth.begin({(7, 1)})


def test_a_sync_round_that_a_commit_ends_in_flight_starts_afresh(make_growth: Make, make_start: Make):
    limits = GrowthLimits(mode=GrowthMode.SYNC, sync_nodes=6, max_depth=3)
    plain, _ = make_growth()
    plain.open(make_start(prompt=[1, 2, 3, 4], limits=limits))
    expected = [(record.tokens, record.acceptance) for record in growths_of(finish(plain))]
    growth, _ = make_growth()
    growth.open(make_start(prompt=[1, 2, 3], limits=limits))
    growth.step()
    assert growth.begin()
    growth.commit(KEY, 1, 3, [4])
    assert not growth.finish().growths
    assert [(record.tokens, record.acceptance) for record in growths_of(finish(growth))] == expected


def test_a_surviving_branch_is_not_computed_again(make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start())
    finish(growth)
    session = open_session(growth)
    best = max(session.tree.root.children.values(), key=lambda node: node.path_value)
    before = {node.node_id for node in session.tree.nodes() if node.child_tokens is not None}
    survivors = [node.node_id for node in session.tree.nodes() if best in ancestors(node)]
    runner.batches.clear()
    growth.commit(KEY, 1, 3, [best.token])
    assert [node.node_id for node in session.tree.nodes()] == survivors
    assert session.kv_len == session.length
    finish(growth)
    after = {node.node_id for node in session.tree.nodes() if node.child_tokens is not None}
    assert len(before & after) > 3
    assert sum(len(batch.token_ids) for batch in runner.batches) == len(after - before) > 0


def test_the_prompt_is_computed_in_chunks_that_leave_others_growing(make_growth: Make, make_start: Make):
    growth, runner = make_growth(max_step_tokens=16)
    growth.open(make_start(1))
    growth.step()
    growth.open(make_start(2, prompt=[5] * 40))
    steps = [growth.step() for _ in range(3)]
    assert [len(batch.logit_rows) > 0 for batch in runner.batches] == [True] * 4
    chains = [(np.diff(batch.query_start)).max() for batch in runner.batches[1:]]
    assert chains == [16, 16, 8]
    assert [len(growths_of([step], 2)) for step in steps if step] == [0, 0, 1]
    assert all(growths_of([step], 1) for step in steps if step)


def test_a_gap_is_prefilled_and_the_tree_restarts_there(make_growth: Make, make_start: Make, logits_after: Make):
    growth, runner = make_growth()
    growth.open(make_start())
    finish(growth)
    runner.batches.clear()
    session = open_session(growth)
    first = next(iter(session.tree.root.children.values()))
    missing = next(token for token in range(24) if token not in first.children)
    growth.commit(KEY, 1, 3, [first.token, missing, 7])
    step = growth.step()
    assert step is not None
    assert runner.batches[0].token_ids.tolist() == [missing, 7]
    assert step.growths[0].as_of == 6
    assert step.growths[0].parents == [0] * 4
    finish(growth)
    check_children(session, logits_after)


def test_commits_that_overlap_or_leave_a_hole(make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(prompt=[1, 2, 3]))
    growth.commit(KEY, 1, 3, [4, 5])
    growth.commit(KEY, 1, 4, [5, 6])
    growth.commit(KEY, 1, 3, [4])
    assert open_session(growth).tokens == [1, 2, 3, 4, 5, 6]
    with pytest.raises(CommitMismatch, match="only 6"):
        growth.commit(KEY, 1, 8, [1])
    assert growth.num_sessions == 0
    growth.open(make_start(prompt=[1, 2, 3]))
    with pytest.raises(CommitMismatch, match="differs"):
        growth.commit(KEY, 1, 2, [9])
    assert (growth.num_sessions, runner.slots.used) == (0, 0)


@pytest.mark.parametrize("credit", [1, 3, 10, 33])
def test_live_nodes_stay_within_the_credit_and_go_on_after_a_commit(make_growth: Make, make_start: Make, credit: int):
    growth, _ = make_growth()
    growth.open(make_start(limits=GrowthLimits(max_live_nodes=credit, max_depth=50)))
    live: set[int] = set()
    for _ in range(12):
        for record in growths_of(finish(growth)):
            live |= set(record.node_ids)
            assert len(live) <= credit
        session = open_session(growth)
        assert len(live) == session.tree.size
        assert session.tree.size > credit - 4
        growth.commit(KEY, 1, session.length, [next(iter(session.tree.root.children))])
        live = {node.node_id for node in session.tree.nodes()}


def test_depth_is_bounded_below_the_current_root(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(limits=GrowthLimits(max_live_nodes=1000, max_depth=2)))
    finish(growth)
    session = open_session(growth)
    assert max(node.depth for node in session.tree.nodes()) == 2
    assert session.tree.size == 20
    growth.commit(KEY, 1, 3, [next(iter(session.tree.root.children))])
    finish(growth)
    assert max(node.depth for node in session.tree.nodes()) == 2
    assert session.tree.size == 20


def test_stop_tokens_and_the_length_limit_end_branches(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    stops = tuple(range(0, 24, 2))
    # A stop token within the prompt stops nothing.
    growth.open(make_start(prompt=[5, 2], sampling=SamplingSpec(max_new_tokens=3, stop_token_ids=stops)))
    finish(growth)
    session = open_session(growth)
    nodes = list(session.tree.nodes())
    assert any(node.token in stops for node in nodes)
    for node in nodes:
        # Indices 2, 3 and 4 exist; nothing follows the last of them, nor a stop token.
        assert (node.child_tokens is not None) == (node.token not in stops and node.position < 4)
    growth.commit(KEY, 1, 2, [4])
    assert finish(growth) == []


def test_growth_ends_at_the_models_length(make_growth: Make, make_start: Make):
    growth, _ = make_growth(max_model_len=6)
    growth.open(make_start(prompt=[1, 2, 3]))
    finish(growth)
    session = open_session(growth)
    assert max(node.position for node in session.tree.nodes()) == 5
    growth.commit(KEY, 1, 3, [1, 2, 3, 4, 5])
    assert finish(growth) == []


def test_stop_tokens_are_banned_before_the_minimum(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    stops = tuple(range(12))
    spec = SamplingSpec(max_new_tokens=20, stop_token_ids=stops, min_new_tokens=2)
    growth.open(make_start(prompt=[5, 2], output=[13], sampling=spec))
    finish(growth)
    nodes = list(open_session(growth).tree.nodes())
    assert all(node.token not in stops for node in nodes if node.position < 4)
    assert any(node.token in stops for node in nodes if node.position >= 4)


def test_allowed_tokens_leave_fewer_children(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(sampling=SamplingSpec(max_new_tokens=20, allowed_token_ids=(4, 9), temperature=1.0)))
    finish(growth)
    session = open_session(growth)
    assert {node.token for node in session.tree.nodes()} == {4, 9}
    assert session.tree.root.child_buckets is not None
    assert len(session.tree.root.child_buckets) == 2
    growth.commit(KEY, 1, 3, [4])
    finish(growth)


def test_penalties_count_the_nodes_own_path_and_bias_is_added(make_growth: Make, make_start: Make, logits_after: Make):
    penalties: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.9}
    spec = SamplingSpec(max_new_tokens=60, logit_bias={3: 1.5, 8: -2.0}, **penalties)
    growth, _ = make_growth()
    growth.open(make_start(1, sampling=spec, prompt=[3, 1, 4, 1, 5], output=[9, 2, 9]))
    growth.open(make_start(2, prompt=[3, 1, 4]))
    finish(growth)
    growth.commit(KEY, 1, 8, [next(iter(open_session(growth).tree.root.children)), 9])
    finish(growth)
    check_children(open_session(growth, (7, 2)), logits_after)
    session, checked = open_session(growth), 0
    for node in session.tree.nodes():
        if node.child_tokens is None:
            continue
        context = session.tokens + path_tokens(node)
        logits, output = logits_after(context).copy(), context[5:]
        for token in set(context):
            logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
            logits[token] -= 0.9 * output.count(token) + 0.4 * (token in output)
        logits[3] += 1.5
        logits[8] -= 2
        assert node.child_tokens == np.argsort(-logits, kind="stable")[:4].tolist()
        checked += 1
    assert checked > 5


def sync_start(make_start: Make, number: int = 1, **changes: Any) -> Any:
    limits = GrowthLimits(mode=GrowthMode.SYNC, sync_nodes=24, max_depth=5)
    return make_start(number, limits=limits, **{"sampling": SamplingSpec(temperature=0.7, seed=3), **changes})


def tree_of(record: SessionGrowth) -> list[tuple[int, int, float]]:
    place = {node_id: index for index, node_id in enumerate(record.node_ids, start=1)} | {0: 0}
    return [
        (place[parent], token, acceptance)
        for parent, token, acceptance in zip(record.parents, record.tokens, record.acceptance, strict=True)
    ]


def test_sync_grows_one_whole_tree_a_round_and_the_same_whatever_happened_before(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(sync_start(make_start))
    growth.open(make_start(2, prompt=[8, 8]))
    steps = finish(growth)
    (first,) = growths_of(steps)
    assert first.complete
    assert (first.as_of, len(first.node_ids)) == (3, 24)
    # Many commits teach the calibration; a sync tree ignores it.
    for _ in range(10):
        other = open_session(growth, (7, 2))
        growth.commit((7, 2), 1, other.length, [next(iter(other.tree.root.children))])
        finish(growth)
    growth.commit(KEY, 1, 3, first.tokens[:2])
    (second,) = growths_of(finish(growth))
    fresh, _ = make_growth()
    fresh.open(sync_start(make_start, output=first.tokens[:2]))
    (again,) = growths_of(finish(fresh))
    assert tree_of(second) == tree_of(again)
    assert second.as_of == 5
    assert not set(second.node_ids) & set(first.node_ids)


def test_a_sync_tree_is_the_best_of_a_much_wider_one(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(sync_start(make_start))
    (record,) = growths_of(finish(growth))
    wide, _ = make_growth(sync_step_nodes=400)
    wide.open(sync_start(make_start))
    (best,) = growths_of(finish(wide))

    def worth(growth_record: SessionGrowth) -> float:
        values = [1.0]
        for parent, _, acceptance in tree_of(growth_record):
            values.append(values[parent] * acceptance)
        return sum(values)

    assert worth(record) > 0.98 * worth(best)


def test_sync_rounds_end_even_where_nothing_can_grow(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(sync_start(make_start, sampling=SamplingSpec(max_new_tokens=2, stop_token_ids=(5,))))
    (record,) = growths_of(finish(growth))
    assert len(record.node_ids) == 4 + 16 - 4 * (5 in record.tokens[:4])
    growth.commit(KEY, 1, 3, [5])
    (record,) = growths_of(finish(growth))
    assert (record.complete, record.node_ids, record.as_of) == (True, [], 4)


def test_out_of_slots_the_youngest_waits_and_starts_again(make_growth: Make, make_start: Make, logits_after: Make):
    growth, runner = make_growth(runner={"num_slots": 170, "max_rows": 4, "max_row_len": 300})
    growth.open(make_start(1, prompt=[1] * 60))
    growth.open(make_start(2, prompt=[2] * 60))
    growth.open(sync_start(make_start, 3, prompt=[3] * 60))
    steps = finish(growth)
    assert growths_of(steps, 1)
    assert growths_of(steps, 2)
    (empty,) = growths_of(steps, 3)
    assert (empty.complete, empty.node_ids) == (True, [])
    assert runner.slots.length(open_session(growth, (7, 3)).row) == 0
    # An older session's tokens take what the second holds.
    growth.commit((7, 1), 1, 60, [4] * 60)
    finish(growth)
    assert runner.slots.length(open_session(growth, (7, 2)).row) == 0
    check_children(open_session(growth, (7, 1)), logits_after)
    growth.close((7, 1), 1)
    assert growths_of(finish(growth), 2)
    check_children(open_session(growth, (7, 2)), logits_after)
    growth.commit((7, 3), 1, 60, [4])
    growth.close((7, 2), 1)
    steps = finish(growth)
    assert len(growths_of(steps, 3)[-1].node_ids) == 24
    growth.close_owned("owner")
    assert (runner.slots.used, runner.slots.free_rows, growth.num_sessions) == (0, 4, 0)


def test_a_session_too_long_for_the_margin_starts_again_once_it_is_alone(make_growth: Make, make_start: Make):
    growth, runner = make_growth(runner={"num_slots": 100, "max_rows": 4, "max_row_len": 300})
    growth.open(make_start(1, prompt=[1] * 60))
    growth.open(make_start(2, prompt=[2] * 60))
    finish(growth)
    assert open_session(growth, (7, 2)).starved
    growth.close((7, 1), 1)
    assert growths_of(finish(growth), 2)
    # What has become longer than all slots would wait for ever: whoever counts on it is told.
    with pytest.raises(OutOfSlots, match="101 tokens"):
        growth.commit((7, 2), 1, 60, [3] * 41)
    assert growth.session((7, 2)) is None
    assert not finish(growth)
    assert (runner.slots.used, runner.slots.free_rows) == (0, 4)


def test_sessions_that_cannot_be_opened(make_growth: Make, make_start: Make):
    growth, runner = make_growth(runner={"num_slots": 40, "max_rows": 1, "max_row_len": 300}, max_model_len=50)
    for changes, message in (
        ({"prompt": []}, "empty"),
        ({"prompt": [1, 24]}, "token 24 given, ids below 24"),
        ({"prompt": [1] * 40, "output": [1] * 11}, "51 tokens"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            growth.open(make_start(**changes))
    with pytest.raises(OutOfSlots, match="41 tokens"):
        growth.open(make_start(prompt=[1] * 41))
    growth.open(make_start(1))
    with pytest.raises(OutOfSlots, match="max_num_seqs"):
        growth.open(make_start(2))
    assert growth.num_sessions == 1
    growth.close(KEY, 1)
    assert runner.slots.free_rows == 1


def test_a_committed_token_beyond_the_vocabulary_ends_that_session_alone(make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(1))
    growth.open(make_start(2))
    finish(growth)
    with pytest.raises(InvalidRequest, match=str(runner.vocab_size)):
        growth.commit((7, 1), 1, 3, [runner.vocab_size])
    assert growth.session((7, 1)) is None
    growth.commit((7, 2), 1, 3, [1])
    assert growths_of(finish(growth), 2)
    growth.close((7, 2), 1)
    assert growth.slots.used == 0


def test_older_epochs_are_refused_and_newer_ones_replace(make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(epoch=2, prompt=[1, 2, 3]))
    finish(growth)
    for epoch in (1, 2):
        with pytest.raises(Superseded):
            growth.open(make_start(epoch=epoch))
    with pytest.raises(Superseded):
        growth.commit(KEY, 1, 3, [4])
    growth.close(KEY, 1)
    growth.open(make_start(epoch=3, prompt=[4, 5], owner="other"))
    (record, *_) = growths_of(finish(growth))
    assert (record.epoch, record.as_of, record.owner, record.node_ids[0]) == (3, 2, "other", 1)
    growth.close_owned("owner")
    assert growth.num_sessions == 1
    growth.close(KEY, 3)
    assert (growth.num_sessions, runner.slots.used, runner.slots.free_rows) == (0, 0, 8)


def test_unlikely_nodes_are_neither_made_nor_expanded(make_growth: Make, make_start: Make):
    growth, _ = make_growth(min_path_value=0.2, min_acceptance=0.1)
    growth.open(make_start(limits=GrowthLimits(max_live_nodes=500, max_depth=50)))
    finish(growth)
    for node in open_session(growth).tree.nodes():
        assert node.acceptance >= 0.1
        assert (node.child_tokens is not None) == (node.path_value >= 0.2)


def test_every_parent_on_a_committed_path_is_a_trial(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start())
    finish(growth)
    first = next(node for node in open_session(growth).tree.root.taken.values() if node.taken)
    second = next(node for node in first.taken.values() if node.child_tokens)
    assert second.child_tokens is not None
    missed = next(token for token in range(24) if token not in second.child_tokens)
    growth.commit(KEY, 1, 3, [first.token, second.token, missed, 7])
    (reliability,) = growth.calibration.reliability()
    assert (sum(reliability.children), sum(reliability.hits)) == (12, 2)


def test_commits_teach_the_calibration(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(sampling=SamplingSpec(max_new_tokens=150)))
    growth.step()
    session = open_session(growth)
    before = [node.acceptance for node in session.tree.root.children.values()]
    assert before[0] > before[3]
    for _ in range(60):  # the target always takes the fourth
        while not session.tree.root.children:
            growth.step()
        growth.commit(KEY, 1, session.length, [list(session.tree.root.children)[3]])
    growth.step()
    after = [node.acceptance for node in session.tree.root.children.values()]
    assert after[3] > after[0]


def test_a_config_under_which_no_chain_would_grow_is_refused():
    with pytest.raises(ValueError, match="at least min_acceptance"):
        GrowthConfig(rejection_acceptance=0.1, min_acceptance=0.2)


@pytest.mark.parametrize("field", ["branching", "max_step_nodes", "max_step_tokens", "min_path_value"])
def test_config_out_of_range_is_refused(field: str):
    with pytest.raises(ValueError, match=field):
        GrowthConfig(**{field: -1})
