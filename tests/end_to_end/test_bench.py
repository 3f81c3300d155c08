"""`outrider bench` against real processes: every prompt both ways, the tokens compared, the figures written."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider import cli
from outrider.local import LocalService
from outrider.roles.ports import free_port

LINES: list[dict[str, Any]] = [
    {"id": "a", "prompt": "def fibonacci(n):\n", "category": "code"},
    {"id": "b", "prompt": "import os\n\n\ndef main():\n", "category": "code"},
    {"id": "c", "prompt": "class Stack:\n    def push(self, item):\n", "category": "code", "max_new_tokens": 40},
    {"id": "d", "prompt": list(range(60, 90)), "category": "ids"},
    {"id": "e", "messages": [{"role": "user", "content": "for name in names:\n"}], "category": "chat"},
]


def written(path: Path, *more: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (*LINES, *more)))
    return path


def door_of(service: LocalService) -> str:
    return service.http_url.removeprefix("https://").removeprefix("http://")


def test_a_service_that_runs(one_draft: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    too_long = {"id": "long", "prompt": [65] * 100_000}
    prompts, figures = written(tmp_path / "prompts.jsonl", too_long), tmp_path / "figures.json"
    line = ["--prompts", str(prompts), "--max-new-tokens", "24", "--max-concurrency", "2", "--speculation", "sync"]
    assert cli.run(["bench", "--endpoint", door_of(one_draft), *line, "--output-json", str(figures)]) == 0
    out, err = capsys.readouterr()
    assert "left out, too long for the model: long" in err
    assert "The tokens of all 5 outputs are equal with and without speculation." in out
    assert all(category in out for category in ("code", "ids", "chat", "all"))
    found = json.loads(figures.read_text())
    assert (found["speculation"], found["max_concurrency"]) == ("sync", 2)
    assert found["figures"]["categories"]["all"]["prompts"] == 5
    assert found["figures"]["categories"]["all"]["acceptance_length"] > 1
    for prompt in found["figures"]["prompts"]:
        off, on = prompt["off"], prompt["on"]
        assert prompt["is_equal"] and prompt["first_difference"] is None
        assert 0 < off["output_tokens"] == on["output_tokens"] <= 24
        assert off["drafted_tokens"] == 0 < on["drafted_tokens"]
        assert 0 < on["ttft_ms"] <= on["e2el_ms"]


@pytest.mark.slow
def test_a_service_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = written(tmp_path / "prompts.jsonl")
    assert cli.run(["bench", "--prompts", str(prompts), "--max-new-tokens", "16"]) == 0
    assert "all 5 outputs are equal" in capsys.readouterr().out


def test_what_fits_not_together_or_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = str(written(tmp_path / "prompts.jsonl"))
    assert cli.run(["bench", "--endpoint", "127.0.0.1:9", "--model", "x"]) == 2
    assert "--endpoint measures a service that runs" in capsys.readouterr().err
    assert cli.run(["bench", "--endpoint", "nowhere", "--prompts", prompts]) == 2
    assert "HOST:PORT needed" in capsys.readouterr().err
    assert cli.run(["bench", "--endpoint", f"127.0.0.1:{free_port()}", "--prompts", prompts]) == 1
    assert "is no OpenAI door of this project" in capsys.readouterr().err


def test_a_prompt_that_is_refused_is_told(
    one_draft: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = written(tmp_path / "prompts.jsonl", {"id": "bad", "prompt": [10_000_000]})
    line = ["--prompts", str(prompts), "--max-new-tokens", "8", "--endpoint", door_of(one_draft)]
    assert cli.run(["bench", *line]) == 1
    out = capsys.readouterr().out
    assert "1 of 6 prompts were not answered" in out
    assert "all 5 outputs are equal" in out


def test_ctrl_c_ends_it_with_what_there_is(one_draft: LocalService, tmp_path: Path) -> None:
    prompts, figures = written(tmp_path / "prompts.jsonl"), tmp_path / "figures.json"
    line = ["bench", "--prompts", str(prompts), "--endpoint", door_of(one_draft), "--max-new-tokens", "1000"]
    line += ["--output-json", str(figures)]
    command = [sys.executable, "-m", "outrider.cli", *line]
    with one_draft.client() as client:
        before = client.server_info().requests_total
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "5 prompts" in process.stderr.readline()
        with one_draft.client() as client:
            # After every prompt's token for the prefix cache, and the draft's warm-up.
            while (info := client.server_info()).requests_total <= before + 6 or not info.running_sessions:
                time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130
        said = process.stderr.read()
    assert "interrupted" in said
    assert "Traceback" not in said
    assert len(json.loads(figures.read_text())["figures"]["prompts"]) < len(LINES)
