"""Whose prompt a round computes, and how far ahead of their tokens sessions have slots."""

import numpy as np
import pytest

from outrider.engine.kv_slots import SlotTable
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.admission import chunks, length_ahead, saves
from outrider.target_worker.rounds.kv import RowKv
from outrider.target_worker.rounds.session import Session
from outrider.target_worker.rounds.step_cost import PrefillAllowance


def waiting(order: int, *, length: int) -> Session:
    """A session of which no token has KV yet; a prompt of n + 1 tokens has n to compute."""
    return Session(
        key=(1, order), epoch=1, order=order, history=np.arange(length + 2, dtype=np.int32), length=length + 1,
        prompt_len=length + 1, sampling=SamplingSpec(), limit=length + 2, allow=1 << 30, row=order, is_open=True,
    )  # fmt: skip


def planned(sessions: list[Session], *, most: int, most_chunks: int = 16) -> dict[int, int]:
    """The tokens that each session gets computed, by its order."""
    found = chunks(sessions, PrefillAllowance(most=most), most_chunks=most_chunks)
    return {session.order: size for session, size in found}


def test_the_oldest_is_computed_first():
    assert planned([waiting(2, length=50), waiting(1, length=50)], most=60) == {1: 50, 2: 10}
    assert planned([waiting(2, length=100), waiting(1, length=100)], most=60) == {1: 60}


def test_a_short_prompt_overtakes_a_long_one_and_leaves_it_a_share():
    given = planned([waiting(1, length=500), *(waiting(order, length=10) for order in range(2, 20))], most=80)
    assert given[1] > 0, "short ones must not keep a long one from moving"
    assert all(size == 10 for order, size in given.items() if order != 1)
    assert sum(given.values()) <= 80
    assert len(given) > 4


def test_a_round_has_so_many_chunks_and_no_more():
    sessions = [waiting(order, length=4) for order in range(10)]
    assert planned(sessions, most=100, most_chunks=3) == {0: 4, 1: 4, 2: 4}
    assert planned(sessions, most=0) == {}


@pytest.mark.parametrize(
    ("missing", "shared", "waits"),
    [(100, 100, True), (100, 25, True), (100, 20, False), (15, 15, False), (16, 16, True)],
)
def test_a_session_waits_for_another_that_computes_a_good_part_of_it(missing, shared, waits):
    known = 7
    tokens = np.arange(known + missing, dtype=np.int32)
    leader = tokens.copy()
    leader[known + shared :] = -1
    assert saves(leader, tokens, known) == waits


def test_free_slots_are_handed_out_ahead_in_equal_parts():
    table = SlotTable(num_slots=400, max_rows=4, max_row_len=300)
    kv = RowKv(table, remembers=False)
    sessions = [waiting(row, length=9) for row in range(2)]
    for session in sessions:
        assert kv.extend(session.row, session.length)
    assert length_ahead(kv, sessions, rows=16) == 16
    # A quarter of what is free, shared by two.
    assert length_ahead(kv, sessions, rows=300) == (400 - 20) // 8
    assert kv.extend(sessions[0].row, 300)
    assert length_ahead(kv, sessions, rows=300) == (400 - 20) // 8, "slots ahead of tokens are shared as well"
    assert length_ahead(RowKv(SlotTable(num_slots=3, max_rows=1, max_row_len=3), remembers=False), [], rows=9) == 1
