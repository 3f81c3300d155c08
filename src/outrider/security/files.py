"""Files with secrets in them: readable by their owner alone, and never half written."""

import os
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that its owner alone can read, whatever was there before."""
    replace_file(path, data, mode=0o600)


def replace_file(path: Path, data: bytes, *, mode: int) -> None:
    """Writes a file whole or not at all; it is never open to others than `mode` says, not even for a moment."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
