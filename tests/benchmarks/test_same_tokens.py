"""The count of differing choices: what is compared, what is found, and what fails the run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.rounds.loading import load_target
from benchmarks.target_bench import same_tokens_command
from benchmarks.target_bench.forced import MIXES, Difference, Runs, Text, _Follower

from outrider.models import embedded_draft_path
from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.rounds.loop import RoundLoop

COUNT = 20


@pytest.fixture(scope="module")
def loop() -> RoundLoop:
    config = TargetWorkerConfig(
        model_path=embedded_draft_path(),
        max_num_seqs=6,
        max_model_len=160,
        max_step_tokens=64,
        num_slots=2000,
        enable_prefix_caching=False,
    )
    return load_target(config).loop


def texts() -> list[Text]:
    return [
        Text(
            prompt=[40 + number, *range(100, 120)],
            sampling=SamplingSpec(temperature=float(number % 2), seed=7 + number, max_new_tokens=COUNT),
            output=[],
        )
        for number in range(3)
    ]


def test_every_position_is_compared_once_and_float32_stays_the_same(loop: RoundLoop) -> None:
    runs, some = Runs(loop, seed=0), texts()
    assert runs.alone(some) >= 3 * COUNT
    assert [len(text.output) for text in some] == [COUNT] * 3
    assert len({tuple(text.output) for text in some}) > 1
    accepted = []
    for mix in MIXES:
        found = runs.beside(some, mix)
        assert found.compared == {0.0: 2 * COUNT, 1.0: COUNT}
        assert found.differences == []
        accepted.append(found.accepted)
    # The true branch was there.
    assert accepted[0] == 0
    assert accepted[1] > 0
    assert loop.session_count == 0


def test_differences_are_found_where_they_are(loop: RoundLoop) -> None:
    runs, some = Runs(loop, seed=0), texts()
    runs.alone(some)
    # As if other tokens had been chosen alone: what stands behind them is compared with the changed text's own truth.
    changed = replace(some[1], output=[*some[1].output[:9], (some[1].output[9] + 1) % 8192])
    found = runs.beside([some[0], changed, some[2]], MIXES[2])
    (difference,) = found.differences
    assert (difference.text, difference.place) == (1, 9)
    assert (difference.chosen, difference.alone) == (some[1].output[9], changed.output[9])
    assert found.compared == {0.0: 2 * COUNT, 1.0: 10}
    (gap,) = runs.gaps([some[0], changed, some[2]], [difference])
    assert gap > 1e-4
    (none,) = runs.gaps(some, [Difference(text=1, place=9, chosen=some[1].output[9], alone=some[1].output[9])])
    assert none == 0


def test_trees_hold_the_truth_and_nothing_else_that_is_true() -> None:
    random = np.random.default_rng(3)
    follower = _Follower(replace(texts()[0], output=list(range(30))), 0)
    for follower.place in range(20):
        ids, parents, tokens = follower.tree(MIXES[1], random, vocab_size=40)
        depths, true = {0: 0}, {0}
        for own, parent, token in zip(ids, parents, tokens, strict=True):
            depths[own] = depths[parent] + 1
            if parent in true and token == follower.place + depths[parent]:
                true.add(own)
        # One branch, and no second node of it.
        assert sorted(depths[own] for own in true) == list(range(len(true)))


@pytest.mark.parametrize(
    ("options", "gap", "counts"),
    [
        (["--device", "cpu"], 1e-5, False),
        (["--device", "cpu"], 1e-3, True),
        (["--device", "cpu"], float("nan"), True),
        (["--device", "cuda"], 1e-3, False),
        (["--device", "cuda", "--dtype", "float32"], 1e-3, True),
        (["--device", "cuda", "--deterministic"], 1e-5, True),
    ],
)
def test_what_fails_the_run(options: list[str], gap: float, counts: bool) -> None:
    difference = Difference(text=0, place=0, chosen=1, alone=2, gap=gap)
    assert same_tokens_command._counts(difference, same_tokens_command._parse(options)) is counts


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    line = ["--model", str(embedded_draft_path()), "--device", "cpu", "--sessions", "2", "--tokens", "12"]
    assert same_tokens_command.run([*line, "--output-json", str(file)]) == 0
    lines = json.loads(file.read_text())["lines"]
    assert [(entry["mix"], entry["temperature"], entry["compared"]) for entry in lines] == [
        (mix.name, temperature, 12) for mix in MIXES for temperature in (0.0, 1.0)
    ]
    assert "chunked prefill" in capsys.readouterr().err
    monkeypatch.setattr(same_tokens_command, "_counts", lambda *_: True)
    monkeypatch.setattr(same_tokens_command, "_look", lambda *_: [Difference(text=0, place=0, chosen=1, alone=2)])
    assert same_tokens_command.run([*line, "--output-json", str(file)]) == 1


@pytest.mark.gpu
def test_deterministic_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    file = tmp_path / "report.json"
    line = ["--device", "cuda", "--deterministic", "--sessions", "16", "--tokens", "100", "--output-json", str(file)]
    assert same_tokens_command.run(line) == 0
    assert sum(entry["compared"] for entry in json.loads(file.read_text())["lines"]) == 4800
