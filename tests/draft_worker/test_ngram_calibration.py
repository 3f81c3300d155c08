"""What is learned of guesses, by context, count and share, for each rule."""

import random

import numpy as np
import pytest

from outrider.draft_worker.guess_tree import GuessBounds, GuessEnds, GuessForest
from outrider.draft_worker.ngram_calibration import NgramCalibration, rule_number
from outrider.draft_worker.ngram_tree import GuessColumns, TextTails
from outrider.sampling import SamplingSpec, VerificationRule

RULE = np.arange(3)


def columns(contexts: list[int], counts: list[int], shares: list[float]) -> GuessColumns:
    size = len(contexts)
    found = np.array([[size, 1]], np.int32)
    zeros = np.zeros((1, size), np.int32)
    return GuessColumns(zeros, zeros.copy(), np.array([shares]), np.array([counts]), np.array([contexts]), found)


def test_longer_contexts_higher_counts_and_larger_shares_promise_more():
    calibration = NgramCalibration()
    for varied in (
        ([1, 2, 4, 8, 17], [2] * 5, [0.5] * 5),
        ([3] * 5, [1, 2, 4, 9, 50], [0.5] * 5),
        ([3] * 5, [2] * 5, [0.02, 0.1, 0.4, 0.7, 1.0]),
    ):
        estimates = calibration.estimates(calibration.buckets(columns(*varied), RULE[:1]))[0]
        assert (np.diff(estimates) > 0).all(), varied
        assert 0 < estimates[0] < estimates[-1] < 1


def test_every_guess_has_a_bucket_of_its_rule():
    calibration = NgramCalibration()
    extremes = columns([0, 63], [1, 10**6], [1e-6, 1.0])
    of_rules = [calibration.buckets(extremes, RULE[rule : rule + 1])[0].tolist() for rule in (0, 1, 2)]
    assert len({bucket for buckets in of_rules for bucket in buckets}) == 6
    assert max(map(max, of_rules)) < len(calibration.learned)
    assert min(map(min, of_rules)) >= 0


def test_estimates_come_to_what_is_observed():
    calibration, drawn, guess = NgramCalibration(), random.Random(5), columns([3], [2], [0.5])
    guess.parents[:] = -1
    (bucket,) = calibration.buckets(guess, RULE[1:2])[0].tolist()
    other = calibration.learned.copy()
    forest = GuessForest()
    tree = forest.plant(0, GuessBounds(max_depth=1, max_nodes=1, last_position=5000))
    for _ in range(3000):
        # A tree of one guess; another token is committed where it is wrong.
        (estimate,) = calibration.learned[[bucket]]
        ends = GuessEnds.roots([tree.number], TextTails.of([[]], 1))
        forest.graft(ends, guess, np.array([[estimate]]), np.array([[bucket]]), min_value=0.0)
        tree.commit([0 if drawn.random() < 0.9 else 1], calibration)
        assert tree.size == 0
    assert abs(calibration.learned[bucket] - 0.9) < 0.05
    other[bucket] = calibration.learned[bucket]
    assert (calibration.learned == other).all()
    (found,) = calibration.reliability()
    assert (found.rule, sum(found.children)) == ("coupled", 3000)
    assert abs(sum(found.predicted) - sum(found.hits)) < 150


def test_rules():
    assert rule_number(SamplingSpec(temperature=0.0, verification=VerificationRule.TARGET_ONLY)) == 0
    assert rule_number(SamplingSpec(temperature=0.7)) == 1
    assert rule_number(SamplingSpec(temperature=0.7, verification=VerificationRule.TARGET_ONLY)) == 2


@pytest.mark.parametrize("values", [{"prior_strength": 0.0}, {"decay": 0.0}, {"decay": 1.5}])
def test_values_out_of_range(values: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(values))):
        NgramCalibration(**values)
