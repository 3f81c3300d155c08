"""The console script: roles as plain processes, options made from their configurations."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
import pytest
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.byte_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from outrider import cli
from outrider.command_options import attribute_help, config_command


@dataclass(frozen=True, kw_only=True)
class Config:
    """Something to run.

    Attributes:
        port: where,
            and more words.
        folder: a path or a name.
        names: several.
        kind: of a few.
        wait_ms: a number.

    Raises:
        ValueError: port 13.
    """

    port: int = 5
    folder: str | Path | None = None
    names: tuple[str, ...] = ()
    kind: Literal["a", "b"] | None = None
    wait_ms: float = 1.5

    def __post_init__(self) -> None:
        if self.port == 13:
            raise ValueError("port: 13 given, another needed")


def run_config(arguments: Sequence[str]) -> tuple[int, str, list[Config]]:
    taken: list[Config] = []

    def take(config: Config) -> None:
        """Take it."""
        taken.append(config)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(config_command(Config, take))
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output, taken


def test_options_of_a_config() -> None:
    assert run_config([]) == (0, "", [Config()])
    line = ["--port", "7", "--folder", "x/y", "--names", "one", "--names", "two", "--kind", "b", "--wait-ms", "2"]
    assert run_config(line)[2] == [Config(port=7, folder=Path("x/y"), names=("one", "two"), kind="b", wait_ms=2.0)]


def test_help_comes_from_the_docstring() -> None:
    assert attribute_help(Config)["port"] == "where, and more words."
    code, output, _ = run_config(["--help"])
    assert code == 0
    assert all(words in output for words in ("Take it.", "where, and more words.", "a path or a name."))


@pytest.mark.parametrize("arguments", [["--port", "13"], ["--port", "x"], ["--kind", "c"]])
def test_wrong_values_are_bad_arguments(arguments: list[str]) -> None:
    code, output, taken = run_config(arguments)
    assert (code, taken) == (2, [])
    assert arguments[0].removeprefix("--") in output


def test_undescribed_fields_are_a_mistake() -> None:
    @dataclass
    class Silent:
        """Nothing."""

        port: int = 1

    with pytest.raises(ValueError, match="Silent does not describe port"):
        attribute_help(Silent)


@pytest.mark.parametrize("role", ["coordinator", "target-worker", "draft-worker"])
def test_every_role_has_its_options(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([role, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--host" in out
    assert "--model" in out
    assert cli.run([role, "--port", "70000"]) == 2
    assert "70000 given" in capsys.readouterr().err


def test_no_arguments_show_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    out, err = capsys.readouterr()
    assert all(name in out + err for name in ("serve", "generate", "status", "coordinator"))


def test_a_command_alone_is_the_one_among_all() -> None:
    def names(app: typer.Typer) -> list[str]:
        root = typer.main.get_command(app)
        return list(getattr(root, "commands"))  # noqa: B009 - typer does not say that it is a group

    every = names(cli.build_app())
    assert len(every) == 19
    assert [names(cli.build_app(name)) for name in every] == [[name] for name in every]
    assert names(cli.build_app("statuss")) == every


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write the files of a checkpoint that a coordinator needs: no weights."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, "max_position_embeddings": 64}))
    return tmp_path


def start_coordinator(checkpoint: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider.cli", "coordinator", "--model", checkpoint, "--port", "0", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready 127.0.0.1:"), process.communicate(timeout=100)
    return process, line.split()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_role_serves_until_it_is_told_to_stop(checkpoint: Path, number: int) -> None:
    process, address = start_coordinator(checkpoint)
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=100)  # pyright: ignore[reportAttributeAccessIssue]
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_a_role_ends_with_its_stdin(checkpoint: Path) -> None:
    process, _ = start_coordinator(checkpoint, "--stop-with-stdin")
    process.communicate("", timeout=100)
    assert process.returncode == 0


def test_a_role_that_cannot_start_says_why(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process, address = start_coordinator(checkpoint)
    port = address.rpartition(":")[2]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "outrider.cli", "coordinator", "--model", checkpoint, "--port", port],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        process.terminate()
        process.communicate(timeout=100)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert cli.run(["coordinator", "--model", str(checkpoint / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_reader_that_leaves_early_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli", "--help"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
