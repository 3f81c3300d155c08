"""Structured output of an HTTP request, in three spellings, as `structured_outputs`.

response_format       OpenAI's: text, json_object, json_schema
structured_outputs    vLLM's, with the names of the message
guided_*              vLLM's older ones
"""

import json
from collections.abc import Mapping
from typing import Any

from outrider.coordinator.api.http.fields import Fields
from outrider.v1 import generation_pb2

# Of response_format, which has no word for it: without a bound, some models put out white space until they are cut off.
_BRIEF = " ?"
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def read_structured_outputs(fields: Fields, params: generation_pb2.SamplingParams) -> Mapping[str, str]:
    """Whichever of the three spellings is given; more than one is refused.

    Returns:
        The fields of GenerateRequest that the common checks may find wrong, to the one that was given here.
    """
    given = [name for name in ("response_format", "structured_outputs", *_GUIDED) if name in fields]
    if len(given) > 1:
        fields.wrong(given[-1], f"{' and '.join(given)} given: give one of them")
    _read_response_format(fields, params)
    _read_structured_object(fields, params)
    for name, field in _GUIDED.items():
        if (value := fields.take(name)) is not None:
            _set_constraint(fields, name, params, field, value)
    if (pattern := fields.text("guided_whitespace_pattern")) is not None:
        params.structured_outputs.whitespace_pattern = pattern
    fields.take("guided_decoding_backend")
    return {} if not given or given[0] == "structured_outputs" else names_of(given[0])


def names_of(field: str) -> Mapping[str, str]:
    """Return how the common checks call structured outputs, each name to the field that says them here."""
    return dict.fromkeys(["structured_outputs", *(f"structured_outputs.{name}" for name in _CONSTRAINTS)], field)


def _read_response_format(fields: Fields, params: generation_pb2.SamplingParams) -> None:
    wanted = fields.within("response_format")
    if wanted is None:
        return
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None and not wanted.violations:
        wanted.wrong("type", "missing: text, json_object or json_schema needed")
    if kind == "json_object":
        params.structured_outputs.json_object = True
        params.structured_outputs.whitespace_pattern = _BRIEF
    schema = wanted.within("json_schema")
    if kind == "json_schema":
        if schema is None or not isinstance(schema.take("schema"), dict):
            wanted.wrong("json_schema.schema", "missing: an object needed")
        else:
            params.structured_outputs.json = json.dumps(schema.take("schema"))
            params.structured_outputs.whitespace_pattern = _BRIEF
            for name in ("name", "description", "strict"):
                schema.take(name)
            schema.refuse_others(kind="a field of a JSON schema's format")
    wanted.refuse_others(kind="a field of response_format")


def _read_structured_object(fields: Fields, params: generation_pb2.SamplingParams) -> None:
    wanted = fields.within("structured_outputs")
    if wanted is None:
        return
    given = [name for name in _CONSTRAINTS if wanted.take(name) is not None]
    if len(given) != 1:
        wanted.wrong("", f"one of {', '.join(_CONSTRAINTS)} needed, {' and '.join(given) or 'none'} given")
        return
    _set_constraint(wanted, given[0], params, given[0], wanted.take(given[0]))
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if name in wanted:
            setattr(params.structured_outputs, name, wanted.flag(name))
    if (pattern := wanted.text("whitespace_pattern")) is not None:
        params.structured_outputs.whitespace_pattern = pattern
    wanted.refuse_others(kind="a field of structured_outputs")


def _set_constraint(fields: Fields, name: str, params: generation_pb2.SamplingParams, field: str, value: Any) -> None:
    outputs = params.structured_outputs
    if field == "json" and isinstance(value, dict | str):
        if not isinstance(value, str) or fields.is_text(name, value):
            outputs.json = value if isinstance(value, str) else json.dumps(value)
    elif field == "choice" and isinstance(value, list):
        outputs.choice.values.extend(fields.texts(name))
        # An empty list is refused by name, not taken for nothing.
        outputs.choice.SetInParent()
    elif field == "json_object" and value is True:
        outputs.json_object = True
    elif field in ("regex", "grammar") and isinstance(value, str):
        if fields.is_text(name, value):
            setattr(outputs, field, value)
    else:
        needed = {"json": "a schema", "choice": "a list of strings", "json_object": "true"}.get(field, "a string")
        fields.wrong(name, f"{needed} needed")
