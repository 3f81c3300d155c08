import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider import cli
from outrider.client import Client
from outrider.errors import InvalidRequest, TokenFileError
from outrider.security.tokens import TokenEntry, TokenFile, add_token, find, hash_of, new_token, read_tokens


def test_a_new_token_is_printed_once_and_only_its_hash_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "sub" / "tokens.json"
    command = ["token", "new", "--token-file", str(path)]
    assert cli.run([*command, "alice", "--requests-per-minute", "60"]) == 0
    token = capsys.readouterr().out.strip()
    assert cli.run([*command, "bob"]) == 0
    assert capsys.readouterr().out.strip() != token
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    entries = read_tokens(path)
    assert find(token, entries) == TokenEntry(name="alice", sha256=hash_of(token), requests_per_minute=60)
    assert find(new_token(), entries) is None
    before = path.read_bytes()
    assert cli.run([*command, "alice"]) == cli.BAD_ARGUMENTS
    assert path.read_bytes() == before


def test_a_token_of_ones_own_choice_is_not_taken():
    # Its hash would be easy to find out from the file.
    assert find("password", [TokenEntry(name="weak", sha256=hash_of("password"))]) is None


def test_none_of_many_that_are_added_at_a_time_is_lost(tmp_path: Path):
    path = tmp_path / "tokens.json"
    names = [f"name-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_token(path, TokenEntry(name=name, sha256=hash_of(name))), names))
    assert sorted(entry.name for entry in read_tokens(path)) == sorted(names)
    assert [left.name for left in tmp_path.iterdir()] == ["tokens.json"]


def file_of(*entries: object) -> str:
    return json.dumps({"tokens": entries})


HASH = hash_of("x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "is no token file"),
        ("[]", "is no token file"),
        (file_of(3), "is no token file"),
        (file_of({"name": "a"}), "is no token file"),
        (file_of({"name": "a", "sha256": "xyz"}), "64 hexadecimal digits"),
        (file_of({"name": "a b", "sha256": HASH}), "letters, digits"),
        (file_of({"name": "a", "sha256": HASH, "max_concurrent": 0}), "1 or more"),
        (file_of({"name": "a", "sha256": HASH, "max_concurrent": True}), "1 or more"),
        (file_of({"name": "a", "sha256": HASH, "quota": 3}), "quota is no field"),
        (file_of({"name": "a", "sha256": HASH}, {"name": "a", "sha256": hash_of("y")}), "name is there twice"),
        (file_of({"name": "a", "sha256": HASH}, {"name": "b", "sha256": HASH}), "sha256 is there twice"),
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path: Path, content: str, message: str):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(TokenFileError, match=message):
        read_tokens(path)


def test_a_file_is_read_anew_when_it_changes_and_kept_when_it_is_broken(tmp_path: Path):
    path = tmp_path / "tokens.json"
    path.write_text('{"tokens": []}')
    tokens = TokenFile(path)
    assert tokens.refresh() is None
    path.write_text(file_of({"name": "alice", "sha256": HASH}))
    assert tokens.refresh() is None
    assert [entry.name for entry in tokens.entries] == ["alice"]
    path.write_text("half wr")
    fault = tokens.refresh()
    assert fault is not None
    assert "no token file" in fault
    # Once is enough for the log.
    assert tokens.refresh() is None
    path.unlink()
    assert "No such file" in (tokens.refresh() or "")
    assert tokens.refresh() is None
    assert [entry.name for entry in tokens.entries] == ["alice"]
    path.write_text(file_of({"name": "bob", "sha256": HASH}))
    assert tokens.refresh() is None
    assert [entry.name for entry in tokens.entries] == ["bob"]


def test_a_token_does_not_cross_the_network_in_the_clear():
    with pytest.raises(InvalidRequest, match="unencrypted"):
        Client("203.0.113.1:1", token=new_token())
    Client("203.0.113.1:1", token=new_token(), insecure=True).close()
    Client("127.0.0.1:1", token=new_token()).close()
    with pytest.raises(InvalidRequest, match="printable"):
        Client("127.0.0.1:1", token="broken\n")
