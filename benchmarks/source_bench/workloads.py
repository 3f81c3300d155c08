"""Requests whose output repeats what was there before, made of the embedded pair's held-out prompts alone.

edits   a file, then its beginning again with one name changed: the rest of the edited file is to be written
quotes  a passage and a question about it, and the first words of an answer that quotes the passage
twice   plain continuations; the same requests once more in a second pass

A small model follows no instruction, but it goes on with what it has begun to repeat; how often it does, the table
shows by how much of the output an n-gram trie knew.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models import held_out_prompts

NAMES = ("edits", "quotes", "twice")
# Parts of a text that its copy begins with.
_BEGUN = 0.25
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one kind.

    Attributes:
        prompts: texts, in the order in which they are sent.
        passes: how often all of them are sent, one pass after the other.
    """

    name: str
    prompts: Sequence[str]
    passes: int = 1


def workload(name: str, count: int) -> Workload:
    """`count` requests of a kind.

    Raises:
        ValueError: there is no such kind.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} given, {' or '.join(NAMES)} needed")
    texts = held_out_prompts()
    pieces = [texts[number % len(texts)] for number in range(count)]
    if name == "twice":
        return Workload(name=name, prompts=pieces, passes=2)
    make = edit_request if name == "edits" else quote_request
    return Workload(name=name, prompts=[make(text) for text in pieces])


def edit_request(text: str) -> str:
    """A file, and the beginning of the same file with its most frequent name changed."""
    old = _name_of(text)
    new = f"new_{old}"
    edited = re.sub(rf"\b{old}\b", new, text)
    return f"{text}\n\n\n# The same with {old} renamed to {new}:\n{_beginning(edited)}"


def quote_request(text: str) -> str:
    """A passage, a question about it, and the beginning of an answer in its own words."""
    question = f"# Which part of the passage is about {_name_of(text)}? This one:"
    return f'PASSAGE = """\n{text}\n"""\n\n{question}\n{_beginning(text)}'


def _name_of(text: str) -> str:
    words = Counter(word for word in _WORD.findall(text) if not keyword.iskeyword(word))
    return words.most_common(1)[0][0] if words else "value"


def _beginning(text: str) -> str:
    """Whole lines, a quarter of the text at least."""
    end = text.find("\n", round(len(text) * _BEGUN))
    return text if end < 0 else text[: end + 1]
