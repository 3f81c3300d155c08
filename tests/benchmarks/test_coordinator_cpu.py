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


def test_an_answer_of_ngrams_has_a_cost_late_or_not(capsys):
    options = ["--sessions", "3", "--rounds", "6", "--draft-steps", "3", "--draft-width", "4", "--ngram-depth", "5"]
    assert run([*options, "--json"]) == 0
    assert run([*options, "--ngram-rounds-late", "1", "--json"]) == 0
    in_time, late = (json.loads(part)[0] for part in _documents(capsys.readouterr().out))
    for figures in (in_time, late):
        assert figures["ngrams_us"] > 0
        assert figures["round_us"] > figures["batch_us"] + figures["growth_us"] + figures["ngrams_us"]
        # Every session is answered after each of its commits.
        assert figures["ngrams_nodes"] == 15


def _documents(text: str) -> list[str]:
    return [f"[{part}]" for part in text.replace("[", "").split("]")[:-1]]
