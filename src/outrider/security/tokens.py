"""Bearer tokens: how one is made, and the file in which a service keeps the hashes of those it knows.

A token is `outrider_` and 256 random bits. Of it the file holds SHA-256, plain: salt and a slow hash protect what
people choose, which an attacker can guess; nobody guesses 256 bits, and a fast hash keeps the check off the list of
what a flood of requests can use up. Tokens of another form are refused, so that nobody puts in one of their own choice.

    {"tokens": [{"name": "alice", "sha256": "9f86...", "requests_per_minute": 60}]}
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.errors import TokenFileError
from outrider.security.files import write_private

PREFIX = "outrider_"
_TOKEN = re.compile(PREFIX + r"[A-Za-z0-9_\-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
LIMITS = ("requests_per_minute", "max_concurrent", "tokens_per_minute")


@dataclass(frozen=True, kw_only=True)
class TokenEntry:
    """One token of the file; a limit of None is no limit.

    Attributes:
        name: who has it; in logs and messages.
        sha256: hexadecimal hash of the token.
        requests_per_minute: generations begun, in the long run; a minute's worth may come at once.
        max_concurrent: choices that are generated or wait at a time.
        tokens_per_minute: output tokens in the long run; a minute's worth may come at once.

    Raises:
        ValueError: a value that cannot be, with the value.
    """

    name: str
    sha256: str
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} given, up to 64 letters, digits and . _ - needed")
        if not isinstance(self.sha256, str) or not _HASH.fullmatch(self.sha256):
            raise ValueError(f"sha256 of {self.name}: 64 hexadecimal digits needed")
        for limit in LIMITS:
            value = getattr(self, limit)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{limit} of {self.name}: {value!r} given, a whole number of 1 or more needed")


def new_token() -> str:
    """Return a new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return a token's hash as the file stores it."""
    return hashlib.sha256(token.encode("utf-8")).hexdigest()


def find(token: str, entries: Iterable[TokenEntry]) -> TokenEntry | None:
    """Return the entry of a token; None if it is not known. The time it takes does not tell how close a guess was."""
    if not _TOKEN.fullmatch(token):
        return None
    given, found = hash_of(token), None
    for entry in entries:
        if hmac.compare_digest(entry.sha256, given):
            found = entry
    return found


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """The entries of a token file.

    Raises:
        TokenFileError: it is not such a file, with what is wrong.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        entries = tuple(_entry(fields) for fields in content["tokens"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise TokenFileError(f'{path} is no token file: {{"tokens": [...]}} needed ({error})') from error
    except ValueError as error:
        raise TokenFileError(f"{path}: {error}") from error
    for what, values in (("name", [e.name for e in entries]), ("sha256", [e.sha256 for e in entries])):
        if len(set(values)) < len(values):
            raise TokenFileError(f"{path}: a {what} is there twice")
    return entries


def add_token(path: Path, entry: TokenEntry) -> None:
    """Add an entry to a token file, which is made if it is not there.

    Raises:
        ValueError: the name is there already.
        TokenFileError: the file is no token file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        entries = read_tokens(path) if path.exists() else ()
        if any(entry.name == other.name for other in entries):
            raise ValueError(f"{path}: {entry.name} has a token already; take it out of the file to make another")
        known = [
            {name: value for name, value in asdict(each).items() if value is not None} for each in (*entries, entry)
        ]
        write_private(path, (json.dumps({"tokens": known}, indent=2) + "\n").encode("utf-8"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change a file there: of two that read the same entries one would lose its own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The file itself is replaced, and nothing is to be left beside it. Closing unlocks.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class TokenFile:
    """A token file that is read anew when it changes.

    Raises:
        TokenFileError: it is not a token file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self.entries = read_tokens(path)

    def refresh(self) -> str | None:
        """Read the file if it has changed; if it cannot be read, log why, once, and keep the old entries."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self.entries = read_tokens(self._path)
        except (OSError, TokenFileError) as error:
            return str(error)
        return None

    def _read_stamp(self) -> tuple[int, int, int] | None:
        """Return the file's change stamp; None if it cannot be read."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - often: a third of the time of Path.stat
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def _entry(fields: Any) -> TokenEntry:
    if not isinstance(fields, dict):
        raise TypeError(f"{fields!r} is no entry")
    unknown = fields.keys() - TokenEntry.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]} is no field of a token")
    return TokenEntry(**fields)
