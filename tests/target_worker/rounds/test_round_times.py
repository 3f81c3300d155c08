"""The bucket that a round takes, beside prompts and without: the one with the most expected tokens in its time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.kernels.pool.select import GAIN_SCALE
from outrider.target_worker.rounds.buckets import Bucket, round_buckets
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.round_times import CapturedTimes, Demand, LearnedTimes, RoundTimes
from outrider.target_worker.rounds.step_cost import PrefillAllowance, StepCost, StepShape, prefill_pairs

CONFIG = RoundConfig(max_sessions=64, max_model_len=1000, max_step_rows=512, max_session_rows=64)
BUCKETS = round_buckets(CONFIG, on_gpu=True)


def times_of(captured_ns: list[float]) -> RoundTimes:
    return CapturedTimes(BUCKETS, captured_ns, slowdown=0.3)


def gains_of(*, sessions: int, worth: float) -> np.ndarray:
    """The gains that `select` reports where every node that finds room is worth so much."""
    room = [min(bucket.rows, sessions * bucket.most) - sessions for bucket in BUCKETS]
    fits = [bucket.sessions >= sessions and bucket.rows >= sessions for bucket in BUCKETS]
    return np.array([round(worth * nodes * GAIN_SCALE) if ok else -1 for nodes, ok in zip(room, fits, strict=True)])


def choose(times: RoundTimes, *, sessions: int, worth: float, **more: Any) -> tuple[Bucket, PrefillAllowance]:
    number, allowance = times.plan(gains_of(sessions=sessions, worth=worth), Demand(sessions=sessions, **more))
    return BUCKETS[number], allowance


@pytest.mark.parametrize(("worth", "is_wide"), [(0.5, True), (0.001, False)])
def test_nodes_that_pay_widen_the_round_and_others_do_not(worth, is_wide):
    # Where weights are read anyway, more rows cost little.
    times = times_of([1e6 + 2e3 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    chosen, _ = choose(times, sessions=1, worth=worth)
    assert (chosen.rows > 8) == is_wide


def test_where_every_row_costs_nodes_have_to_be_likely():
    times = times_of([1e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    for worth, rows in ((0.2, 64), (1.1, 512)):
        chosen, _ = choose(times, sessions=64, worth=worth)
        assert chosen.rows == rows


def test_all_nodes_are_wanted_where_trees_have_a_fixed_shape():
    times = times_of([1e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    for missing in (0, 100):
        chosen, _ = choose(times, sessions=1, worth=0.1, missing=missing, takes_all_nodes=True)
        assert (chosen.rows, bool(chosen.prefill)) == (512, bool(missing))


def test_behind_growth_steps_the_best_bucket_counts_and_no_more_nodes_than_it_holds():
    times = times_of([1e6 + 2e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    gained, drafted_ns = np.array([0.0, 40.0, 1000.0]), np.array([0.0, 5e5, 1e6])
    rates = times.drafted_rates(Demand(sessions=64), gained, 0.5, drafted_ns)
    fitting = [bucket for bucket in BUCKETS if not bucket.prefill and min(bucket.rows, bucket.sessions) >= 64]
    for rate, most, own_ns in zip(rates, gained, drafted_ns, strict=True):
        wanted = [(64 + min(most, 0.5 * (bucket.rows - 64))) / (1e6 + 2e4 * bucket.rows + own_ns) for bucket in fitting]
        assert rate == pytest.approx(max(wanted))


def test_without_graphs_growth_steps_wait_until_a_round_is_known_and_nodes_cost_their_rows():
    times = LearnedTimes(BUCKETS[-1], StepCost(slowdown=0.3, prior_rows=32))
    demand, gained, drafted_ns = Demand(sessions=4, keys=400), np.array([0.0, 3.0]), np.array([0.0, 1e6])
    assert not times.drafted_rates(demand, gained, 0.5, drafted_ns).any()
    for rows in (4, 12, 8, 4, 16, 6) * 4:
        times.note(0, StepShape(verify_rows=rows, keys=400), int(4e6 + 1e5 * rows), tokens=4)
    plain, drafted = times.drafted_rates(demand, gained, 0.5, drafted_ns)
    assert plain == pytest.approx(4 / 4.4e6, rel=0.02)
    # Two nodes for each that is accepted.
    assert drafted == pytest.approx(7 / (4.4e6 + 6 * 1e5 + 1e6), rel=0.02)


def test_nodes_that_are_never_accepted_stop_widening_rounds():
    times = times_of([1e6 + 2e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    before, _ = choose(times, sessions=1, worth=0.5)
    for _ in range(400):
        times.note_accepted(0, 10.0)
    after, _ = choose(times, sessions=1, worth=0.5)
    assert after.rows == 8 < before.rows


def test_nodes_of_which_none_was_accepted_are_tried_again():
    times = times_of([1e6 + 2e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    for _ in range(400):
        times.note_accepted(0, 10.0)
    for _ in range(4096):
        times.note_accepted(0, 0.0)
    chosen, _ = choose(times, sessions=1, worth=0.5)
    assert chosen.rows > 8


def gpu_ns(bucket: Bucket) -> float:
    """Rows that hide behind the weights' 5.7 ms, others that cost 27 us each: an H100 with 8 billion parameters."""
    rows = bucket.rows + bucket.prefill
    return 1e6 * (5.7 + 0.002 * rows + 0.025 * max(0, rows - 192))


PAIR_NS, BEYOND_NS = 1.3, 0.4e6


def tokens_of(bucket: Bucket, *, sessions: int, worth: float) -> float:
    """Tokens that a round is expected to commit."""
    return sessions + max(gains_of(sessions=sessions, worth=worth)[BUCKETS.index(bucket)], 0) / GAIN_SCALE


def prefill(times: RoundTimes, *, sessions: int, worth: float, prompt: int) -> tuple[int, float, float]:
    """Rounds that a prompt takes, milliseconds of them in which others get nothing, and the longest in usual rounds."""
    plain, _ = choose(times, sessions=sessions, worth=worth)
    plain_ns, took_ns, done = gpu_ns(plain) + BEYOND_NS, [], 0
    tokens_per_ns = tokens_of(plain, sessions=sessions, worth=worth) / plain_ns or 1.0
    lost_ns = 0.0
    while done < prompt:
        bucket, allowance = choose(times, sessions=sessions, worth=worth, missing=prompt - done, context=done)
        size = min(allowance.rows(done), prompt - done)
        assert 0 < size <= bucket.prefill
        pairs = prefill_pairs(size, done)
        took_ns.append(gpu_ns(bucket) + BEYOND_NS + PAIR_NS * pairs)
        lost_ns += took_ns[-1] - tokens_of(bucket, sessions=sessions, worth=worth) / tokens_per_ns
        shape = StepShape(verify_rows=sessions, prefill_rows=size, pairs=pairs)
        times.note(BUCKETS.index(bucket), shape, int(took_ns[-1]), tokens=sessions)
        done += size
    return len(took_ns), lost_ns / 1e6, max(took_ns) / plain_ns


# A prompt of 4,096 tokens beside nothing: two rounds of 64 + 2,048 rows.
ALONE_MS = 130


@pytest.mark.parametrize(
    ("sessions", "worth"), [(1, 0.0), (32, 0.0), (1, 0.4), (16, 0.6), (32, 0.5), (64, 0.5), (64, 0.9)]
)
def test_a_prompt_costs_the_others_no_more_than_beside_nothing_and_no_round_is_long(sessions, worth):
    times = times_of([gpu_ns(bucket) for bucket in BUCKETS])
    for _ in range(100):
        bucket, _ = choose(times, sessions=sessions, worth=worth)
        shape = StepShape(verify_rows=sessions, keys=1000 * sessions)
        times.note(BUCKETS.index(bucket), shape, int(gpu_ns(bucket) + BEYOND_NS), tokens=sessions)
    for _ in range(3):
        rounds, lost_ms, longest = prefill(times, sessions=sessions, worth=worth, prompt=4096)
        assert rounds <= 64
        assert lost_ms <= ALONE_MS
        assert longest < 1.35


def test_no_session_waits_for_another_round_because_of_a_prompt():
    config = replace(CONFIG, max_sessions=256)
    buckets = round_buckets(config, on_gpu=True)
    times = CapturedTimes(buckets, [gpu_ns(bucket) for bucket in buckets], slowdown=0.3)
    gains = np.array([0 if min(bucket.rows, bucket.sessions) >= 200 else -1 for bucket in buckets])
    number, allowance = times.plan(gains, Demand(sessions=200, missing=4096))
    assert min(buckets[number].rows, buckets[number].sessions) >= 200
    # Those whose prompts end in the round are verified in it.
    number, _ = times.plan(gains, Demand(sessions=60, prompts=10, missing=100))
    assert min(buckets[number].rows, buckets[number].sessions) >= 70
    assert allowance.rows(0) >= 64


def test_a_long_context_slows_a_prompt_down_and_not_the_others():
    times = times_of([gpu_ns(bucket) for bucket in BUCKETS])
    _, _, longest = prefill(times, sessions=8, worth=0.3, prompt=32_768)
    # The least that always moves sees 32 x 32,768 keys in the end.
    assert longest < 1.6


def test_prompts_that_nothing_runs_beside_get_on_as_fast_as_they_can():
    times = times_of([gpu_ns(bucket) for bucket in BUCKETS])
    for prompt, most_ms in ((20, 7), (200, 10), (1000, 34), (4096, ALONE_MS)):
        _, took_ms, _ = prefill(times, sessions=0, worth=0.0, prompt=prompt)
        assert took_ms <= most_ms


def test_a_round_that_no_bucket_with_prompts_keeps_up_with_takes_the_quickest():
    times = times_of([1e4 * (bucket.rows + bucket.prefill) for bucket in BUCKETS])
    bucket, allowance = choose(times, sessions=1, worth=0.0, missing=4096)
    assert (bucket.rows, bucket.prefill) == (64, 64)
    assert allowance.rows(0) == 64


def test_on_a_cpu_a_node_pays_if_its_value_covers_its_row():
    (bucket,) = round_buckets(CONFIG, on_gpu=False)
    times = LearnedTimes(bucket, StepCost(slowdown=0.3, prior_rows=32))
    assert times.least_value == 0, "nothing is known yet"
    for rows in (1, 9, 17) * 200:
        times.note(0, StepShape(verify_rows=rows), 10_000 + 1_000 * rows, tokens=2)
    # Two tokens in about 19 microseconds, of which a row takes one.
    assert times.least_value == pytest.approx(2 / 19, rel=0.3)
