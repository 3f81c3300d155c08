"""Shapes of rounds: which there are."""

import pytest

from outrider.target_worker.rounds.buckets import MAX_CHUNKS, Bucket, round_buckets
from outrider.target_worker.rounds.config import RoundConfig

CONFIG = RoundConfig(max_sessions=64, max_model_len=1000, max_step_rows=512, max_session_rows=64)
BUCKETS = round_buckets(CONFIG, on_gpu=True)


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


@pytest.mark.parametrize(("most", "widest"), [(4, 8), (20, 32), (64, 64), (100, 128)])
def test_one_session_has_room_for_all_its_rows(most: int, widest: int):
    config = RoundConfig(max_sessions=1, max_model_len=1000, max_step_rows=512, max_session_rows=most)
    plain = [bucket for bucket in round_buckets(config, on_gpu=True) if not bucket.prefill]
    assert max(bucket.rows for bucket in plain) == widest


@pytest.mark.parametrize(
    ("rows", "sessions", "most"), [(384, 64, 64), (1024, 1024, 64), (96, 96, 64), (512, 16, 20), (512, 1, 64)]
)
def test_beside_prompts_all_sessions_and_all_their_rows_have_room(rows: int, sessions: int, most: int):
    config = RoundConfig(max_sessions=sessions, max_model_len=1000, max_step_rows=rows, max_session_rows=most)
    beside = [bucket for bucket in round_buckets(config, on_gpu=True) if bucket.prefill]
    assert max(bucket.rows for bucket in beside) >= min(rows, sessions * most)
    assert max(min(bucket.rows, bucket.sessions) for bucket in beside) >= sessions
