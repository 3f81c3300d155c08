from collections import Counter

import numpy as np
import pytest

from outrider.drafting.draft_distribution import WEIGHT_SUM, DraftDistribution, pack_distributions, unpack_distributions


def distribution(*entries: tuple[int, int]) -> DraftDistribution:
    token_ids, weights = zip(*entries, strict=True)
    return DraftDistribution(np.array(token_ids, dtype=np.uint32), np.array(weights, dtype=np.uint32))


@pytest.mark.parametrize("seed", range(20))
def test_quantised_weights_are_whole_and_sum_to_one_exactly(seed):
    chance = np.random.default_rng(seed)
    mass = np.exp(chance.normal(0, 8, size=chance.integers(1, 65))).astype(np.float32)
    q = DraftDistribution.quantised(np.arange(len(mass)) * 3, mass)
    assert int(q.weights.sum()) == WEIGHT_SUM
    assert q.weights.min() >= 1
    wanted = dict(zip(range(0, 3 * len(mass), 3), mass.astype(np.float64) / mass.sum(dtype=np.float64), strict=True))
    got = dict(zip(q.token_ids.tolist(), (q.weights / WEIGHT_SUM).tolist(), strict=True))
    assert all(abs(got.get(token, 0.0) - share) < 1 / WEIGHT_SUM for token, share in wanted.items())
    assert q.fault(int(q.token_ids[0]), 200) is None


def test_what_rounding_leaves_goes_to_the_largest_remainders():
    mass = np.array([2.25, 0.0, 0.375, WEIGHT_SUM - 3.25, 0.625])
    q = DraftDistribution.quantised([4, 5, 6, 7, 8], mass)
    assert (q.token_ids.tolist(), q.weights.tolist()) == ([4, 7, 8], [2, WEIGHT_SUM - 3, 1])
    assert mass.tolist() == [2.25, 0.0, 0.375, WEIGHT_SUM - 3.25, 0.625], "the caller's own array was changed"


def test_every_24_bit_number_draws_its_token():
    q = distribution((7, 3), (2, WEIGHT_SUM - 5), (9, 2))
    words = [
        number << 8 | low for number in (0, 1, 2, 3, WEIGHT_SUM - 3, WEIGHT_SUM - 2, WEIGHT_SUM - 1) for low in (0, 255)
    ]
    assert [q.draw(word) for word in words[::2]] == [7, 7, 7, 2, 2, 9, 9]
    assert [q.draw(word) for word in words[1::2]] == [7, 7, 7, 2, 2, 9, 9]


def test_draws_follow_the_weights():
    q = distribution((0, WEIGHT_SUM // 2), (5, WEIGHT_SUM // 4), (3, WEIGHT_SUM // 4))
    counts = Counter(q.draw(step << 22) for step in range(1024))
    assert counts == {0: 512, 5: 256, 3: 256}


@pytest.mark.parametrize(
    ("q", "token", "words"),
    [
        (distribution((1, WEIGHT_SUM - 1)), 1, "16777215 given"),
        (distribution((1, WEIGHT_SUM), (2, 0)), 1, "at least 1"),
        (distribution((1, WEIGHT_SUM // 2), (1, WEIGHT_SUM // 2)), 1, "twice"),
        (distribution((1, WEIGHT_SUM)), 2, "own token"),
        (distribution((50, WEIGHT_SUM)), 50, "0 to 49"),
        (DraftDistribution(np.empty(0, np.uint32), np.empty(0, np.uint32)), 0, "at least one"),
        # Sums of uint32 must not wrap around.
        (distribution((1, 2**32 - 1), (2, WEIGHT_SUM + 1)), 1, "in sum"),
    ],
)
def test_faults_are_named(q, token, words):
    assert words in (q.fault(token, 50) or "")


def test_distributions_survive_the_wire():
    given = [None, distribution((1, 5), (2, WEIGHT_SUM - 5)), None, distribution((9, WEIGHT_SUM))]
    message = pack_distributions(given)
    assert message is not None
    got = unpack_distributions(message, 4)
    assert [q is None for q in got] == [True, False, True, False]
    for before, after in zip(given, got, strict=True):
        if before is not None and after is not None:
            assert before.token_ids.tolist() == after.token_ids.tolist()
            assert before.weights.tolist() == after.weights.tolist()
    assert pack_distributions([None, None]) is None
    assert unpack_distributions(type(message)(), 2) == [None, None]


@pytest.mark.parametrize("column", ["counts", "token_ids", "weights"])
def test_columns_that_do_not_fit_are_refused(column):
    message = pack_distributions([distribution((1, 5), (2, WEIGHT_SUM - 5)), distribution((9, WEIGHT_SUM))])
    assert message is not None
    if column == "counts":
        message.counts.append(1)
    else:
        setattr(message, column, getattr(message, column)[:-4])
    with pytest.raises(ValueError, match=rf"distributions\.{column}"):
        unpack_distributions(message, 2)
