"""Sync rounds, sessions that lack slots or cannot be opened, and their epochs."""

from collections.abc import Callable
from typing import Any

import pytest

from outrider.draft_worker.growth_step import SessionGrowth
from outrider.draft_worker.session import GrowthLimits, GrowthMode
from outrider.errors import InvalidRequest, OutOfSlots, Superseded
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]
KEY = (7, 1)


def test_a_sync_round_that_a_commit_ends_in_flight_starts_afresh(tools: Any, make_growth: Make, make_start: Make):
    limits = GrowthLimits(mode=GrowthMode.SYNC, sync_nodes=6, max_depth=3)
    plain, _ = make_growth()
    plain.open(make_start(prompt=[1, 2, 3, 4], limits=limits))
    expected = [(record.tokens, record.acceptance) for record in tools.growths_of(tools.finish(plain))]
    growth, _ = make_growth()
    growth.open(make_start(prompt=[1, 2, 3], limits=limits))
    growth.step()
    assert growth.begin()
    growth.commit(KEY, 1, 3, [4])
    assert not growth.finish().growths
    assert [(record.tokens, record.acceptance) for record in tools.growths_of(tools.finish(growth))] == expected


def sync_start(make_start: Make, number: int = 1, **changes: Any) -> Any:
    limits = GrowthLimits(mode=GrowthMode.SYNC, sync_nodes=24, max_depth=5)
    return make_start(number, limits=limits, **{"sampling": SamplingSpec(temperature=0.7, seed=3), **changes})


def tree_of(record: SessionGrowth) -> list[tuple[int, int, float]]:
    place = {node_id: index for index, node_id in enumerate(record.node_ids, start=1)} | {0: 0}
    return [
        (place[parent], token, acceptance)
        for parent, token, acceptance in zip(record.parents, record.tokens, record.acceptance, strict=True)
    ]


def test_sync_grows_one_whole_tree_a_round_and_the_same_whatever_happened_before(
    tools: Any, make_growth: Make, make_start: Make
):
    growth, _ = make_growth()
    growth.open(sync_start(make_start))
    growth.open(make_start(2, prompt=[8, 8]))
    steps = tools.finish(growth)
    (first,) = tools.growths_of(steps)
    assert first.complete
    assert (first.as_of, len(first.node_ids)) == (3, 24)
    # Many commits teach the calibration; a sync tree ignores it.
    for _ in range(10):
        other = tools.open_session(growth, (7, 2))
        growth.commit((7, 2), 1, other.length, [next(iter(other.tree.root.children))])
        tools.finish(growth)
    growth.commit(KEY, 1, 3, first.tokens[:2])
    (second,) = tools.growths_of(tools.finish(growth))
    fresh, _ = make_growth()
    fresh.open(sync_start(make_start, output=first.tokens[:2]))
    (again,) = tools.growths_of(tools.finish(fresh))
    assert tree_of(second) == tree_of(again)
    assert second.as_of == 5
    assert not set(second.node_ids) & set(first.node_ids)


def test_a_sync_tree_is_the_best_of_a_much_wider_one(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(sync_start(make_start))
    (record,) = tools.growths_of(tools.finish(growth))
    wide, _ = make_growth(sync_step_nodes=400)
    wide.open(sync_start(make_start))
    (best,) = tools.growths_of(tools.finish(wide))

    def worth(growth_record: SessionGrowth) -> float:
        values = [1.0]
        for parent, _, acceptance in tree_of(growth_record):
            values.append(values[parent] * acceptance)
        return sum(values)

    assert worth(record) > 0.98 * worth(best)


def test_levels_of_many_sync_sessions_are_spread_over_steps_and_none_is_left_behind(
    tools: Any, make_growth: Make, make_start: Make
):
    trees, widths = [], []
    for most in (1000, 20):
        growth, runner = make_growth(max_step_rows=most)
        for number in range(1, 7):
            growth.open(sync_start(make_start, number, prompt=[3 + number, 5, 9]))
        trees.append({one.session_id: tree_of(one) for step in tools.finish(growth) for one in step.growths})
        # The roots come first, all of them together.
        widths.append([len(batch.token_ids) for batch in runner.batches[1:]])
    assert len(trees[0]) == 6
    assert trees[0] == trees[1]
    # Then whole levels, of eight nodes at most, as far as there is room.
    assert max(widths[1]) <= 20 < max(widths[0])
    assert sum(widths[1]) == sum(widths[0])


def test_sync_rounds_end_even_where_nothing_can_grow(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(sync_start(make_start, sampling=SamplingSpec(max_new_tokens=2, stop_token_ids=(5,))))
    (record,) = tools.growths_of(tools.finish(growth))
    assert len(record.node_ids) == 4 + 16 - 4 * (5 in record.tokens[:4])
    growth.commit(KEY, 1, 3, [5])
    (record,) = tools.growths_of(tools.finish(growth))
    assert (record.complete, record.node_ids, record.as_of) == (True, [], 4)


def test_out_of_slots_the_youngest_waits_and_starts_again(
    tools: Any, make_growth: Make, make_start: Make, logits_after: Make
):
    growth, runner = make_growth(runner={"num_slots": 170, "max_rows": 4, "max_row_len": 300})
    growth.open(make_start(1, prompt=[1] * 60))
    growth.open(make_start(2, prompt=[2] * 60))
    growth.open(sync_start(make_start, 3, prompt=[3] * 60))
    steps = tools.finish(growth)
    assert tools.growths_of(steps, 1)
    assert tools.growths_of(steps, 2)
    (empty,) = tools.growths_of(steps, 3)
    assert (empty.complete, empty.node_ids) == (True, [])
    assert runner.slots.length(tools.open_session(growth, (7, 3)).row) == 0
    # An older session's tokens take what the second holds.
    growth.commit((7, 1), 1, 60, [4] * 60)
    tools.finish(growth)
    assert runner.slots.length(tools.open_session(growth, (7, 2)).row) == 0
    tools.check_children(tools.open_session(growth, (7, 1)), logits_after)
    growth.close((7, 1), 1)
    assert tools.growths_of(tools.finish(growth), 2)
    tools.check_children(tools.open_session(growth, (7, 2)), logits_after)
    growth.commit((7, 3), 1, 60, [4])
    growth.close((7, 2), 1)
    steps = tools.finish(growth)
    assert len(tools.growths_of(steps, 3)[-1].node_ids) == 24
    growth.close_owned("owner")
    assert (runner.slots.used, runner.slots.free_rows, growth.num_sessions) == (0, 4, 0)


def test_a_session_too_long_for_the_margin_starts_again_once_it_is_alone(
    tools: Any, make_growth: Make, make_start: Make
):
    growth, runner = make_growth(runner={"num_slots": 100, "max_rows": 4, "max_row_len": 300})
    growth.open(make_start(1, prompt=[1] * 60))
    growth.open(make_start(2, prompt=[2] * 60))
    tools.finish(growth)
    assert tools.open_session(growth, (7, 2)).starved
    growth.close((7, 1), 1)
    assert tools.growths_of(tools.finish(growth), 2)
    # What has become longer than all slots would wait for ever: whoever counts on it is told.
    with pytest.raises(OutOfSlots, match="101 tokens"):
        growth.commit((7, 2), 1, 60, [3] * 41)
    assert growth.session((7, 2)) is None
    assert not tools.finish(growth)
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


def test_a_committed_token_beyond_the_vocabulary_ends_that_session_alone(
    tools: Any, make_growth: Make, make_start: Make
):
    growth, runner = make_growth()
    growth.open(make_start(1))
    growth.open(make_start(2))
    tools.finish(growth)
    with pytest.raises(InvalidRequest, match=str(runner.vocab_size)):
        growth.commit((7, 1), 1, 3, [runner.vocab_size])
    assert growth.session((7, 1)) is None
    growth.commit((7, 2), 1, 3, [1])
    assert tools.growths_of(tools.finish(growth), 2)
    growth.close((7, 2), 1)
    assert growth.slots.used == 0


def test_older_epochs_are_refused_and_newer_ones_replace(tools: Any, make_growth: Make, make_start: Make):
    growth, runner = make_growth()
    growth.open(make_start(epoch=2, prompt=[1, 2, 3]))
    tools.finish(growth)
    for epoch in (1, 2):
        with pytest.raises(Superseded):
            growth.open(make_start(epoch=epoch))
    with pytest.raises(Superseded):
        growth.commit(KEY, 1, 3, [4])
    growth.close(KEY, 1)
    growth.open(make_start(epoch=3, prompt=[4, 5], owner="other"))
    (record, *_) = tools.growths_of(tools.finish(growth))
    assert (record.epoch, record.as_of, record.owner, record.node_ids[0]) == (3, 2, "other", 1)
    growth.close_owned("owner")
    assert growth.num_sessions == 1
    growth.close(KEY, 3)
    assert (growth.num_sessions, runner.slots.used, runner.slots.free_rows) == (0, 0, 8)
