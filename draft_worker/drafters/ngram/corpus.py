"""Corpora: files of texts with which the trie begins, JSON lines with `text` or `token_ids`, read in the background.

A process of its own reads and tokenizes, because that would hold the interpreter for milliseconds at a time; a thread
queues the tokens for insertion as there is room. The first lines of every file are checked before the worker is ready,
and a bad one ends it; later ones are logged and left out.

    python -m outrider.draft_worker.drafters.ngram.corpus CHECKPOINT VOCAB_SIZE FILE...    writes frames to stdout

A frame is a kind (one byte: tokens, progress, a bad line), a length in bytes (uint32), and as many bytes.
"""

import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from outrider.errors import CheckpointError, CorpusError

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie

logger = logging.getLogger(__name__)

# Lines of each file that are checked before anything starts.
_CHECKED = 100
# Bad lines that are logged; the others are counted.
_LOGGED = 20
_PROGRESS_EVERY_S = 10.0
_TOKENS, _PROGRESS, _BAD_LINE = b"tic"
_HEAD = struct.Struct("<BI")

Encode = Callable[[str], list[int]]


def encoder(checkpoint: Path) -> Encode:
    """Return a function from text to token ids, without special tokens; CheckpointError without a tokenizer."""
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no tokenizer.json; texts of a corpus cannot be read without, token_ids can")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def texts_of(path: Path, encode: Encode, vocab_size: int) -> Iterator[tuple[int, list[int] | CorpusError]]:
    """Yield the bytes read so far and the next text's token ids, or what is wrong with its line.

    Raises:
        CorpusError: the file cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CorpusError(f"{path}: {error.strerror}") from error
    with file:
        read = 0
        for number, line in enumerate(file, start=1):
            read += len(line)
            if line.strip():
                try:
                    yield read, _tokens_of(line, encode, vocab_size)
                except ValueError as error:
                    yield read, CorpusError(f"{path}:{number}: {error}")


def _tokens_of(line: bytes, encode: Encode, vocab_size: int) -> list[int]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or ("text" in document) == ("token_ids" in document):
        raise ValueError('an object with either "text" or "token_ids" needed')
    if "text" in document:
        text = document["text"]
        if not isinstance(text, str):
            raise ValueError(f'"text": {type(text).__name__} given, a string needed')
        # JSON may hold lone surrogates, which a tokenizer does not take.
        token_ids = encode(text.encode("utf-8", "replace").decode("utf-8"))
        # A tokenizer may have more tokens than the model.
        if max(token_ids, default=0) >= vocab_size:
            raise ValueError(f'"text": it has token {max(token_ids)}, and the model only those below {vocab_size}')
        return token_ids
    token_ids = document["token_ids"]
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise ValueError('"token_ids": a list of whole numbers needed')
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f'"token_ids": ids from 0 to {vocab_size - 1} needed')
    return token_ids


def check_corpora(paths: Sequence[Path], checkpoint: Path, vocab_size: int) -> None:
    """Check the first lines of every file.

    Raises:
        CorpusError: a file cannot be read, or one of these lines is wrong, with its number.
        CheckpointError: the folder has no tokenizer.
    """
    encode = encoder(checkpoint)
    for path in paths:
        for _, (_, found) in zip(range(_CHECKED), texts_of(path, encode, vocab_size), strict=False):
            if isinstance(found, CorpusError):
                raise found


class CorpusLoader:
    """Load corpora into a trie in the background.

    Args:
        checkpoint: folder whose tokenizer reads texts.
        vocab_size: token ids from here on are refused.
    """

    def __init__(self, paths: Sequence[Path], checkpoint: Path, vocab_size: int) -> None:
        arguments = [str(checkpoint), str(vocab_size), *map(str, paths)]
        self._command = [sys.executable, "-m", "outrider.draft_worker.drafters.ngram.corpus", *arguments]
        self._stopped = threading.Event()
        self.finished = threading.Event()  # set when everything is queued, or nothing more will come
        self.texts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, trie: "SharedTrie") -> None:
        """Start to queue texts for insertion into `trie`."""
        process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._process = process
        self._thread = threading.Thread(target=self._run, args=(process, trie), name="ngram-corpus", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop loading."""
        self._stopped.set()
        if self._process is not None and self._thread is not None:
            self._process.kill()
            self._thread.join()

    def _run(self, process: subprocess.Popen[bytes], trie: "SharedTrie") -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for kind, data in _frames(stream):
                if kind == _TOKENS:
                    # An array will do for its sequence of ids.
                    trie.add_corpus(np.frombuffer(data, np.int32), self._stopped)  # pyright: ignore[reportArgumentType]
                    self.texts += 1
                else:
                    logger.log(logging.INFO if kind == _PROGRESS else logging.ERROR, "%s", data.decode())
        code = process.wait()
        if code and not self._stopped.is_set():
            logger.error("reading n-gram corpora ended with exit code %d; what was read stays", code)
        self.finished.set()


def _frames(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        kind, length = _HEAD.unpack(head)
        data = stream.read(length)
        if len(data) < length:
            return
        yield kind, data


def _write_frames(out: IO[bytes], paths: Sequence[Path], encode: Encode, vocab_size: int) -> None:
    """Write all texts of the files, and the progress."""

    def write(kind: int, data: bytes) -> None:
        out.write(_HEAD.pack(kind, len(data)) + data)
        out.flush()

    for path in paths:
        began, texts, tokens, bad, size = time.monotonic(), 0, 0, 0, max(path.stat().st_size, 1)
        for read, found in texts_of(path, encode, vocab_size):
            if isinstance(found, CorpusError):
                bad += 1
                if bad <= _LOGGED:
                    write(_BAD_LINE, f"{found}; the line is left out".encode())
                continue
            write(_TOKENS, np.array(found, np.int32).tobytes())
            texts, tokens = texts + 1, tokens + len(found)
            if time.monotonic() - began > _PROGRESS_EVERY_S:
                began = time.monotonic()
                write(_PROGRESS, f"n-gram corpus {path}: {read / size:.0%}, {texts} texts, {tokens} tokens".encode())
        left_out = f", {bad} lines left out" if bad else ""
        write(_PROGRESS, f"n-gram corpus {path}: read, {texts} texts, {tokens} tokens{left_out}".encode())


def main(arguments: Sequence[str]) -> int:
    """Write the frames of the files to stdout."""
    checkpoint, vocab_size, *files = arguments
    os.nice(5)
    try:
        _write_frames(sys.stdout.buffer, [Path(file) for file in files], encoder(Path(checkpoint)), int(vocab_size))
    except BrokenPipeError:
        # The reader is gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
