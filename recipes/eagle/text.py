"""Python source of this machine as tokens of the embedded pair: the standard library and the installed packages.

No download: what a head learns is to follow the target, on any text of the kind that the target knows. Files are
cleaned as those of the pair's corpus are, and what the pair holds out stays held out: its packages, its draw of files,
and whatever shares a held-out prompt.
"""

import logging
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sources import CorpusLimits, SourceFile, cleaned, file_digest, is_new, read_packages, standard_library
from tokenization import encode_documents
from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

# Enough of a prompt to know its file by.
_PROMPT_CHARACTERS = 60


def collect_installed(prompts: list[str], *, most_tokens: int, tokenizer: Tokenizer) -> np.ndarray:
    """[at most `most_tokens`] uint16: whole files in a fixed order, each opened by the end-of-text token.

    Args:
        prompts: held-out prompts; a file with the beginning of one is left out.
        most_tokens: where the stream ends.
        tokenizer: of the pair.
    """
    limits = CorpusLimits(max_package_bytes=8_000_000)
    held_out = {package.requirement.partition("==")[0] for package in read_packages() if package.held_out}
    files = list(cleaned(standard_library(), limits, held_out=False))
    site = Path(sysconfig.get_paths()["purelib"])
    for package in sorted(path for path in site.iterdir() if path.is_dir() and path.name.isidentifier()):
        if package.name not in held_out:
            files += cleaned(_package_sources(package), limits, held_out=False)
    known = [prompt.strip()[:_PROMPT_CHARACTERS] for prompt in prompts]
    kept = [file for file in _new_files(files, limits) if not any(text in file.text for text in known)]
    texts, characters = [], 0
    for file in kept:
        texts.append(file.text)
        characters += len(file.text)
        if characters > 5 * most_tokens:  # a token is about four characters
            break
    stream = encode_documents(tokenizer, texts)[:most_tokens]
    logger.info("%d tokens of %d files, %d files left over", len(stream), len(texts), len(kept) - len(texts))
    return stream


def _new_files(files: list[SourceFile], limits: CorpusLimits) -> Iterator[SourceFile]:
    files.sort(key=lambda file: file_digest(file.name))
    seen_texts: set[int] = set()
    seen_lines: set[int] = set()
    for file in files:
        if not file.held_out and is_new(file.text, seen_texts, seen_lines, limits.near_duplicate_share):
            yield file


def _package_sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.py")):
        yield f"{folder.name.lower()}/{path.relative_to(folder.parent).as_posix()}", path.read_bytes()
