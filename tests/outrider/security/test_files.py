"""Files with secrets: whole or not there, and nobody else's to read."""

import os
from pathlib import Path

import pytest

from outrider.security.files import replace_file, write_private


def test_what_is_written_is_its_owners_whatever_was_there(tmp_path: Path):
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    replace_file(path, b"for all", mode=0o444)
    assert path.read_bytes() == b"for all"
    assert path.stat().st_mode & 0o222 == 0


def test_what_cannot_be_finished_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "key"
    write_private(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_private(path, b"new")
    assert [(other.name, other.read_bytes()) for other in tmp_path.iterdir()] == [("key", b"old")]
