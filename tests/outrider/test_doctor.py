"""`outrider doctor`: what is amiss is said, with what to do."""

import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import cli, doctor
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.security.certificates import write_development_set


def lines(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, str]]:
    code = cli.run(["doctor", *map(str, arguments)])
    shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return code, {rest: finding for finding, rest in shown}


def finding(told: dict[str, str], *words: str) -> str:
    (found,) = [kind for text, kind in told.items() if all(word in text for word in words)]
    return found


def test_a_machine_that_runs_the_tests_is_well(capsys):
    code, told = lines(capsys)
    assert code == 0
    assert finding(told, "outrider", "on Python") == "ok"
    assert finding(told, "transformers") == finding(told, "grpcio") == "ok"


def test_models_and_certificates_are_looked_at(capsys, tmp_path):
    write_development_set(tmp_path / "certs", days=1)
    target, draft = embedded_target_path(), embedded_draft_path()
    code, told = lines(capsys, "--model", target, "--draft", draft, "--certs", tmp_path / "certs")
    assert code == 0
    assert finding(told, "tokenizer", "have the same") == "ok"
    assert [kind for text, kind in told.items() if text.startswith("TLS")] == ["ok"] * 4
    (tmp_path / "certs/target.key").unlink()
    (tmp_path / "draft").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "draft" / name).write_text((draft / name).read_text())
    code, told = lines(capsys, "--draft", tmp_path / "draft", "--model", "nowhere", "--certs", tmp_path / "certs")
    assert code == 1
    assert finding(told, "draft", "no *.safetensors") == "bad"
    assert finding(told, "model", "nowhere: no config.json") == "bad"
    assert finding(told, "TLS", "target:") == "bad"
    assert finding(told, "TLS", "draft:") == "ok"


def test_tokenizers_that_differ_are_told(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    tokenizer.write_text('{"model": {"vocab": {"other": 0}}}')
    found = list(doctor.models(embedded_target_path(), tmp_path))
    assert found[-1].finding is doctor.Finding.BAD
    assert "same family" in found[-1].text


def test_a_port_that_is_taken_is_named_with_its_option():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = doctor.ports({port: "--http-port"})
    assert (found.finding, found.what) == (doctor.Finding.NOTE, f"port {port}")
    assert found.text.endswith("give another one with --http-port")
    assert list(doctor.PORTS.values()) == ["--port", "--http-port"]


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("0, NVIDIA H100, 81559 MiB, 12 MiB, 580.1\n", 0, ("ok", "NVIDIA H100, 81559 MiB, 12 MiB in use")),
        ("", 9, ("bad", "look at the driver")),
    ],
)
def test_cards_are_asked_for(monkeypatch, output, code, expected):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    answer = SimpleNamespace(stdout=output, stderr="", returncode=code)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    found = list(doctor.gpus())
    assert (found[0].finding, expected[1] in found[0].text) == (expected[0], True)
    if not code:
        # The tests' torch has no card.
        assert found[1].what == "CUDA"


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["torch>=99", "nobody-has-this>=1", "typer>=0.1"])
    found = {line.what: line for line in doctor.versions()}
    assert found["torch"].finding is found["nobody-has-this"].finding is doctor.Finding.BAD
    assert "pip install 'torch>=99'" in found["torch"].text
    assert "not installed: pip install" in found["nobody-has-this"].text
