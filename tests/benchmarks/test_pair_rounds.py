"""The embedded pair on virtual time: real growth, plain decoding's tokens, and what the draft's times are worth."""

import json

import pytest
from benchmarks.simulation import pair_command
from benchmarks.simulation.embedded_pair import RecordedOutputs, StepTimes, record, simulate_pair
from benchmarks.simulation.settings import Settings


@pytest.fixture(scope="module")
def recorded() -> dict[float, RecordedOutputs]:
    return record(prompt_tokens=48, new_tokens=24, requests=2, temperatures=(0.0, 1.0))


def settings(sessions: int) -> Settings:
    return Settings(
        sessions=sessions,
        target_step_ms=4.0,
        max_nodes=31,
        max_depth=16,
        max_live_nodes=256,
        duration_s=0.2,
        warmup_s=0.03,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_in_time_is_accepted_and_one_that_is_late_is_not(
    recorded: dict[float, RecordedOutputs], temperature: float
):
    # Other tokens than those that were recorded would end the run.
    quick = simulate_pair(settings(2), recorded[temperature], StepTimes())
    late = simulate_pair(settings(2), recorded[temperature], StepTimes(late=400.0))
    assert quick.acceptance_length > 1.5
    assert late.acceptance_length < 1.1
    assert quick.tokens_per_s > late.tokens_per_s
    assert quick.draft_steps_per_s > 500
    assert quick.nodes > 1


def test_the_command_writes_every_cell(capsys: pytest.CaptureFixture[str]):
    short = [
        "--prompt-tokens",
        "32",
        "--new-tokens",
        "16",
        "--requests",
        "1",
        "--duration",
        "0.05",
        "--warm-up",
        "0.02",
    ]
    assert pair_command.run([*short, "--temperatures", "0", "--rounds", "ahead", "wait", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rounds"] for row in rows] == ["ahead", "wait"]
    assert all(row["tokens_per_s"] > 0 and row["of_off"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sessions", "20"], "16 requests given, at least 20 (sessions) needed"),
        (["--prompt-tokens", "2000"], "prompt and output have 2512 tokens, at most 2048"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        pair_command.run(arguments)
    assert said in capsys.readouterr().err
