"""What a client says of its output's structure: options, and the message they become."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from outrider.v1 import common_pb2


class StructuredOptions(TypedDict, total=False):
    """At most one of the first five; common.proto (`StructuredOutputs`) says what each means.

    `json_schema` is a schema as a mapping, or as JSON text.
    """

    json_schema: str | Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    disable_any_whitespace: bool | None
    disable_additional_properties: bool | None
    whitespace_pattern: str | None


_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")
_OPTIONS = StructuredOptions.__annotations__.keys()


def take_structured(given: dict[str, Any]) -> common_pb2.StructuredOutputs | None:
    """The message of these options, which are taken out of `given`; None where there are none.

    Raises:
        ValueError: more than one constraint, or none beside the others; a value that the message cannot hold.
        TypeError: the same.
    """
    options = {name: given.pop(name) for name in list(given) if name in _OPTIONS}
    # False asks for nothing.
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    if not options:
        return None
    constraints = [name for name in _CONSTRAINTS if name in options]
    if len(constraints) != 1:
        raise ValueError(f"{', '.join(constraints) or 'none'} given, one of {', '.join(_CONSTRAINTS)} needed")
    if "json_schema" in options:
        schema = options.pop("json_schema")
        options["json"] = schema if isinstance(schema, str) else json.dumps(schema)
    if "choice" in options:
        choice = options["choice"]
        if isinstance(choice, str):
            raise TypeError("choice: a list of texts needed, one text given")
        options["choice"] = common_pb2.ChoiceList(values=choice)
    return common_pb2.StructuredOutputs(**options)
