from pathlib import Path

from benchmarks import step_host_time


def test_trees_are_accepted_and_both_halves_take_time(tmp_path: Path) -> None:
    verifier = step_host_time.make_verifier(tmp_path)
    for sessions, rows in ((1, 1), (3, 5)):
        assert all(part > 0 for part in step_host_time.measure(verifier, sessions, rows))
    assert verifier.session_count == 0


def test_batches_sent_ahead_hold_what_is_accepted(tmp_path: Path) -> None:
    """By their own assertions: each step verifies what survived of the batch before it."""
    verifier = step_host_time.make_verifier(tmp_path)
    for measure in (step_host_time.measure_ahead, step_host_time.measure_turn, step_host_time.measure_coins):
        for sessions, rows in ((1, 1), (3, 5)):
            assert all(part > 0 for part in measure(verifier, sessions, rows))
    assert verifier.session_count == 0
