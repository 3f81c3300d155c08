from collections.abc import Sequence

import numpy as np
import pytest

from outrider.draft_worker.service import pack_calibrations
from outrider.drafting.acceptance_calibration import RELIABILITY_EDGES, AcceptanceCalibration
from outrider.drafting.growth_source import GrowthSource
from outrider.wire import floats_from_bytes

GREEDY = np.zeros(1, dtype=np.float32)
COUPLED = np.ones(1, dtype=np.float32)


def noisy_pair(rng: np.random.Generator, rows: int, vocab: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities [rows, vocab] of a draft and of a target that disagrees with it now and then."""
    target = 2.5 * rng.standard_normal((rows, vocab))
    draft = target + 0.8 * rng.standard_normal((rows, vocab))
    normal = [logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) for logits in (draft, target)]
    return normal[0].astype(np.float32), normal[1].astype(np.float32)


def children_of(log_q: np.ndarray, noise: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scores = log_q + noise
    tokens = np.argsort(-scores, axis=1)[:, :count]
    return tokens, np.take_along_axis(log_q, tokens, 1), np.take_along_axis(scores, tokens, 1)


def observe(calibration: AcceptanceCalibration, buckets: Sequence[int] | np.ndarray, hit: int) -> None:
    """Count the children of one parent."""
    calibration.observe_parents(np.array([[hit, len(buckets), *buckets]]))


def area_under_curve(value: np.ndarray, hit: np.ndarray) -> float:
    ranks = np.empty(len(value))
    ranks[np.argsort(value, kind="stable")] = np.arange(1, len(value) + 1)
    hits = int(hit.sum())
    return float((ranks[hit].sum() - hits * (hits + 1) / 2) / (hits * (len(hit) - hits)))


@pytest.mark.parametrize("temperature", [GREEDY, COUPLED])
def test_estimates_of_siblings_never_sum_above_one(temperature: np.ndarray):
    calibration = AcceptanceCalibration(branching=6)
    log_q = np.log(np.full((50, 6), 0.3, dtype=np.float32))
    scores = -np.sort(np.random.default_rng(0).exponential(size=(50, 6)).astype(np.float32), axis=1)
    buckets = calibration.buckets(log_q, scores, np.repeat(temperature, 50))
    for _ in range(20):
        observe(calibration, buckets[0], 0)
        observe(calibration, buckets[0], 3)
    estimates = calibration.estimate(buckets)
    assert estimates.sum(axis=1).max() <= 1 + 1e-6
    assert estimates.min() > 0


def test_estimates_converge_to_the_rates_observed_and_follow_a_change():
    calibration = AcceptanceCalibration(branching=3, decay=0.99)
    log_q = np.log(np.array([[0.7, 0.2, 0.05]], dtype=np.float32))
    buckets = calibration.buckets(log_q, log_q, GREEDY)
    rng = np.random.default_rng(1)
    for rates in ([0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.6, 0.2]):
        for hit in rng.choice([0, 1, 2, -1], size=3000, p=rates):
            observe(calibration, buckets[0], int(hit))
        np.testing.assert_allclose(calibration.estimate(buckets)[0], rates[:3], atol=0.12)


def test_the_prior_alone_answers_where_nothing_is_to_be_learned():
    calibration = AcceptanceCalibration(branching=2)
    log_q = np.log(np.array([[0.6, 0.3], [0.6, 0.3]], dtype=np.float32))
    buckets = calibration.buckets(log_q, log_q, np.repeat(GREEDY, 2))
    before = calibration.estimate(buckets)
    for _ in range(500):
        observe(calibration, buckets[0], -1)
    after = calibration.estimate(buckets, np.array([True, False]))
    assert after[0, 0] < 0.1 * before[0, 0]
    np.testing.assert_array_equal(after[1], before[1])


def test_rules_ranks_and_numbers_have_buckets_of_their_own():
    calibration = AcceptanceCalibration(branching=2)
    log_q = np.log(np.array([[0.6, 0.3], [0.6, 0.3], [0.95, 0.01]], dtype=np.float32))
    scores = np.array([[3.0, 2.9], [3.0, 2.9], [9.0, -np.inf]], dtype=np.float32)
    temperature = np.array([0.0, 1.0, 0.5], dtype=np.float32)
    buckets = calibration.buckets(log_q, scores, temperature)
    assert len(set(buckets.ravel().tolist())) == 6
    # Mixed rows are bucketed as each rule alone would.
    np.testing.assert_array_equal(buckets[:1], calibration.buckets(log_q[:1], scores[:1], temperature[:1]))
    np.testing.assert_array_equal(buckets[1:], calibration.buckets(log_q[1:], scores[1:], temperature[1:]))


@pytest.mark.parametrize("coupled", [False, True])
def test_learned_estimates_match_acceptance_on_a_pair(coupled: bool):
    rng = np.random.default_rng(2)
    calibration = AcceptanceCalibration(branching=4, decay=0.9999)
    temperature = COUPLED if coupled else GREEDY

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        log_q, log_p = noisy_pair(rng, rows)
        noise = rng.gumbel(size=log_q.shape).astype(np.float32) * coupled
        tokens, child_log_q, scores = children_of(log_q, noise, 4)
        choice = np.argmax(log_p + noise, axis=1)
        return calibration.buckets(child_log_q, scores, np.repeat(temperature, rows)), tokens == choice[:, None]

    for buckets, hits in zip(*draw(6000), strict=True):
        observe(calibration, buckets, int(hits.argmax()) if hits.any() else -1)
    buckets, hits = draw(6000)
    estimates = calibration.estimate(buckets)
    for low, high in ((0.0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.01)):
        inside = (estimates >= low) & (estimates < high)
        if inside.sum() > 300:
            assert estimates[inside].mean() == pytest.approx(hits[inside].mean(), abs=0.05), (low, high)
    assert area_under_curve(estimates.ravel(), hits.ravel()) > 0.85


def test_under_coupled_noise_the_gap_tells_more_than_the_probability():
    rng = np.random.default_rng(3)
    calibration = AcceptanceCalibration(branching=2)
    log_q, log_p = noisy_pair(rng, 8000)
    noise = rng.gumbel(size=log_q.shape).astype(np.float32)
    tokens, child_log_q, scores = children_of(log_q, noise, 2)
    best_hit = tokens[:, 0] == np.argmax(log_p + noise, axis=1)
    by_gap = calibration.estimate(calibration.buckets(child_log_q, scores, np.repeat(COUPLED, 8000)))[:, 0]
    by_probability = child_log_q[:, 0]
    assert area_under_curve(by_gap, best_hit) > area_under_curve(by_probability, best_hit) + 0.1


def test_reliability_holds_the_estimate_before_each_outcome_against_it():
    calibration = AcceptanceCalibration(branching=2, prior_strength=10.0, decay=1.0)
    log_q = np.log(np.array([[0.6, 0.3]], dtype=np.float32))
    buckets = calibration.buckets(log_q, log_q, GREEDY)
    assert calibration.reliability() == []
    predicted, hits = [], [0, -1, 1, 0, 0, -1]
    for hit in hits:
        predicted.append(calibration.estimate(buckets)[0])
        observe(calibration, buckets[0], hit)
    (greedy,) = calibration.reliability()
    assert greedy.rule == "greedy"
    assert (sum(greedy.children), sum(greedy.hits)) == (12, 4)
    assert sum(greedy.predicted) == pytest.approx(float(np.sum(predicted)), rel=1e-5)
    for place, (children, total, came_true) in enumerate(
        zip(greedy.children, greedy.predicted, greedy.hits, strict=True)
    ):
        low, high = (0.0, *RELIABILITY_EDGES)[place], (*RELIABILITY_EDGES, 1.0)[place]
        inside = [(value, rank == hit) for row, hit in zip(predicted, hits, strict=True)
                  for rank, value in enumerate(row) if low < value <= high]  # fmt: skip
        assert (children, came_true) == (len(inside), sum(was_hit for _, was_hit in inside))
        assert total == pytest.approx(sum(value for value, _ in inside), rel=1e-5)


def test_the_report_has_a_rule_for_each_that_was_observed():
    calibration = AcceptanceCalibration(branching=2)
    log_q = np.log(np.array([[0.6, 0.3]], dtype=np.float32))
    observe(calibration, calibration.buckets(log_q, log_q + 2, COUPLED)[0], 1)
    observe(calibration, calibration.independent_buckets(log_q)[0], -1)
    report = pack_calibrations({GrowthSource.MODEL: calibration})
    assert [rule.rule for rule in report.rules] == ["coupled", "target_only"]
    assert [sum(rule.hits) for rule in report.rules] == [1, 0]
    # Its own probability is the prior there.
    of_bins = floats_from_bytes(report.rules[1].predicted)
    assert sorted(of_bins[of_bins > 0].tolist()) == pytest.approx([0.3, 0.6], abs=0.07)
    assert floats_from_bytes(report.edges).tolist() == pytest.approx(list(RELIABILITY_EDGES))


def test_parents_are_observed_together_as_one_by_one():
    chance = np.random.default_rng(4)
    together, one_by_one = (AcceptanceCalibration(branching=4, decay=0.9) for _ in range(2))
    for _ in range(50):
        seen = np.full((5, 6), -7)
        seen[:, 0], seen[:, 1] = chance.integers(-1, 3, 5), chance.integers(0, 5, 5)
        # Small ones, so that parents share some.
        seen[:, 2:] = chance.integers(0, 3, (5, 4)) * 40
        together.observe_parents(seen)
        for hit, count, *buckets in seen.tolist():
            observe(one_by_one, buckets[:count], hit)
    np.testing.assert_array_equal(together.learned, one_by_one.learned)
    assert len(one_by_one.reliability()) > 1
    assert together.reliability() == one_by_one.reliability()
