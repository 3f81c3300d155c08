"""Prompts of `outrider bench`: JSONL, one object a line.

    {"prompt": "def f(", "category": "code", "max_new_tokens": 128}     a text, or a list of token ids
    {"messages": [{"role": "user", "content": "..."}], "id": "chat-1"}  a conversation, for the model's chat template

`category`, `max_new_tokens` and `id` may be left out. prompts.jsonl beside this module is what runs by default: six
prompts each of chat, code, mathematics, summaries, quotation, rewriting, extraction, translation and several turns.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.coordinator.loadtest.workload_files import checked_prompt, invalid_file, json_lines, positive_int
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
    prompts = [_prompt(entry, f"{path}:{number}", number) for number, entry in json_lines(path)]
    ids = set()
    for prompt in prompts:
        if prompt.id in ids:
            raise invalid_file(str(path), f"two prompts have the id {prompt.id!r}")
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


def _prompt(entry: dict[str, Any], place: str, number: int) -> BenchPrompt:
    if ("prompt" in entry) is ("messages" in entry):
        raise invalid_file(place, 'either "prompt" or "messages" needed')
    limit = positive_int({"max_new_tokens": DEFAULT_NEW_TOKENS} | entry, "max_new_tokens", place)
    names = {"id": entry.get("id", f"line-{number}"), "category": entry.get("category", "prompts")}
    for name, value in names.items():
        if not isinstance(value, str) or not value:
            raise invalid_file(place, f'"{name}" is {value!r}, a text needed')
    if "messages" in entry:
        return BenchPrompt(**names, max_new_tokens=limit, messages=_messages(entry["messages"], place))
    prompt = checked_prompt(entry["prompt"], place)
    if isinstance(prompt, str):
        return BenchPrompt(**names, max_new_tokens=limit, text=prompt)
    return BenchPrompt(**names, max_new_tokens=limit, token_ids=prompt)


def _messages(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    good = isinstance(value, list) and value
    if not good or not all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in value):
        raise invalid_file(
            place, '"messages" must be a list of objects with "role" and a text "content", and not empty'
        )
    return tuple(value)
