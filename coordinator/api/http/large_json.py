"""JSON of large requests, read in a thread without holding up the event loop.

Python's parser holds the interpreter from the first byte to the last: in a thread it holds up everybody just the same.
So a large text is parsed in pieces of a tenth of a millisecond. Objects and arrays are followed here, and what lies
within them is left to the fast parser: one value at a time, or as many plain ones (numbers, true, false, null) as lie
in one piece of an array. Between two pieces the others have their turn. A text, 10 MB of which take it 14 ms, is one
piece. With 200,000 token ids (1.2 MB, two busy cores) an event loop beside it was held up for 3 ms at most instead of
24, and the whole took 40 to 50 ms.

What comes out, and what is refused, is what `json.loads` gives and refuses.
"""

import json
import re
import time
from typing import Any

# Of an array of plain values: parsed at a time.
_PIECE = 8192
# What is made of more strings, arrays and objects than this takes longer here than all would wait for it otherwise.
_MOST_PARTS = 50_000
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"[^\"\[\]{}]*")
_DECODER = json.JSONDecoder()


def loads(body: bytes | bytearray) -> Any:
    """The same as `json.loads`.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    # As json.loads: UTF-8, -16 or -32, and a mark in front that says which is refused with UTF-8 alone.
    text = _Text(body.decode(json.detect_encoding(body), "surrogatepass"))
    if sum(map(text.count, '"[{')) > _MOST_PARTS:
        return json.loads(body)
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    value, end = _value(text, _skip(text, 0))
    if (end := _skip(text, end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Text(str):
    """What is read, and how far that was when the others had their turn last."""

    rested_at = 0

    def rest(self, position: int) -> None:
        """Gives the others their turn, unless too little was read for that since the last one.

        It may last as long as whatever they do then: after every short string this would take seconds in all.
        """
        if position - self.rested_at >= _PIECE // 2:
            self.rested_at = position
            time.sleep(0)


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _value(text: _Text, position: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends."""
    text.rest(position)
    first = text[position : position + 1]
    if first == "[":
        return _array(text, position + 1)
    if first == "{":
        return _object(text, position + 1)
    return _DECODER.raw_decode(text, position)


def _array(text: _Text, position: int) -> tuple[list[Any], int]:
    """What follows a [, up to its end."""
    items: list[Any] = []
    position = _skip(text, position)
    if text.startswith("]", position):
        return items, position + 1
    while True:
        plain = _PLAIN.match(text, position, position + _PIECE)
        assert plain is not None
        last = text.rfind(",", position, plain.end())
        if last > position:
            items += _plain_values(text, position, last)
            position = _skip(text, last + 1)
            continue
        value, position = _value(text, position)
        items.append(value)
        position = _skip(text, position)
        if text.startswith("]", position):
            return items, position + 1
        position = _skip(text, _after(text, position, ","))


def _plain_values(text: _Text, start: int, stop: int) -> list[Any]:
    text.rest(start)
    try:
        return json.loads(f"[{text[start:stop]}]")
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, text, start + error.pos - 1) from error


def _object(text: _Text, position: int) -> tuple[dict[str, Any], int]:
    """What follows a {, up to its end."""
    found: dict[str, Any] = {}
    position = _skip(text, position)
    if text.startswith("}", position):
        return found, position + 1
    while True:
        if not text.startswith('"', position):
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, position)
        name, position = _DECODER.raw_decode(text, position)
        position = _after(text, _skip(text, position), ":")
        found[name], position = _value(text, _skip(text, position))
        position = _skip(text, position)
        if text.startswith("}", position):
            return found, position + 1
        position = _skip(text, _after(text, position, ","))


def _after(text: str, position: int, mark: str) -> int:
    if not text.startswith(mark, position):
        raise json.JSONDecodeError(f"Expecting '{mark}' delimiter", text, position)
    return position + 1
