"""Prompts of requests, and what became of those that belong to a category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from outrider.models import embedded_target_path, held_out_prompts


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts that sessions take in turn.

    Attributes:
        token_ids: [n] of each.
        categories: [n] of conversations, whose answers end where the model ends them; none of texts that go on for as
            long as is asked.
    """

    token_ids: Sequence[Sequence[int]]
    categories: Sequence[str] = ()


def prompts_of(length: int | None, target: Path | None, *, most: int | None = None) -> Prompts:
    """Return the first `most` held-out prompts; with a length, each goes on with those that follow it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str((target or embedded_target_path()) / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in held_out_prompts()]
    if length is None:
        return Prompts(token_ids=ids[:most])
    joined = []
    for first in range(len(ids))[:most]:
        prompt: list[int] = []
        place = first
        while len(prompt) < length:
            prompt += ids[place % len(ids)]
            place += 1
        joined.append(prompt[:length])
    return Prompts(token_ids=joined)


def conversations_of(file: Path, target: Path) -> Prompts:
    """Return the conversations of a prompt file in the target's chat template, one of each category after the other."""
    from recipes.smollm2.chat import read_chat_prompts

    prompts, seen = read_chat_prompts(target, file), Counter[str]()

    def turn(category: str) -> int:
        seen[category] += 1
        return seen[category]

    prompts.sort(key=lambda prompt: turn(prompt.category))
    return Prompts(
        token_ids=[prompt.token_ids for prompt in prompts], categories=[prompt.category for prompt in prompts]
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended: its category, tokens, the verifications that they took, and its seconds."""

    category: str
    tokens: int
    verifications: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CategoryFigures:
    """The answers of a category.

    Attributes:
        category: its name.
        requests: that ended.
        tokens_per_verification: of all of them.
        request_tokens_per_s: tokens of a request in its own time, mean of requests.
    """

    category: str
    requests: int
    tokens_per_verification: float
    request_tokens_per_s: float


def by_category(answers: Iterable[Answer]) -> list[CategoryFigures]:
    """Return the figures of every category, by name."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.category, []).append(answer)
    return [
        CategoryFigures(
            category=category,
            requests=len(group),
            tokens_per_verification=sum(one.tokens for one in group) / sum(one.verifications for one in group),
            request_tokens_per_s=fmean(one.tokens / one.seconds for one in group),
        )
        for category, group in sorted(groups.items())
    ]
