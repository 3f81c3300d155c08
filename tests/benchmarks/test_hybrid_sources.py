"""A bad source beside a good one, and a shy one, with the coordinator's own scheduler on virtual time."""

import pytest
from benchmarks.simulation.hybrid import SecondSource, simulate_hybrid
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import simulate

from outrider.growth_source import GrowthSource

SETTINGS = Settings(sessions=1, duration_s=1.0, warmup_s=0.5)


@pytest.fixture(scope="module")
def alone():
    return simulate(SETTINGS)


@pytest.mark.parametrize(
    "second",
    [
        SecondSource(rates=(0.05, 0.02), claims=(0.9, 0.5)),
        SecondSource(rates=(0.02, 0.02), claims=(0.02, 0.02)),
    ],
    ids=["boaster", "silent"],
)
def test_a_bad_source_beside_a_good_one_costs_nothing(alone, second):
    figures, sources = simulate_hybrid(SETTINGS, second)
    assert figures.wrong_tokens == 0
    # Seeds scatter by some 2 %; without the correction, or with waiting as if the other did not exist, it is 0.7.
    assert figures.tokens_per_s > 0.95 * alone.tokens_per_s
    counted = {own.source: own for own in sources}
    assert set(counted) == {GrowthSource.MODEL, GrowthSource.NGRAM}
    assert counted[GrowthSource.NGRAM].submitted < 0.5 * counted[GrowthSource.MODEL].submitted


def test_a_good_source_that_thinks_little_of_itself_is_listened_to():
    second = SecondSource(rates=(0.6, 0.1), claims=(0.01, 0.01))
    _, sources = simulate_hybrid(SETTINGS, second)
    (counted,) = (own for own in sources if own.source is GrowthSource.NGRAM)
    # By what it says of them, nearly none of its nodes is worth a row.
    assert counted.submitted > 0.15 * counted.drafted
    assert counted.accepted > 100
