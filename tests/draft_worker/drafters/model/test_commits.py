"""Commits: the root moves, the branch below it stays with its KV, and what is wrong ends its session alone."""

import numpy as np
import pytest
from tests.draft_worker.table_model import VOCAB, Bench, Mirror

from outrider.errors import CommitMismatch, InvalidRequest
from outrider.sampling import SamplingSpec

KEY = (7, 1)


def best_path(mirror: Mirror, length: int) -> list[int]:
    """Tokens of the first children, from the root down."""
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(mirror.expanded[*mirror.tokens, *tokens][0].context[-1])
    return tokens


def unknown_token(mirror: Mirror) -> int:
    """A token that is no child of the root."""
    children = {node.context[-1] for node in mirror.expanded[tuple(mirror.tokens)]}
    return next(token for token in range(VOCAB) if token not in children)


def test_a_surviving_branch_is_neither_computed_nor_sent_again():
    bench = Bench()
    mirror = bench.open()
    bench.finish()
    before, known = set(bench.model.computed), len(mirror.growths)
    bench.commit(1, best_path(mirror, 1))
    survivors = set(mirror.expanded)
    assert len(survivors) > 3
    bench.finish()
    after = bench.model.computed[len(before) :]
    assert len(after) == len(set(after)) > 0
    # The mirror has refused what came twice.
    assert not before & set(after)
    assert {own.as_of for own in mirror.growths[known:]} == {4}
    assert survivors < set(mirror.expanded)


def test_a_gap_is_computed_and_the_tree_begins_anew_behind_it():
    bench = Bench()
    mirror = bench.open()
    bench.finish()
    steps, token = len(bench.model.steps), unknown_token(mirror)
    bench.commit(1, [token, 7])
    assert not mirror.live
    bench.step()
    assert bench.model.steps[steps] == [(1, 2, 3, token), (1, 2, 3, token, 7)]
    assert (mirror.growths[-1].as_of, mirror.growths[-1].parents) == (5, [0] * 4)
    bench.finish()
    mirror.check_children(least=10)


def test_many_commits_between_two_steps_are_one():
    bench = Bench()
    mirror = bench.open(max_depth=4)
    bench.finish()
    path = best_path(mirror, 3)
    for token in path:
        bench.commit(1, [token])
    bench.commit(1, [])
    assert mirror.live
    before = len(bench.model.computed)
    bench.finish()
    assert all(len(context) > 6 for context in bench.model.computed[before:])
    mirror.check_children(least=10)


@pytest.mark.parametrize("pieces", [1, 3])
def test_more_tokens_than_a_step_commits_open_the_row_anew(pieces: int):
    bench = Bench(max_model_len=700, num_slots=900)
    spec = SamplingSpec(max_new_tokens=600)
    mirror, other = bench.open(1, sampling=spec), bench.open(2, prompt=[5], sampling=spec)
    bench.finish()
    for tokens in np.array_split(np.arange(300) % VOCAB, pieces):
        bench.commit(1, tokens.tolist())
    bench.finish()
    assert mirror.growths[-1].as_of == 303
    # The ids of the row begin anew: whoever receives them has dropped all nodes of before.
    assert other.growths[-1].as_of == 1
    bench.commit(1, best_path(mirror, 1))
    bench.finish()
    mirror.check_children(least=10)
    bench.check_all_given_back()


def test_commits_that_overlap_or_leave_a_hole():
    bench = Bench()
    mirror = bench.open(prompt=[1, 2, 3])
    for position, tokens in ((3, [4, 5]), (4, [5, 6]), (3, [4]), (5, [6, 7])):
        bench.drafters.commit(KEY, 1, position, tokens)
    mirror.commit([4, 5, 6, 7])
    bench.finish()
    assert {own.as_of for own in mirror.growths} == {7}
    mirror.check_children(least=10)
    with pytest.raises(CommitMismatch, match="only 7"):
        bench.drafters.commit(KEY, 1, 8, [1])
    assert bench.drafter.num_sessions == 0
    bench.open(prompt=[1, 2, 3])
    with pytest.raises(CommitMismatch, match="differs"):
        bench.drafters.commit(KEY, 1, 2, [9])
    bench.mirrors.clear()
    bench.check_all_given_back()


def test_a_token_outside_the_vocabulary_ends_that_session_alone():
    bench = Bench()
    bench.open(1)
    other = bench.open(2)
    bench.finish()
    with pytest.raises(InvalidRequest, match=str(VOCAB)):
        bench.commit(1, [VOCAB])
    assert bench.drafter.num_sessions == 1
    del bench.mirrors[1]
    bench.commit(2, [1])
    bench.finish()
    assert other.growths[-1].as_of == 4
    bench.check_all_given_back()


def test_what_becomes_longer_than_all_slots_is_closed():
    bench = Bench(num_slots=100)
    bench.open(prompt=[1] * 60)
    with pytest.raises(InvalidRequest, match="101 given, 100 fit"):
        bench.commit(1, [3] * 41)
    bench.mirrors.clear()
    bench.check_all_given_back()


def test_tokens_beyond_the_models_length_are_taken_and_nothing_grows_there():
    bench = Bench(max_model_len=6)
    mirror = bench.open(prompt=[1, 2, 3])
    bench.finish()
    assert max(len(node.context) for node in mirror.live) == 6
    bench.commit(1, [1, 2, 3, 4, 5])
    bench.finish()
    assert not mirror.live
    bench.check_all_given_back()
