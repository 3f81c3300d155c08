"""What of a successor is verified, against a reference that follows tokens in plain trees."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import succession_kernels
from outrider.compiled import IS_COMPILED
from outrider.succession import (
    NOTHING_EMITTED,
    Addition,
    Succession,
    SurvivingRows,
    Survivors,
    addition_from_proto,
    extended,
    surviving,
    surviving_columns,
    surviving_row_columns,
    surviving_rows,
)
from outrider.v1 import target_pb2
from outrider.wire import floats_to_bytes


@dataclass
class Sent:
    """One session's part of a successor, and what became of it in the step before."""

    is_in_step: bool
    verified: int
    end: int
    token: int
    max_nodes: int
    max_depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[np.float32] = field(default_factory=list)


@st.composite
def sessions(draw: st.DrawFn) -> Sent:
    is_in_step = draw(st.booleans())
    verified = draw(st.integers(0, 4)) if is_in_step else 0
    sent = Sent(
        is_in_step=is_in_step,
        verified=verified,
        end=draw(st.integers(NOTHING_EMITTED, verified)),
        token=draw(st.integers(0, 2)),
        max_nodes=draw(st.integers(0, 8)),
        max_depth=draw(st.integers(0, 4)),
    )
    siblings: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(0, verified + len(sent.tokens)))
        token = draw(st.integers(0, 2))
        if (parent, token) in siblings:
            continue
        siblings.add((parent, token))
        above = sent.values[parent - verified - 1] if parent > verified else np.float32(1.0)
        sent.values.append(above * np.float32(draw(st.sampled_from([0.25, 0.5, 0.7, 1.0]))))
        sent.tokens.append(token)
        sent.parents.append(parent)
    return sent


def reference(sent: Sent, least_value: float) -> tuple[list[int], list[int]]:
    """Places of the verified nodes among those sent, and their parents."""
    count, first = len(sent.tokens), sent.verified + 1
    if not sent.is_in_step:
        return list(range(count)), sent.parents
    depth_of: dict[int, int] = {}
    root = None
    for place in range(count):
        if root is None and sent.parents[place] == sent.end and sent.tokens[place] == sent.token:
            root, depth_of[place] = place, 0
        elif sent.parents[place] >= first and sent.parents[place] - first in depth_of:
            depth_of[place] = depth_of[sent.parents[place] - first] + 1
    if root is None:
        return [], []
    floor = sent.values[root] * np.float32(least_value)
    chosen = [place for place, depth in depth_of.items() if 0 < depth <= sent.max_depth and sent.values[place] >= floor]
    chosen = sorted(chosen, key=lambda place: (-sent.values[place], place))[: sent.max_nodes]
    numbers = {place: number for number, place in enumerate(chosen, start=1)} | {root: 0}
    return chosen, [numbers[sent.parents[place] - first] for place in chosen]


def best_of_all(
    parts: list[Sent], found: list[tuple[list[int], list[int]]], most: int
) -> list[tuple[list[int], list[int]]]:
    """The same of at most so many nodes together: those of sessions that are in the step, best first."""
    shares = []
    for number, (sent, (nodes, _)) in enumerate(zip(parts, found, strict=True)):
        if sent.is_in_step and nodes:
            root = next(
                place
                for place in range(len(sent.tokens))
                if sent.parents[place] == sent.end and sent.tokens[place] == sent.token
            )
            shares += [(-(sent.values[node] / sent.values[root]), number, rank) for rank, node in enumerate(nodes)]
    kept = {(number, rank) for _, number, rank in sorted(shares)[:most]}
    left = []
    for number, (sent, (nodes, parents)) in enumerate(zip(parts, found, strict=True)):
        ranks = [rank for rank in range(len(nodes)) if not sent.is_in_step or (number, rank) in kept]
        left.append(([nodes[rank] for rank in ranks], [parents[rank] for rank in ranks]))
    return left


def together(parts: list[Sent], least_value: float, max_total_nodes: int = 1000) -> Succession:
    return Succession(
        is_in_step=np.array([sent.is_in_step for sent in parts], dtype=np.bool_),
        verified=np.array([sent.verified for sent in parts], dtype=np.int64),
        counts=np.array([len(sent.tokens) for sent in parts], dtype=np.int64),
        tokens=np.array([token for sent in parts for token in sent.tokens], dtype=np.int64),
        parents=np.array([parent for sent in parts for parent in sent.parents], dtype=np.int64),
        values=np.array([value for sent in parts for value in sent.values], dtype=np.float32),
        least_value=least_value,
        max_nodes=np.array([sent.max_nodes for sent in parts], dtype=np.int64),
        max_depths=np.array([sent.max_depth for sent in parts], dtype=np.int64),
        max_total_nodes=max_total_nodes,
    )


@pytest.mark.parametrize("find", [surviving, surviving_columns], ids=["one loop", "columns"])
@settings(deadline=None)
@given(
    parts=st.lists(sessions(), max_size=5),
    least_value=st.sampled_from([0.0, 0.1, 0.4, 0.7, 1.0]),
    most=st.integers(0, 12),
)
def test_what_survives_is_what_hangs_below_the_emitted_tokens(
    find: Callable[..., Survivors], parts: list[Sent], least_value: float, most: int
) -> None:
    found = find(
        together(parts, least_value, most),
        np.array([sent.end for sent in parts], dtype=np.int64),
        np.array([sent.token for sent in parts], dtype=np.int64),
    )
    expected = best_of_all(parts, [reference(sent, least_value) for sent in parts], most)
    assert found.counts.tolist() == [len(nodes) for nodes, _ in expected]
    starts = np.cumsum([0, *(len(sent.tokens) for sent in parts)]).tolist()
    assert found.nodes.tolist() == [
        start + node for start, (nodes, _) in zip(starts, expected, strict=False) for node in nodes
    ]
    assert found.parents.tolist() == [parent for _, parents in expected for parent in parents]


@pytest.mark.parametrize("find", [surviving_rows, surviving_row_columns], ids=["one loop", "columns"])
@settings(deadline=None)
@given(
    parts=st.lists(sessions(), max_size=5),
    least_value=st.sampled_from([0.0, 0.1, 0.4, 0.7, 1.0]),
    most=st.integers(0, 12),
    ended=st.sets(st.integers(0, 4)),
)
def test_the_rows_of_a_step_are_roots_and_what_survives(
    find: Callable[..., SurvivingRows], parts: list[Sent], least_value: float, most: int, ended: set[int]
) -> None:
    is_asked = [place not in ended or not sent.is_in_step for place, sent in enumerate(parts)]
    for sent, is_so in zip(parts, is_asked, strict=True):
        sent.end = sent.end if is_so else NOTHING_EMITTED
    found = find(
        together(parts, least_value, most),
        np.array([sent.end for sent in parts], dtype=np.int64),
        np.array([sent.token for sent in parts], dtype=np.int64),
        np.array(is_asked, dtype=np.bool_),
    )
    trees = best_of_all(parts, [reference(sent, least_value) for sent in parts], most)
    expected = [(sent, *tree) for sent, tree, is_so in zip(parts, trees, is_asked, strict=True) if is_so]
    assert found.counts.tolist() == [1 + len(nodes) for _, nodes, _ in expected]
    assert found.tokens.tolist() == [
        token for sent, nodes, _ in expected for token in (0, *(sent.tokens[n] for n in nodes))
    ]
    assert found.parents.tolist() == [parent for _, _, parents in expected for parent in (0, *parents)]


def cut(parts: list[Sent], additions: int, dice: random.Random) -> list[list[Sent]]:
    """[1 + additions][S] the same nodes, each session's in so many pieces, which may be empty."""
    pieces = []
    for sent in parts:
        inner = sorted(dice.randint(0, len(sent.tokens)) for _ in range(additions))
        bounds = [0, *inner, len(sent.tokens)]
        pieces.append([slice(first, end) for first, end in pairwise(bounds)])
    return [
        [
            Sent(
                sent.is_in_step,
                sent.verified,
                sent.end,
                sent.token,
                sent.max_nodes,
                sent.max_depth,
                tokens=sent.tokens[own[turn]],
                parents=sent.parents[own[turn]],
                values=sent.values[own[turn]],
            )
            for sent, own in zip(parts, pieces, strict=True)
        ]
        for turn in range(1 + additions)
    ]


def addition(parts: list[Sent]) -> Addition:
    sent = together(parts, 0.0)
    return Addition(sent.counts, sent.tokens, sent.parents, sent.values)


def assert_same(one: Succession, other: Succession) -> None:
    for name in (each.name for each in fields(Succession)):
        mine, others = getattr(one, name), getattr(other, name)
        assert np.array_equal(mine, others), name
        assert getattr(mine, "dtype", None) == getattr(others, "dtype", None), name


@settings(deadline=None)
@given(parts=st.lists(sessions(), max_size=5), count=st.integers(0, 4), seed=st.integers(0, 1000))
def test_what_is_added_is_as_if_it_had_been_sent_at_once(parts: list[Sent], count: int, seed: int) -> None:
    pieces = cut(parts, count, random.Random(seed))
    first, more = together(pieces[0], 0.4, 5), [addition(piece) for piece in pieces[1:]]
    grown, order = extended(first, more)
    assert_same(grown, together(parts, 0.4, 5))
    # By brute force: places in columns that stand one behind the other, taken session by session.
    number, of_sessions = 0, [[] for _ in parts]
    for piece in pieces:
        for own, sent in zip(of_sessions, piece, strict=True):
            own.extend(range(number, number + len(sent.tokens)))
            number += len(sent.tokens)
    assert order.tolist() == [place for own in of_sessions for place in own]
    one_by_one = first
    for each in more:
        one_by_one, _ = extended(one_by_one, [each])
    assert_same(one_by_one, grown)


@settings(deadline=None)
@given(
    parts=st.lists(sessions(), max_size=5),
    least_value=st.sampled_from([0.0, 0.4, 1.0]),
    most=st.integers(0, 12),
    count=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_of_what_was_added_the_same_survives(
    parts: list[Sent], least_value: float, most: int, count: int, seed: int
) -> None:
    """By both ways, and as it comes off the wire."""
    ends = np.array([sent.end for sent in parts], dtype=np.int64)
    tokens = np.array([sent.token for sent in parts], dtype=np.int64)
    whole = surviving_columns(together(parts, least_value, most), ends, tokens)
    pieces = cut(parts, count, random.Random(seed))
    travelled = []
    for piece in map(addition, pieces[1:]):
        message = target_pb2.TreeAddition(
            node_counts=piece.counts.tolist(),
            tokens=piece.tokens.tolist(),
            parents=piece.parents.tolist(),
            values=floats_to_bytes(piece.values),
        )
        travelled.append(addition_from_proto(message))
    grown, _ = extended(together(pieces[0], least_value, most), travelled)
    for find in (surviving, surviving_columns):
        for mine, others in zip(find(grown, ends, tokens), whole, strict=True):
            assert mine.tolist() == others.tolist()


def test_a_miss_leaves_a_plain_step() -> None:
    sent = Sent(True, 2, 1, 2, 8, 8, tokens=[1, 0], parents=[1, 3], values=[np.float32(0.5), np.float32(0.25)])
    found = surviving(together([sent], 0.0), np.array([1]), np.array([2]))
    assert found.counts.tolist() == [0]
    assert not len(found.nodes)


@pytest.mark.parametrize("find", [surviving, surviving_columns], ids=["one loop", "columns"])
def test_a_negative_zero_is_a_zero(find: Callable[..., Survivors]) -> None:
    """Whoever sends it: both ends must number the same nodes, by whatever they find them."""
    values = [np.float32(value) for value in (1.0, 0.0, -0.0, 0.5, -0.0, 0.0)]
    sent = Sent(True, 0, 0, 9, 8, 8, tokens=[9, 1, 2, 3, 4, 5], parents=[0, 1, 1, 1, 1, 1], values=values)
    found = find(together([sent], 0.0), np.array([0]), np.array([9]))
    assert found.nodes.tolist() == [3, 1, 2, 4, 5]


@pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled without numba")
def test_no_step_waits_for_the_compiler() -> None:
    succession_kernels.warm_up()
    kernel: Any = succession_kernels.surviving_rows
    before = list(kernel.signatures)
    sent = Sent(True, 2, 1, 1, 8, 8, tokens=[1, 0], parents=[1, 3], values=[np.float32(0.5), np.float32(0.25)])
    outcome = np.array([1]), np.array([1]), np.array([True])
    surviving_rows(together([sent], 0.0), *outcome)
    more = Addition(np.array([1]), np.array([1]), np.array([4]), np.array([0.25], dtype=np.float32))
    surviving_rows(extended(together([sent], 0.0), [more])[0], *outcome)
    # Other tests have compiled what steps need: one signature says that the warm-up's is the same.
    assert kernel.signatures == before
    assert len(before) == 1
