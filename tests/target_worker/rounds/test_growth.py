"""Growth of several messages as one: nothing of it changes but that it comes at once."""

import numpy as np

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.target_worker.rounds.growth import Growth

_Q = DraftDistribution.quantised([4, 5], [0.5, 0.5])
_ONE = Growth.of_session((7, 1), 1, 0, 9, [2, 3], [0, 2], [40, 41], [0.5, 0.25], drafter=1)
_OTHER = Growth.of_session(
    (7, 2), 3, 1, 5, [8], [0], [4], [0.75], drafter=2, distributions=[_Q], is_complete=True
)  # fmt: skip
_LATER = Growth.of_session((7, 1), 1, 0, 10, [4], [3], [42], [0.125], drafter=1)


def test_joined_growth_makes_the_records_of_its_parts():
    openings = {(7, 1): (3, 1), (7, 2): (5, 2)}
    parts = [_ONE, _OTHER, _LATER]
    joined = Growth.joined(parts)
    expected = np.concatenate([part.records([openings[key] for key in part.keys]) for part in parts])
    assert np.array_equal(joined.records([openings[key] for key in joined.keys]), expected)
    assert (joined.keys, joined.epochs, joined.places) == ([(7, 1), (7, 2), (7, 1)], [1, 3, 1], [0, 1, 0])
    assert (joined.as_of, joined.counts) == ([9, 5, 10], [2, 1, 1])
    assert joined.distributions == [None, None, _Q, None]
    assert joined.complete == [False, True, False]


def test_columns_that_no_part_has_stay_empty():
    plain = Growth.joined([
        Growth(
            keys=[(7, number)], epochs=[1], places=[0], as_of=[4], counts=[1], node_ids=np.array([1]),
            parents=np.array([0]), tokens=np.array([5]), acceptances=np.array([0.5], np.float32),
            drafters=np.array([1]),
        )
        for number in (1, 2)
    ])  # fmt: skip
    assert not plain.distributions and not plain.complete
    assert Growth.joined([_ONE]) is _ONE
