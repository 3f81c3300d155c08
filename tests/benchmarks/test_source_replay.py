"""Texts replayed on virtual time: what is written stays the same, and mixtures are worth what their sources are."""

import json
import random

import pytest
from benchmarks.source_bench.replay import MIXTURES, ReplayFigures, ReplaySettings, ReplayText, replay
from benchmarks.source_bench.replay_command import calibrated, run

SETTINGS = ReplaySettings(sessions=4, max_depth=6, insert_us=1.0)


def make_texts(count: int = 8, length: int = 60) -> list[ReplayText]:
    """Texts without repetitions, of which a draft knows three tokens of four."""
    drawn, texts = random.Random(1), []
    for _ in range(count):
        prompt, output = ([drawn.randrange(5000) for _ in range(size)] for size in (10, length))
        guesses = [[(token if drawn.random() < 0.75 else token + 5000, 0.75), (token + 6000, 0.1)] for token in output]
        texts.append(ReplayText(prompt=prompt, output=output, guesses=guesses))
    return texts


@pytest.fixture(scope="module")
def found() -> dict[str, list[ReplayFigures]]:
    return {mixture: replay(make_texts(), mixture, SETTINGS, passes=2) for mixture in MIXTURES}


def test_every_mixture_writes_what_the_target_has_written(found: dict[str, list[ReplayFigures]]):
    outputs = [list(text.output) for text in make_texts()]
    for passes in found.values():
        assert [figures.outputs for figures in passes] == [outputs, outputs]
    assert found["off"][0].acceptance_length == 1


def test_what_was_written_before_is_drafted_as_deep_as_may_be(found: dict[str, list[ReplayFigures]]):
    first, second = found["ngram"]
    # Nothing repeats itself in the first pass. In the second, 60 tokens are nine rounds of seven: with the one that
    # is sent before anything has come there are ten at most.
    assert first.acceptance_length < 1.2
    assert second.acceptance_length > 60 / 10.5
    assert second.sources["ngram"][2] > 0.8 * second.tokens


def test_a_mixture_is_as_good_as_the_better_of_its_sources(found: dict[str, list[ReplayFigures]]):
    for mixture in ("model+ngram", "model/ngram"):
        for number in (0, 1):
            best = max(found["model"][number].tokens_per_s, found["ngram"][number].tokens_per_s)
            assert found[mixture][number].tokens_per_s > 0.94 * best


def test_a_trie_that_hears_late_guesses_less():
    (_, slow) = replay(make_texts(), "ngram", ReplaySettings(sessions=4, max_depth=6, insert_us=3000.0), passes=2)
    (_, fast) = replay(make_texts(), "ngram", SETTINGS, passes=2)
    assert slow.acceptance_length < 0.7 * fast.acceptance_length


def test_chances_are_right_on_average():
    texts = calibrated(make_texts(count=40))
    chances = [place[0][1] for text in texts for place in text.guesses]
    assert sum(chances) / len(chances) == pytest.approx(0.75, abs=0.03)


def test_the_command_reads_texts_and_prints_a_table(tmp_path, capsys):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps({"twice": [vars(text) for text in make_texts(2, 20)]}), encoding="utf-8")
    options = ["--workloads", "twice", "--mixtures", "off", "ngram", "--sessions", "2", "--texts", str(path)]
    assert run(options) == 0
    lines = capsys.readouterr().out
    assert lines.count("ngram") >= 2
    with pytest.raises(SystemExit, match="no edits"):
        run(["--workloads", "twice", "edits", "--texts", str(path)])
