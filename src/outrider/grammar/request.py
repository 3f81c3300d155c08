"""From StructuredOutputs, as a request asks, to a grammar of the library; what is wrong, with what to change.

What a constraint may cost is bounded thrice: its size here, the work of compiling it and that of each mask in
`outrider.grammar.library`.
"""

import json
from typing import Any

from outrider.grammar.library import llguidance
from outrider.v1 import common_pb2

MAX_SCHEMA_BYTES = 64 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_REGEX_BYTES = 8 << 10
MAX_WHITESPACE_BYTES = 256
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 1024

_JSON_KINDS = ("json", "json_object")
# The library's own options, which have fields beside the schema.
_OWN_KEY = "x-guidance"
# Of a schema: what holds schemas by name, and what holds no schemas at all.
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"enum", "const", "default", "examples"}


class ConstraintError(ValueError):
    """A field of StructuredOutputs that is wrong.

    Attributes:
        field: its name; empty for the message as a whole.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


def grammar_of(asked: common_pb2.StructuredOutputs) -> str:
    """The library's grammar of what is asked for. It may still turn out not to compile.

    Raises:
        ConstraintError: a field that is wrong.
        GrammarUnsupported: the library is not installed.
    """
    library = llguidance()
    kind = asked.WhichOneof("constraint")
    if kind is None:
        raise ConstraintError("", "empty: give one of json, regex, choice, grammar and json_object")
    options = _json_options(asked, kind)
    matcher = library.LLMatcher
    if kind == "json":
        schema = _schema(asked)
        try:
            return matcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            # Numbers beyond 64 bits, which Python reads and the library does not.
            raise ConstraintError("json", str(error)[:200]) from error
    if kind == "json_object":
        if not asked.json_object:
            raise ConstraintError("json_object", "false given: leave structured_outputs out for any text")
        return matcher.grammar_from_json_schema({"type": "object"}, overrides=options)
    if kind == "regex":
        return matcher.grammar_from_regex(_sized("regex", asked.regex, MAX_REGEX_BYTES))
    if kind == "choice":
        return matcher.grammar_from_lark(_lark_of_choice(list(asked.choice.values)))
    return _context_free(_sized("grammar", asked.grammar, MAX_GRAMMAR_BYTES))


def _sized(field: str, text: str, most: int) -> str:
    size = len(text.encode("utf-8"))
    if not text:
        raise ConstraintError(field, "empty: give at least one character")
    if size > most:
        raise ConstraintError(field, f"{size} bytes given, at most {most} allowed")
    return text


def _schema(asked: common_pb2.StructuredOutputs) -> dict[str, Any]:
    text = _sized("json", asked.json, MAX_SCHEMA_BYTES)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError("json", f"not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConstraintError("json", f"a JSON schema is an object, {type(schema).__name__} given")
    if _OWN_KEY in schema:
        raise ConstraintError("json", f"{_OWN_KEY} is not taken: use the fields beside json")
    if asked.disable_additional_properties:
        _close_objects(schema)
    return schema


def _close_objects(schema: Any) -> None:
    """additionalProperties false wherever a schema names properties and does not say."""
    if isinstance(schema, list):
        for inner in schema:
            _close_objects(inner)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for inner in value.values():
                _close_objects(inner)
        elif key not in _VALUES:
            _close_objects(value)


def _json_options(asked: common_pb2.StructuredOutputs, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for field, kinds in (
        ("disable_any_whitespace", _JSON_KINDS),
        ("whitespace_pattern", _JSON_KINDS),
        ("disable_additional_properties", ("json",)),
    ):
        # The generated stub lists the names.
        if asked.HasField(field) and getattr(asked, field) and kind not in kinds:  # pyright: ignore[reportArgumentType]
            raise ConstraintError(field, f"only with {' and '.join(kinds)}, not with {kind}: leave it out")
    if asked.disable_any_whitespace:
        if asked.whitespace_pattern:
            raise ConstraintError(
                "whitespace_pattern", "disable_any_whitespace leaves no white space: give one of them"
            )
        options["whitespace_flexible"] = False
    elif asked.whitespace_pattern:
        options["whitespace_pattern"] = _sized("whitespace_pattern", asked.whitespace_pattern, MAX_WHITESPACE_BYTES)
    return options


def _lark_of_choice(values: list[str]) -> str:
    if not values:
        raise ConstraintError("choice", "empty: give at least one text")
    if len(values) > MAX_CHOICES:
        raise ConstraintError("choice", f"{len(values)} texts given, at most {MAX_CHOICES} allowed")
    for place, value in enumerate(values):
        if not value or len(value.encode("utf-8")) > MAX_CHOICE_BYTES:
            size = len(value.encode("utf-8"))
            raise ConstraintError(f"choice.values[{place}]", f"{size} bytes given, 1 to {MAX_CHOICE_BYTES} needed")
    return "start: " + " | ".join(json.dumps(value, ensure_ascii=False) for value in dict.fromkeys(values))


def _context_free(text: str) -> str:
    """Lark's notation, or GBNF's, which the library translates."""
    library = llguidance()
    try:
        return library.grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError("grammar", f"neither Lark's notation nor GBNF's: {error}") from error
