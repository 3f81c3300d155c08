"""JSON schemas whose answers are bounded: the embedded pair knows Python, and would go on within a string for ever."""

from typing import Any

_NAME = {"type": "string", "minLength": 1, "maxLength": 12}
_DAY = {"type": "string", "format": "date"}


def closed(**properties: Any) -> dict[str, Any]:
    """An object of exactly these properties."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(name=_NAME, count={"type": "integer", "minimum": 0, "maximum": 999}, done={"type": "boolean"}),
    "nested": closed(
        user=closed(id={"type": "integer", "minimum": 1, "maximum": 99}, name=_NAME),
        place=closed(city=_NAME, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    ),
    "list": {
        "type": "array",
        "items": {"type": "integer", "minimum": -50, "maximum": 50},
        "minItems": 2,
        "maxItems": 6,
    },
    "records": {
        "type": "array",
        "items": closed(key=_NAME, value={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
        "minItems": 1,
        "maxItems": 3,
    },
    "enum": closed(level={"enum": ["debug", "info", "warning", "error"]}, code={"enum": [1, 2, 3, None, True, "x"]}),
    "any_of": {"anyOf": [closed(kind={"const": "circle"}, r={"enum": [1, 2, 3]}), closed(kind={"const": "none"})]},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": _NAME, "c": {"enum": ["x", "y"]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "reference": {
        "$defs": {"leaf": closed(v={"type": "integer", "minimum": 0, "maximum": 9})},
        **closed(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    },
    "formats": closed(day=_DAY, id={"type": "string", "format": "uuid"}),
    "pattern": closed(version={"type": "string", "pattern": "^v[0-9]{1,2}\\.[0-9]{1,2}$"}, tag={"enum": ["a", "b"]}),
}
