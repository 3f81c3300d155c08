"""Which bucket a round takes: the one with the most expected tokens in its time."""

import numpy as np
import pytest

from outrider.kernels.pool.select import GAIN_SCALE
from outrider.target_worker.rounds.buckets import MAX_CHUNKS, Bucket, RoundTimes, round_buckets
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.step_cost import StepCost, StepShape

CONFIG = RoundConfig(max_sessions=64, max_model_len=1000, max_step_rows=512, max_session_rows=64)
BUCKETS = round_buckets(CONFIG, on_gpu=True)


def times_of(captured_ns: list[float]) -> RoundTimes:
    return RoundTimes(BUCKETS, StepCost(slowdown=0.3, prior_rows=256), captured_ns)


def gains_of(*, sessions: int, worth: float) -> np.ndarray:
    """What `select` reports where every node that finds room is worth so much."""
    room = [min(bucket.rows, sessions * bucket.most) - sessions for bucket in BUCKETS]
    fits = [bucket.sessions >= sessions and bucket.rows >= sessions for bucket in BUCKETS]
    return np.array([round(worth * nodes * GAIN_SCALE) if ok else -1 for nodes, ok in zip(room, fits, strict=True)])


def test_a_gpu_has_buckets_for_few_and_many_rows_and_a_cpu_one_bound():
    assert all(bucket.most <= min(bucket.rows, CONFIG.max_session_rows) for bucket in BUCKETS)
    for sessions in (1, 3, 64):
        assert any(bucket.sessions >= sessions and not bucket.prefill for bucket in BUCKETS)
    assert max(bucket.prefill for bucket in BUCKETS) == CONFIG.max_prefill_tokens
    assert round_buckets(CONFIG, on_gpu=False) == [Bucket(rows=512, sessions=64 + MAX_CHUNKS, most=64, prefill=2048)]


@pytest.mark.parametrize("most_sessions", [1, 4, 64, 100, 256])
def test_any_number_of_sessions_fits_without_many_rows_of_padding_and_all_have_the_widest_bucket(most_sessions: int):
    config = RoundConfig(max_sessions=most_sessions, max_model_len=1000, max_step_rows=512, max_session_rows=64)
    plain = [bucket for bucket in round_buckets(config, on_gpu=True) if not bucket.prefill]
    for sessions in range(1, most_sessions + 1):
        fitting = [bucket for bucket in plain if min(bucket.sessions, bucket.rows) >= sessions]
        assert min(bucket.rows for bucket in fitting) <= max(32, 4 * sessions)
    widest = max(plain, key=lambda bucket: (bucket.sessions, bucket.rows))
    assert (widest.sessions, widest.rows) == (most_sessions, 512 if most_sessions > 1 else 64)


@pytest.mark.parametrize(("worth", "is_wide"), [(0.5, True), (0.001, False)])
def test_nodes_that_pay_widen_the_round_and_others_do_not(worth, is_wide):
    # Where weights are read anyway, more rows cost little.
    times = times_of([1e6 + 2e3 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    chosen = BUCKETS[times.choose(gains_of(sessions=1, worth=worth), sessions=1, prefill=0)]
    assert (chosen.rows > 8) == is_wide


def test_where_every_row_costs_nodes_have_to_be_likely():
    times = times_of([1e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    for worth, rows in ((0.2, 64), (1.1, 512)):
        chosen = BUCKETS[times.choose(gains_of(sessions=64, worth=worth), sessions=64, prefill=0)]
        assert chosen.rows == rows


def test_prefill_takes_a_bucket_with_room_for_it():
    times = times_of([1e6] * len(BUCKETS))
    chosen = BUCKETS[times.choose(gains_of(sessions=3, worth=0.1), sessions=3, prefill=300)]
    assert chosen.prefill >= 300
    widest = BUCKETS[times.widest(prefill=0)]
    assert (widest.rows, widest.prefill) == (512, 0)


def test_nodes_that_are_never_accepted_stop_widening_rounds():
    times = times_of([1e6 + 2e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    gains = gains_of(sessions=1, worth=0.5)
    before = BUCKETS[times.choose(gains, sessions=1, prefill=0)].rows
    for _ in range(400):
        times.note_accepted(0, 10.0)
    assert BUCKETS[times.choose(gains, sessions=1, prefill=0)].rows == 8 < before


def test_nodes_of_which_none_was_accepted_are_tried_again():
    times = times_of([1e6 + 2e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    gains = gains_of(sessions=1, worth=0.5)
    for _ in range(400):
        times.note_accepted(0, 10.0)
    for _ in range(4096):
        times.note_accepted(0, 0.0)
    assert BUCKETS[times.choose(gains, sessions=1, prefill=0)].rows > 8


def test_on_a_cpu_a_node_pays_if_its_value_covers_its_row():
    (bucket,) = round_buckets(CONFIG, on_gpu=False)
    times = RoundTimes([bucket], StepCost(slowdown=0.3, prior_rows=32))
    assert times.least_value == 0, "nothing is known yet"
    for rows in (1, 9, 17) * 200:
        times.note(0, StepShape(verify_rows=rows), 10_000 + 1_000 * rows, tokens=2)
    # Two tokens in about 19 microseconds, of which a row takes one.
    assert times.least_value == pytest.approx(2 / 19, rel=0.3)
