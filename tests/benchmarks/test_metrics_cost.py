import json

from benchmarks.metrics_cost import run

SMALL = ["--sessions", "3", "--pairs", "3", "--rounds", "4", "--draft-steps", "3", "--draft-width", "4", "--json"]


def test_both_arms_do_the_same_work_and_one_is_read(capsys):
    """What it costs is for a quiet machine to say: any cost will do here."""
    assert run([*SMALL, "--limit-percent", "1e9"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    off, on = figures["tokens"]
    # 22 rounds of 3 sessions; how many tokens of their trees are right depends on measured times.
    assert min(off, on) >= 22 * 3
    assert figures["reading_ms"] > 0
    assert min(figures["off_us_per_token"], figures["on_us_per_token"]) > 0


def test_a_cost_above_the_limit_is_a_failure(capsys):
    assert run([*SMALL, "--limit-percent=-1e9"]) == 1
    assert json.loads(capsys.readouterr().out)
