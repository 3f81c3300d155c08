"""Prompts of `outrider bench`: JSONL, one object a line.

    {"prompt": "def f(", "category": "code", "max_new_tokens": 128}     a text, or a list of token ids
    {"messages": [{"role": "user", "content": "..."}], "id": "chat-1"}  a conversation, for the model's chat template

`category`, `max_new_tokens` and `id` may be left out. prompts.jsonl beside this module is what runs by default: six
prompts each of chat, code, mathematics, summaries, quotation, rewriting, extraction, translation and several turns.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import FieldViolation, InvalidRequest
from outrider.models import held_out_prompts

DEFAULT_FILE = Path(__file__).resolve().parent / "prompts.jsonl"
DEFAULT_NEW_TOKENS = 128
_EMBEDDED_PROMPTS = 24


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """One prompt, before the model's tokenizer has seen it: one of `text`, `token_ids` and `messages`.

    Attributes:
        category: whose figures it counts towards.
    """

    id: str
    category: str
    max_new_tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Return the prompts of a file, in its order.

    Raises:
        InvalidRequest: a line cannot be used, with its number; two prompts have one id; there is none.
        OSError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise _wrong(str(path), f"not UTF-8: {error}") from error
    prompts = [_prompt(line, f"{path}:{number}", number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise _wrong(str(path), "no prompts: one JSON object a line needed")
    ids = set()
    for prompt in prompts:
        if prompt.id in ids:
            raise _wrong(str(path), f"two prompts have the id {prompt.id!r}")
        ids.add(prompt.id)
    return prompts


def embedded_prompts() -> list[BenchPrompt]:
    """Return some prompts of the embedded pair, which has learnt Python and nothing else."""
    return [
        BenchPrompt(
            id=f"python-{number}",
            category="python",
            max_new_tokens=DEFAULT_NEW_TOKENS,
            text=text,
        )
        for number, text in enumerate(held_out_prompts()[:_EMBEDDED_PROMPTS], start=1)
    ]


def _prompt(line: str, place: str, number: int) -> BenchPrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise _wrong(place, f"not JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) is ("messages" in entry):
        raise _wrong(place, 'an object with either "prompt" or "messages" needed')
    limit = entry.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if type(limit) is not int or limit < 1:
        raise _wrong(place, f'"max_new_tokens" is {limit!r}, a number of at least 1 needed')
    names = {"id": entry.get("id", f"line-{number}"), "category": entry.get("category", "prompts")}
    for name, value in names.items():
        if not isinstance(value, str) or not value:
            raise _wrong(place, f'"{name}" is {value!r}, a text needed')
    content = _messages(entry["messages"], place) if "messages" in entry else _text_or_ids(entry["prompt"], place)
    return BenchPrompt(**names, max_new_tokens=limit, **content)


def _messages(value: Any, place: str) -> dict[str, Any]:
    good = isinstance(value, list) and value
    if not good or not all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in value):
        raise _wrong(place, '"messages" must be a list of objects with "role" and a text "content", and not empty')
    return {"messages": tuple(value)}


def _text_or_ids(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, str) and value:
        return {"text": value}
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return {"token_ids": tuple(value)}
    raise _wrong(place, '"prompt" must be a text or a list of token ids, and not empty')


def _wrong(place: str, what: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(place, what)])
