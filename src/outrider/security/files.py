"""Files with secrets in them: readable by their owner alone, and never half written."""

import os
import secrets
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read, whatever was there before."""
    replace_file(path, data, mode=0o600)


def replace_file(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file whole or not at all; it is never open to others than `mode` says, not even for a moment."""
    # A name of chance: in a container every process may have the same id, and one that died may have left its file.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
