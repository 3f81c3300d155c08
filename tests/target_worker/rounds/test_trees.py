"""Rounds on a session's tree, and their reports on it: bounds, sources, where the tree has ended."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import PROMPT, loop_of, make_runner, open_request

from outrider.drafting.growth_source import GrowthSource
from outrider.kernels.pool.re_root import TreeEnd
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.session import SessionResult

SPEC = SamplingSpec(max_new_tokens=24)


@pytest.fixture
def loop(checkpoint: Path) -> RoundLoop:
    return loop_of(make_runner(checkpoint))


@pytest.fixture
def plain(reference_model) -> list[int]:
    return plain_decode(reference_model, PROMPT, SPEC).tokens


def turn(loop: RoundLoop) -> SessionResult:
    """Turn until the only session has a result."""
    for _ in range(50):
        for result in loop.turn():
            return result
    raise AssertionError("no result")


def chain(tokens: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """A tree's ids, parents and tokens, one below the other."""
    count = len(tokens)
    return list(range(1, count + 1)), list(range(count)), list(tokens)


@pytest.mark.parametrize(("bounds", "most"), [({"max_nodes": 3}, 3), ({"max_depth": 2}, 2), ({}, 9)])
def test_a_round_verifies_no_more_of_a_tree_than_its_session_may(bounds, most, loop, plain):
    loop.open(replace(open_request(1, SPEC), **bounds))
    loop.grow(Growth.of_session((7, 1), 1, 0, len(PROMPT), *chain(plain[:9]), [0.9] * 9))
    result = turn(loop)
    assert (result.selected, result.accepted) == (most, most)
    assert result.tokens == plain[: most + 1]
    # What was left out hangs below the new root.
    result = turn(loop)
    assert result.selected == min(most, 9 - most - 1) > 0 or most == 9


def test_nodes_are_counted_for_each_source_that_has_proposed_them(loop, plain):
    loop.open(open_request(1, SPEC))
    as_of = len(PROMPT)
    loop.grow(Growth.of_session((7, 1), 1, 0, as_of, *chain(plain[:3]), [0.9] * 3, drafter=int(GrowthSource.MODEL)))
    loop.grow(Growth.of_session((7, 1), 1, 1, as_of, *chain(plain[:2]), [0.8] * 2, drafter=int(GrowthSource.NGRAM)))
    result = turn(loop)
    assert (result.selected, list(result.selected_by_kind)) == (3, [3, 2, 0])
    assert list(result.drafters) == [6, 6, 2]
    # Nothing is left: a round without nodes.
    result = turn(loop)
    assert (result.selected, list(result.selected_by_kind)) == (0, [0, 0, 0])


@pytest.mark.parametrize(
    ("grown", "end"),
    [
        ((0, 0, 0), TreeEnd.COVERED),
        ((0, 0), TreeEnd.STARVED),
        ((0, 0, 1), TreeEnd.MISSED),
        ((1,), TreeEnd.MISSED),
        ((), TreeEnd.STARVED),
    ],
)
def test_a_round_tells_where_it_has_left_the_tree(grown, end, loop, plain):
    """Two nodes are verified; a third one that hangs below them says whether growth was ahead."""
    loop.open(replace(open_request(1, SPEC), max_nodes=2))
    tokens = [(plain[place] + wrong) % 40 for place, wrong in enumerate(grown)]
    loop.grow(Growth.of_session((7, 1), 1, 0, len(PROMPT), *chain(tokens), [0.9] * len(tokens)))
    assert turn(loop).tree_end is end
