"""What benchmarks/autoscaling.py makes of what it has seen."""

import pytest
from benchmarks.autoscaling_bench.load import Record
from benchmarks.autoscaling_bench.report import bins, phases

PLAN = [(2, 9.0), (6, 9.0)]


def seen() -> Record:
    """Two clients at 10 tokens a second each, then six at 5; a second draft serves 4 s after they have come."""
    looks = [
        (second + 0.1, 2 if second < 9 else 6, 1 if second < 10 else 2, 1 if second < 13 else 2) for second in range(18)
    ]
    deltas = [(second + 0.5, 20 if second < 9 else 30) for second in range(18)]
    return Record(deltas=deltas, looks=looks)


def test_time_per_token_and_drafts_of_each_second_and_phase():
    seconds = bins(seen(), seconds=18.0)
    assert (seconds[3]["tpot_ms"], seconds[12]["tpot_ms"]) == (pytest.approx(100), pytest.approx(200))
    assert [own["serving"] for own in seconds[11:15]] == [1, 1, 2, 2]
    first, second = phases(seen(), PLAN)
    assert first["tpot_ms_last_third"] == pytest.approx(100)
    assert second["tpot_ms_last_third"] == pytest.approx(200)
    assert second["most_serving_after_s"] == pytest.approx(4.1)
    assert (second["serving_at_start"], second["serving_at_end"]) == (1, 2)
