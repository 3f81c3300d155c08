"""The count of differing choices: what is compared, what is found, and what fails the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.rounds.loading import load_target
from benchmarks.target_bench import same_tokens_command
from benchmarks.target_bench.forced import MIXES, Difference, Runs, Text

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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    line = ["--model", str(embedded_draft_path()), "--device", "cpu", "--sessions", "2", "--tokens", "12"]
    assert same_tokens_command.run([*line, "--output-json", str(file)]) == 0
    lines = json.loads(file.read_text())["lines"]
    assert [(entry["mix"], entry["temperature"], entry["compared"]) for entry in lines] == [
        (mix.name, temperature, 12) for mix in MIXES for temperature in (0.0, 1.0)
    ]
    assert "chunked prefill" in capsys.readouterr().err


@pytest.mark.gpu
def test_deterministic_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    file = tmp_path / "report.json"
    line = ["--device", "cuda", "--deterministic", "--sessions", "16", "--tokens", "100", "--output-json", str(file)]
    assert same_tokens_command.run(line) == 0
    assert sum(entry["compared"] for entry in json.loads(file.read_text())["lines"]) == 4800
