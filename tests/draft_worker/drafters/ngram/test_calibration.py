"""Estimates of proposals by context, count and share, for each rule."""

import random

import numpy as np

from outrider.draft_worker.drafters.ngram.calibration import NgramCalibration, rule_number
from outrider.draft_worker.drafters.ngram.proposals import Proposals
from outrider.sampling import SamplingSpec, VerificationRule

RULE = np.arange(3)


def proposals(contexts: list[int], counts: list[int], shares: list[float]) -> Proposals:
    size = len(contexts)
    zeros, found = np.zeros((1, size), np.int32), np.array([[size, 1]], np.int32)
    return Proposals(
        zeros, zeros - 1, np.array([shares]), np.array([counts], np.int32), np.array([contexts], np.int32), found
    )


def test_longer_contexts_higher_counts_and_larger_shares_promise_more():
    calibration = NgramCalibration()
    for varied in (
        ([1, 2, 4, 8, 17], [2] * 5, [0.5] * 5),
        ([3] * 5, [1, 2, 4, 9, 50], [0.5] * 5),
        ([3] * 5, [2] * 5, [0.02, 0.1, 0.4, 0.7, 1.0]),
    ):
        estimates = calibration.estimate(proposals(*varied), RULE[:1])[1][0]
        assert (np.diff(estimates) > 0).all(), varied
        assert 0 < estimates[0] < estimates[-1] < 1


def test_every_proposal_has_a_bucket_of_its_rule():
    calibration = NgramCalibration()
    extremes = proposals([0, 63], [1, 10**6], [1e-6, 1.0])
    by_rule = [calibration.estimate(extremes, RULE[rule : rule + 1])[0][0].tolist() for rule in (0, 1, 2)]
    assert len({bucket for buckets in by_rule for bucket in buckets}) == 6
    assert max(map(max, by_rule)) < len(calibration.learned)
    assert min(map(min, by_rule)) >= 0


def test_estimates_come_to_what_is_observed():
    calibration, drawn = NgramCalibration(), random.Random(5)
    before = calibration.learned.copy()
    for _ in range(3000):
        buckets, estimates = calibration.estimate(proposals([3], [2], [0.5]), RULE[1:2])
        # A pool of one row whose root has one child, token 7; another token is committed where it is wrong.
        count, parent, token = np.ones(1, np.int32), np.full((1, 1), -1, np.int32), np.full((1, 1), 7, np.int32)
        committed = np.array([[7 if drawn.random() < 0.9 else 8]], np.int32)
        entries = count, parent, token, estimates.astype(np.float32)
        calibration.observe(entries, buckets, committed, np.ones(1, np.int32))
    (bucket,) = buckets[0]
    assert abs(calibration.learned[bucket] - 0.9) < 0.05
    before[bucket] = calibration.learned[bucket]
    assert (calibration.learned == before).all()
    (found,) = calibration.reliability()
    assert (found.rule, sum(found.children)) == ("coupled", 3000)
    assert abs(sum(found.predicted) - sum(found.hits)) < 150


def test_rules():
    assert rule_number(SamplingSpec(temperature=0.0, verification=VerificationRule.TARGET_ONLY)) == 0
    assert rule_number(SamplingSpec(temperature=0.7)) == 1
    assert rule_number(SamplingSpec(temperature=0.7, verification=VerificationRule.TARGET_ONLY)) == 2
