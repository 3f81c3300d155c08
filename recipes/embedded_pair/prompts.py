"""Cuts prompts out of held-out files: a definition's beginning, ended somewhere in the middle of the code."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest

from sources import SourceFile
from tokenizers import Tokenizer

BLOCK_START = re.compile(r"^(?:    )?(?:async def|def|class|@)\b", re.MULTILINE)
WORD_GOES_ON = re.compile(r"\w\0\w|\s\0")
MIN_TOKENS, MAX_TOKENS = 60, 200


def cut_prompts(files: Sequence[SourceFile], tokenizer: Tokenizer, count: int) -> list[dict[str, str]]:
    """`count` prompts with their sources, spread over the packages; none ends in white space.

    A prompt that ends in white space would split a token that training always saw whole.

    Raises:
        ValueError: the files do not yield that many.
    """
    chosen: list[dict[str, str]] = []
    by_package: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        by_package[file.name.split("/")[0]].append(file)
    rounds = zip_longest(*(by_package[package] for package in sorted(by_package)))
    for file in chain.from_iterable(rounds):
        if file is not None and (prompt := _cut(file, tokenizer)):
            chosen.append({"prompt": prompt, "source": file.name})
            if len(chosen) == count:
                return chosen
    raise ValueError(f"{len(files)} held-out files yield {len(chosen)} prompts, not {count}")


def _cut(file: SourceFile, tokenizer: Tokenizer) -> str | None:
    """One prompt of the file, at a place and of a length that its name determines."""
    draw = hashlib.sha256(file.name.encode()).digest()
    starts = [match.start() for match in BLOCK_START.finditer(file.text)]
    if not starts:
        return None
    text = file.text[starts[draw[0] % len(starts)] :]
    length = MIN_TOKENS + 10 + int.from_bytes(draw[1:3], "little") % (MAX_TOKENS - MIN_TOKENS - 20)
    ids = tokenizer.encode(text[:4000], add_special_tokens=False).ids
    if len(ids) < length + 64:  # something must be left to predict
        return None
    # Back to where a word ends: a word cut in two would be tokenised otherwise than training saw it.
    while length and WORD_GOES_ON.search(
        f"{tokenizer.decode(ids[length - 1 : length])}\0{tokenizer.decode(ids[length : length + 1])}"
    ):
        length -= 1
    prompt = tokenizer.decode(ids[:length]).rstrip()
    tokens = len(tokenizer.encode(prompt).ids)
    return prompt if MIN_TOKENS <= tokens <= MAX_TOKENS else None
