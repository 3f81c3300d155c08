"""Sessions: how they open and close, their epochs and holds, and what happens where slots run out."""

from typing import Any

import pytest
from tests.draft_worker.table_model import VOCAB, Bench, sync_start

from outrider.errors import InvalidRequest, OutOfSlots, Superseded
from outrider.sampling import SamplingSpec

KEY = (7, 1)


def test_sessions_that_cannot_be_opened():
    bench = Bench(num_slots=40, max_sessions=1, max_model_len=50)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": []}, "empty"),
        ({"prompt": [1, VOCAB]}, "token 24 given, ids below 24"),
        ({"prompt": [1] * 40, "output": [1] * 11}, "51 tokens"),
        ({"prompt": [1] * 41}, "41 given, 40 fit"),
    ]
    for changes, message in refused:
        with pytest.raises(InvalidRequest, match=message):
            bench.open(**changes)
    bench.open(1)
    with pytest.raises(OutOfSlots, match="1 sessions are open"):
        bench.open(2)
    assert bench.drafter.num_sessions == 1
    # A row that was closed just now is another's.
    bench.close(1)
    second = bench.open(2)
    bench.finish()
    second.check_children()
    bench.check_all_given_back()


def test_numbers_beyond_what_the_device_knows_are_no_fault():
    bench = Bench()
    spec = SamplingSpec(stop_token_ids=(5, *range(2**31, 2**31 + 70)), min_new_tokens=0, max_new_tokens=2**32 - 1)
    mirror = bench.open(sampling=spec, max_depth=2**32 - 1, max_live_nodes=2**32 - 1)
    bench.finish()
    mirror.check_children(least=10)
    assert not any(5 in context[3:] for context in mirror.expanded)


def test_older_epochs_are_refused_and_newer_ones_replace():
    bench = Bench()
    bench.open(epoch=2, prompt=[1, 2, 3])
    bench.finish()
    for epoch in (1, 2):
        with pytest.raises(Superseded):
            bench.open(epoch=epoch)
    with pytest.raises(Superseded):
        bench.drafters.commit(KEY, 1, 3, [4])
    bench.drafters.close(KEY, 1)
    mirror = bench.open(epoch=3, prompt=[4, 5], owner="other")
    bench.finish()
    first = mirror.growths[0]
    assert (first.epoch, first.as_of, first.owner, first.node_ids[0]) == (3, 2, "other", 1)
    bench.check_all_given_back()


def test_a_held_session_rests_and_goes_on_at_its_new_root():
    bench = Bench()
    mirror, other = bench.open(1), bench.open(2, prompt=[5])
    bench.step()
    for reason in ("first", "second"):
        bench.drafter.hold(KEY, reason, is_held=True)
    before = len(mirror.growths)
    bench.finish()
    bench.commit(1, [9])
    bench.drafter.hold(KEY, "first", is_held=False)
    bench.finish()
    assert len(mirror.growths) == before
    other.check_children(least=10)
    bench.drafter.hold(KEY, "second", is_held=False)
    bench.finish()
    assert {own.as_of for own in mirror.growths[before:]} == {4}
    mirror.check_children(least=10)
    bench.check_all_given_back()


def test_a_prompt_has_been_computed_once_its_root_is_there():
    bench = Bench(max_step_tokens=16)
    bench.open(prompt=[1] * 40)
    found = []
    for _ in range(3):
        found.append(bench.drafter.has_prompt(KEY))
        bench.step()
    assert [*found, bench.drafter.has_prompt(KEY)] == [False, False, False, True]
    bench.close(1)
    assert not bench.drafter.has_prompt(KEY)


def test_out_of_slots_the_youngest_waits_and_starts_again_when_there_is_room():
    bench = Bench(num_slots=170, max_sessions=4)
    first, second = bench.open(1, prompt=[1] * 60), bench.open(2, prompt=[2] * 60)
    third = bench.open_start(sync_start(3, prompt=[3] * 60))
    bench.finish()
    assert first.live
    assert second.live
    (empty,) = third.growths
    assert (empty.complete, empty.node_ids) == (True, [])
    # Sync mode: each round is answered.
    bench.commit(3, [4])
    bench.finish()
    assert [(own.as_of, own.complete, own.node_ids) for own in third.growths[1:]] == [(61, True, [])]
    # The eldest's new tokens take what the second holds.
    bench.commit(1, [4] * 60)
    before = len(second.growths)
    bench.finish()
    first.check_children(least=10)
    bench.commit(2, [7])
    bench.finish()
    assert len(second.growths) == before
    bench.close(1)
    bench.finish()
    assert second.growths[-1].as_of == 61
    second.check_children(least=10)
    bench.commit(3, [4])
    bench.close(2)
    bench.finish()
    assert len(third.growths) == 3
    bench.commit(3, [4])
    bench.finish()
    assert len(third.growths[-1].node_ids) == 24
    bench.check_all_given_back()


def test_whoever_has_nothing_to_grow_keeps_nobody_from_starting_again():
    bench = Bench(num_slots=170, max_sessions=4)
    bench.open(1, prompt=[1] * 50)
    # Of the second the tree was sent, so it rests until its next commit.
    bench.open_start(sync_start(2, prompt=[2] * 40))
    young = bench.open(3, prompt=[3] * 40)
    bench.finish()
    bench.commit(1, [4] * 90)
    bench.finish()
    bench.close(1)
    computed = len(bench.model.computed)
    bench.finish()
    assert bench.model.computed[computed + 39] == (3,) * 40
    assert young.live
    bench.check_all_given_back()


def test_a_preempted_session_sends_nothing_twice():
    bench = Bench(num_slots=170, max_sessions=4)
    bench.open(1, prompt=[1] * 40)
    young = bench.open(2, prompt=[2] * 40)
    bench.finish()
    before = set(young.nodes)
    bench.commit(1, [4] * 80)
    bench.finish()
    bench.close(1)
    computed = len(bench.model.computed)
    # The mirror refuses what comes twice.
    bench.finish()
    assert young.tokens == list(bench.model.computed[computed + 39])
    young.check_children(least=10)
    bench.commit(2, [young.live[0].context[-1]])
    bench.finish()
    assert set(young.nodes) > before
    young.check_children(least=10)
    bench.check_all_given_back()


def test_nobody_is_preempted_for_slots_that_were_there():
    bench = Bench(num_slots=300, max_sessions=4)
    mirrors = bench.open(1, prompt=[1] * 180), bench.open(2, prompt=[2] * 20)
    bench.finish()
    # Each token was computed once: nobody lost KV.
    assert len(set(bench.model.computed)) == len(bench.model.computed)
    for mirror in mirrors:
        mirror.check_children(least=10)


def test_a_session_too_long_for_the_margin_starts_again_once_it_is_alone():
    bench = Bench(num_slots=100, max_sessions=4)
    bench.open(1, prompt=[1] * 60)
    second = bench.open(2, prompt=[2] * 60)
    bench.finish()
    assert not second.growths
    bench.close(1)
    bench.finish()
    second.check_children()
    bench.check_all_given_back()


def test_growth_that_was_not_asked_for_comes_by_advance_as_well():
    """Whoever advances sees all that can happen without another command, waits for slots included."""
    bench = Bench(num_slots=100, max_sessions=4)
    bench.open(1, prompt=[1] * 60)
    bench.open(2, prompt=[2] * 60)
    bench.finish()
    bench.close(1)
    growths = []
    while came := bench.drafter.advance():
        growths += came
    assert not bench.drafter.is_busy
    assert {session_id for growth in growths for session_id in growth.session_ids} == {2}
