"""Discovery of the Ray of `outrider serve` from another terminal, and its authentication."""

import os
import socket
import sys
from pathlib import Path

import pytest

from outrider.deploy import local_note
from outrider.deploy.local_note import forget_local, local_address, remember_local
from outrider.deploy.ray_token import prefer_token


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_note.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"outrider-{os.getuid()}"


def test_a_note_is_found_by_its_name_until_it_is_taken_away(folder: Path):
    assert local_address("mine") is None
    remember_local("mine", "127.0.0.1:7")
    assert (local_address("mine"), local_address("another")) == ("127.0.0.1:7", None)
    assert folder.stat().st_mode & 0o077 == 0
    forget_local("mine")
    assert local_address("mine") is None
    forget_local("mine")


@pytest.mark.parametrize("text", ['{"address": "h:1", "pid": 999999999}', "{", "[]", "{}"])
def test_what_a_dead_process_or_another_program_left_counts_for_nothing(folder: Path, text: str):
    folder.mkdir()
    (folder / "mine.json").write_text(text)
    assert local_address("mine") is None
    forget_local("mine")
    assert (folder / "mine.json").exists(), "it is not this process's own"


def test_a_note_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch):
    remember_local("mine", "127.0.0.1:7")
    path, real = local_note._note_of("mine"), os.getuid()
    monkeypatch.setattr(local_note, "_note_of", lambda _: path)
    monkeypatch.setattr(local_note.os, "getuid", lambda: real + 1)
    assert local_address("mine") is None


def test_a_second_one_of_a_name_leaves_the_note_of_the_first(folder: Path, caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = f"127.0.0.1:{listening.getsockname()[1]}"
        remember_local("mine", first)
        remember_local("mine", "127.0.0.1:7")
        assert local_address("mine") == first
        assert "another `outrider serve` of the name mine runs here" in caplog.text
    # Its process number may be another program's by now: where nothing answers the note is out of date.
    remember_local("mine", "127.0.0.1:7")
    assert local_address("mine") == "127.0.0.1:7"


def test_nothing_is_written_into_a_folder_that_leads_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (folder / "mine.json").symlink_to(precious)
    real = os.getuid()
    monkeypatch.setattr(local_note, "_note_of", lambda name: folder / f"{name}.json")
    monkeypatch.setattr(local_note.os, "getuid", lambda: real + 1)
    remember_local("mine", "127.0.0.1:7")
    assert precious.read_text() == "keep me"
    assert "belongs to somebody else" in caplog.text


@pytest.mark.parametrize(
    ("address", "has_token", "mode"),
    [("local", False, "token"), ("auto", True, "token"), ("h:1", True, "token"), ("h:1", False, None)],
)
def test_a_token_is_used_where_there_is_one_and_for_a_ray_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, has_token: bool, mode: str | None
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    prefer_token(address)
    assert os.environ.get("RAY_AUTH_MODE") == mode
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    prefer_token("local")
    assert os.environ["RAY_AUTH_MODE"] == "disabled", "what the user has set counts"
