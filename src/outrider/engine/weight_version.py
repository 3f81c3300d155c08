"""Version of a checkpoint's weights: a digest over its tensors.

    version = first 32 digits of SHA-256 over (name, dtype, shape, SHA-256 of its bytes) of every tensor, by name

It is the same for the same tensors, however they are sharded and whatever their folder is called, and every byte has
been read by then: a file that is torn or on a disk that fails is found out before anything depends on it, and is in the
page cache when it is loaded. Files are read, not mapped: one that somebody shortens meanwhile is an error, where a
mapped one would end the process. Processors that have instructions for SHA-256 do 1 to 2 GB/s a thread.
"""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from outrider.engine.weight_source import INDEX_FILE, SafetensorsSource
from outrider.errors import CheckpointError

_DIGITS = 32
_THREADS = 4
# What says how the tensors are to be used.
_DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer.json", INDEX_FILE)
_CHUNK_BYTES = 16 << 20
Stamps = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of last change and inode of every file."""


def weights_version(folder: Path) -> str:
    """Return the digest of a checkpoint folder, hexadecimal; CheckpointError where a file is missing or none."""
    digest = hashlib.sha256()
    # The pool ends first: nothing is closed while it is read.
    with contextlib.ExitStack() as files, ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-version") as pool:
        waiting: list[tuple[str, str, str, Future[bytes]]] = []
        for file, names in SafetensorsSource(folder).files.items():
            waiting += _begin(folder / file, names, pool, files)
        for name, dtype, shape, content in sorted(waiting, key=lambda entry: entry[0]):
            for field in (name.encode("utf-8"), dtype.encode("ascii"), shape.encode("ascii"), content.result()):
                digest.update(struct.pack("<Q", len(field)) + field)
    return digest.hexdigest()[:_DIGITS]


def file_stamps(folder: Path) -> Stamps:
    """Return what shows that a folder's files have changed since."""
    described = [name for name in _DESCRIPTIONS if (folder / name).is_file()]
    stamps = []
    for file in [*SafetensorsSource(folder).files, *described]:
        found = (folder / file).stat()
        stamps.append((file, found.st_size, found.st_mtime_ns, found.st_ino))
    return tuple(stamps)


def _begin(
    path: Path, names: Iterable[str], pool: ThreadPoolExecutor, files: contextlib.ExitStack
) -> Iterator[tuple[str, str, str, "Future[bytes]"]]:
    """Start to digest the tensors of one file, in the order in which they lie there."""
    wanted = set(names)
    try:
        file = files.enter_context(path.open("rb"))
        size = os.fstat(file.fileno()).st_size
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        begin = 8 + header_bytes
        header = json.loads(file.read(min(header_bytes, size)))
        found = [(name, each) for name, each in header.items() if name in wanted]
        for name, each in sorted(found, key=lambda entry: entry[1]["data_offsets"][0]):
            start, stop = (begin + offset for offset in each["data_offsets"])
            if not begin <= start <= stop <= size:
                raise ValueError(f"it ends after {size} bytes, {stop} needed")
            yield name, each["dtype"], str(each["shape"]), pool.submit(_digest, file, start, stop)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path}: cannot read it: {error}; copy this file again") from error


def _digest(file: IO[bytes], start: int, stop: int) -> bytes:
    digest = hashlib.sha256()
    while start < stop:
        try:
            part = os.pread(file.fileno(), min(_CHUNK_BYTES, stop - start), start)
        except OSError as error:
            raise CheckpointError(f"{file.name}: cannot read it: {error}; copy this file again") from error
        if not part:
            raise CheckpointError(f"{file.name}: it has become shorter while it was read; ask again once it is written")
        digest.update(part)
        start += len(part)
    return digest.digest()
