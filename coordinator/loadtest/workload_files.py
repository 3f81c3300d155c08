"""Workloads out of files: JSONL, ShareGPT, and traces with times; what is wrong in them is told with its place.

JSONL, one object a line:
    {"prompt": "def f(", "max_tokens": 64}                  prompt may be token ids; max_tokens may be left out
    {"turns": ["import os", "Now list a folder."]}          a conversation
    {"timestamp": 0.25, "prompt": "...", "max_tokens": 64}  of a trace: seconds, of any origin; or "timestamp_ms"
    {"timestamp": 27482, "input_length": 6955, "output_length": 52}   of a trace without texts: lengths, ms (Mooncake)
ShareGPT, one array: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]
    the first message is the prompt; the answer's length is how much is asked for.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider.coordinator.loadtest.workloads import FromFile, Prompt, Turn
from outrider.errors import FieldViolation, InvalidRequest

# Shorter ones are mostly broken off; vLLM's benchmark leaves them out, too.
_LEAST_TOKENS = 4


def read_jsonl(path: Path, *, max_new_tokens: int, seed: int) -> FromFile:
    """Prompts or conversations, in an order that the seed says.

    Raises:
        InvalidRequest: a line cannot be used, with its number.
    """
    entries = [_turns(entry, f"{path}:{number}", max_new_tokens) for number, entry in json_lines(path)]
    return FromFile(entries=entries, seed=seed, shuffled=True)


def read_trace(path: Path, *, max_new_tokens: int, vocab_size: int, speed: float, seed: int) -> FromFile:
    """Requests with the times at which they came, `speed` times as fast.

    Raises:
        InvalidRequest: a line cannot be used, with its number.
    """
    entries: list[tuple[float, tuple[Turn, ...]]] = []
    for number, entry in json_lines(path):
        place = f"{path}:{number}"
        at_s = _timestamp_s(entry, place)
        if "input_length" in entry:
            entry["prompt"] = _made_up(positive_int(entry, "input_length", place), len(entries), vocab_size, seed)
            entry.setdefault("max_tokens", positive_int(entry, "output_length", place))
        entries.append((at_s, _turns(entry, place, max_new_tokens)))
    entries.sort(key=lambda each: each[0])
    first_s = entries[0][0]
    return FromFile(
        entries=[turns for _, turns in entries],
        arrivals_s=[(at_s - first_s) / speed for at_s, _ in entries],
        seed=seed,
    )


def read_sharegpt(path: Path, *, count_tokens: Callable[[str], int], output_len: int | None, seed: int) -> FromFile:
    """First messages, with as many tokens asked for as their answers have.

    Raises:
        InvalidRequest: the file is not of this form, or none of its conversations can be used.
    """
    document = _parsed(_text(path), str(path))
    if not isinstance(document, list):
        raise invalid_file(str(path), "an array of conversations needed")
    entries: list[tuple[Turn, ...]] = []
    for number, entry in enumerate(document):
        place = f"{path}: conversation {number}"
        messages = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            raise invalid_file(place, 'an object with "conversations" needed')
        values = [_message(message, place) for message in messages[:2]]
        if len(values) == 2:
            prompt, answer = values
            tokens = output_len or count_tokens(answer)
            if min(tokens, count_tokens(prompt)) >= _LEAST_TOKENS:
                entries.append((Turn(prompt=prompt, max_new_tokens=tokens),))
    if not entries:
        raise invalid_file(str(path), f"no conversation has a prompt and an answer of {_LEAST_TOKENS} tokens or more")
    return FromFile(entries=entries, seed=seed, shuffled=True)


def _message(message: Any, place: str) -> str:
    value = message.get("value") if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise invalid_file(place, 'messages need a text "value"')
    return value


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSONL file, with the numbers of their lines.

    Raises:
        InvalidRequest: a line holds no object, with its number; there is none.
    """
    found = False
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            entry = _parsed(line, f"{path}:{number}")
            if not isinstance(entry, dict):
                raise invalid_file(f"{path}:{number}", "an object needed")
            found = True
            yield number, entry
    if not found:
        raise invalid_file(str(path), "it is empty")


def _turns(entry: dict[str, Any], place: str, max_new_tokens: int) -> tuple[Turn, ...]:
    prompts = entry.get("turns") if "turns" in entry else [entry.get("prompt")]
    if not isinstance(prompts, list) or not prompts:
        raise invalid_file(place, '"turns" must be a list of prompts')
    limit = max_new_tokens if entry.get("max_tokens") is None else positive_int(entry, "max_tokens", place)
    return tuple(Turn(prompt=checked_prompt(prompt, place), max_new_tokens=limit) for prompt in prompts)


def checked_prompt(value: Any, place: str) -> Prompt:
    """Return a text, or a tuple of token ids; raise InvalidRequest for anything else, or where it is empty."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, tuple | list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise invalid_file(place, '"prompt" must be a text or a list of token ids, and not empty')


def positive_int(entry: dict[str, Any], name: str, place: str) -> int:
    """Return a number of an entry; raise InvalidRequest where it is none, or below 1."""
    value = entry.get(name)
    if type(value) is not int or value < 1:
        raise invalid_file(place, f'"{name}" is {value!r}, a number of at least 1 needed')
    return value


def _timestamp_s(entry: dict[str, Any], place: str) -> float:
    # Traces without texts follow Mooncake's, which counts milliseconds.
    name = "timestamp_ms" if "timestamp_ms" in entry else "timestamp"
    value = entry.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid_file(place, f'"{name}" is {value!r}, a number needed')
    return value / 1e3 if name == "timestamp_ms" or "input_length" in entry else float(value)


def _made_up(count: int, number: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(f"trace {seed} {number}")
    return tuple(draw.randrange(min(256, vocab_size // 2), vocab_size) for _ in range(count))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise invalid_file(str(path), f"it is not UTF-8: {error}") from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise invalid_file(place, f"it is not JSON: {error}") from error


def invalid_file(place: str, what: str) -> InvalidRequest:
    """Return the error that says what is wrong with a file, and where."""
    return InvalidRequest([FieldViolation(place, what)])
