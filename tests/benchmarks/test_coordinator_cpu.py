import json

from benchmarks.coordinator_cpu import run


def test_every_part_of_a_round_has_a_cost(capsys):
    options = ["--sessions", "1", "3", "--rounds", "4", "--draft-steps", "3", "--draft-width", "4", "--json"]
    assert run(options) == 0
    single, several = json.loads(capsys.readouterr().out)
    for figures in (single, several):
        assert min(figures[name] for name in ("batch_us", "growth_us", "delivery_us", "yardstick_us")) > 0
        assert figures["round_us"] > figures["batch_us"] + figures["growth_us"]
        assert figures["nodes"] > 1
        # Trees are grown, submitted and accepted, or every round would emit one token.
        assert figures["acceptance_length"] > 1.2
    assert (single["sessions"], several["sessions"]) == (1, 3)
