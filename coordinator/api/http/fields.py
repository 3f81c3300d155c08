"""Reading a request's JSON: every field of the right kind, every wrong one named, none left unread in silence."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outrider.coordinator.api.http.errors import RequestTooLarge, UnsupportedMediaType
from outrider.errors import FieldViolation, InvalidRequest

_MOST_NAMED = 8
_MOST_UNREAD_BYTES = 256 << 20
_TEXT = {"type": "string"}


async def read_json_object(scope: Mapping[str, Any], receive: Any, *, most_bytes: int) -> tuple[dict[str, Any], int]:
    """The body of a request, and how many bytes it has.

    Raises:
        UnsupportedMediaType: it is not declared as JSON. A web page that its visitor's browser lets send anything else
            to this address unasked is kept out by that.
        RequestTooLarge: it is larger than `most_bytes`.
        InvalidRequest: it is no JSON object.
    """
    headers = dict(scope["headers"])
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise UnsupportedMediaType("send the request as JSON, with the header `Content-Type: application/json`")
    body, size, has_more = bytearray(), 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequest([FieldViolation("body", "the connection ended before the request did")])
        size += len(message.get("body", b""))
        has_more = message.get("more_body", False) and size <= _MOST_UNREAD_BYTES
        # What is too large is read and thrown away: who is answered while still sending may never see the answer.
        if size <= most_bytes:
            body += message.get("body", b"")
        else:
            body.clear()
    if size > most_bytes:
        raise RequestTooLarge(f"the request has more than {most_bytes} bytes, and no such request can be right")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest([FieldViolation("body", f"not JSON: {error}")]) from error
    if not isinstance(content, dict):
        raise InvalidRequest([FieldViolation("body", f"a JSON object needed, {_kind(content)} given")])
    return content, len(body)


class Fields:
    """The fields of one JSON object; null is the same as absent.

    Args:
        content: the object.
        path: in front of its fields' names, for one within another.

    Attributes:
        violations: what was found wrong; those within share it.
        known: JSON schema of every field that was asked for, by name.
    """

    def __init__(
        self, content: Mapping[str, Any], *, path: str = "", violations: list[FieldViolation] | None = None
    ) -> None:
        self._content = {name: value for name, value in content.items() if value is not None}
        self._path = path
        self.known = dict[str, Mapping[str, Any]]()
        self.violations: list[FieldViolation] = [] if violations is None else violations

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def take(self, name: str, schema: Mapping[str, Any] | None = None) -> Any:
        """A field as it is, or None; `schema` says what it has to be."""
        self.known[name] = schema or self.known.get(name, {})
        return self._content.get(name)

    def unread(self) -> dict[str, Any]:
        """Return the fields that nobody has asked for."""
        return {name: value for name, value in self._content.items() if name not in self.known}

    def wrong(self, name: str, description: str) -> None:
        """Note a violation."""
        self.violations.append(FieldViolation((self._path + name).rstrip("."), description))

    def number(self, name: str) -> float | None:
        """A number."""
        value = self.take(name, {"type": "number"})
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            self.wrong(name, f"{_shown(value)} given, a number needed")
            return None
        try:
            return None if value is None else float(value)
        except OverflowError:
            self.wrong(name, "a number within the range of floating point needed")
            return None

    def whole(self, name: str, *, low: int, high: int) -> int | None:
        """A whole number within bounds; 3.0 is one."""
        value = self.take(name, {"type": "integer", "minimum": low, "maximum": high})
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong(name, f"{_shown(value)} given, a whole number needed")
            return None
        if not low <= value <= high:
            self.wrong(name, f"{_shown(value)} given, {low} to {high} needed")
            return None
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name, {"type": "boolean"})
        if not isinstance(value, bool | None):
            self.wrong(name, f"{_shown(value)} given, true or false needed")
        return value if isinstance(value, bool) else default

    def text(self, name: str) -> str | None:
        """A string of Unicode text."""
        value = self.take(name, _TEXT)
        if value is None or (isinstance(value, str) and self.is_text(name, value)):
            return value
        if not isinstance(value, str):
            self.wrong(name, f"{_shown(value)} given, a string needed")
        return None

    def is_text(self, name: str, value: str) -> bool:
        """Return True if a string is Unicode text, else note a violation: JSON can spell lone surrogates."""
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.wrong(name, "half of a surrogate pair: send whole characters")
            return False
        return True

    def one_of(self, name: str, choices: Collection[str]) -> str | None:
        """One of a few words."""
        value = self.take(name, {"enum": list(choices)})
        if value is None or (isinstance(value, str) and value in choices):
            return value
        self.wrong(name, f"{_shown(value)} given, one of {', '.join(choices)} needed")
        return None

    def texts(self, name: str) -> list[str]:
        """A string, or a list of strings."""
        value = self.take(name, {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})
        values = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if not isinstance(value, str | list | None) or not all(isinstance(each, str) for each in values):
            self.wrong(name, "a string or a list of strings needed")
            return []
        return values if all(self.is_text(name, each) for each in values) else []

    def token_ids(self, name: str) -> list[int]:
        """A list of token ids; whether the vocabulary has them is seen later."""
        value = self.take(name, {"type": "array", "items": {"type": "integer", "minimum": 0}})
        if value is None or is_token_ids(value):
            return value or []
        self.wrong(name, "a list of token ids (whole numbers, 0 or more) needed")
        return []

    def within(self, name: str) -> "Fields | None":
        """The fields of an object within."""
        value = self.take(name, {"type": "object"})
        if value is None or isinstance(value, dict):
            return None if value is None else Fields(value, path=f"{self._path}{name}.", violations=self.violations)
        self.wrong(name, f"{_kind(value)} given, an object needed")
        return None

    def refuse_others(self, kind: str = "a field of this request") -> None:
        """Names the fields that nobody has read, with what may have been meant."""
        names, unread = list(self.known), list(self.unread())
        for name in (name[:100] for name in unread[:_MOST_NAMED]):
            meant = difflib.get_close_matches(name, names, n=1)
            self.wrong(name, f"not {kind}" + (f": did you mean {meant[0]}?" if meant else ": leave it out"))
        if len(unread) > _MOST_NAMED:
            self.wrong("body", f"{len(unread) - _MOST_NAMED} more unknown fields")

    def check(self) -> None:
        """Raise InvalidRequest if anything was found wrong."""
        if self.violations:
            raise InvalidRequest(self.violations)


def is_token_ids(value: Any) -> bool:
    """Return True if a value is a list of possible token ids."""
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return _kind(value)
    shown = json.dumps(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a number of many digits"
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list) else _shown(value)
