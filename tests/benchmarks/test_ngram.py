"""The measurement of the n-gram source, small; its figures are for a quiet machine."""

import json

from benchmarks.ngram import Text, run

SMALL = ["--tokens", "3000", "--soak-tokens", "2000", "--capacity", "5000", "--sessions", "3", "--stall-rounds", "200"]


def test_every_part_is_measured(capsys):
    assert run([*SMALL, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["insert"]["tokens"] == 3000
    assert figures["soak"]["nodes"] == 5000
    assert figures["soak"]["evicted"] > 0
    assert figures["match"]["longest_ms"] >= figures["match"]["median_ms"] > 0
    stalls = figures["stalls"]
    assert 0 < stalls["inserted_tokens"] <= 30_000
    assert 0 < stalls["most_tokens_at_once"] <= stalls["inserted_tokens"]
    assert stalls["longest_hold_cpu_ms"] > 0
    assert stalls["beside_insertions"]["longest_cpu_ms"] > 0


def test_it_prints_a_table(capsys):
    assert run(SMALL) == 0
    assert "longest wait for an insertion" in capsys.readouterr().out


def test_the_text_repeats_itself():
    tokens = Text().tokens(20_000)
    runs = [tuple(tokens[place : place + 8]) for place in range(len(tokens) - 8)]
    assert len(tokens) == 20_000
    assert len(set(runs)) < 0.97 * len(runs)


def test_growth_is_measured_by_itself(capsys):
    arguments = ["--growth", "1", "3", "--growth-rounds", "4"]
    assert run([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["sessions"] for row in figures] == [1, 3]
    for row in figures:
        assert row["commit_ms"] > 0
        assert row["match_ms"] > 0
        # The trie knows the text: what was committed is guessed anew.
        assert row["nodes"] > 9
    assert run(arguments) == 0
    assert "CPU time" in capsys.readouterr().out
