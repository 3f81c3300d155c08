from pathlib import Path

from benchmarks import step_host_time


def test_trees_are_accepted_and_both_halves_take_time(tmp_path: Path) -> None:
    verifier = step_host_time.make_verifier(tmp_path)
    for sessions, rows in ((1, 1), (3, 5)):
        assert all(0 < part < 1e5 for part in step_host_time.measure(verifier, sessions, rows))
    assert verifier.session_count == 0
