"""Options of a generation, and the request message made from them (no transport)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from outrider.drafting.growth_source import source_of_word, to_proto
from outrider.errors import FieldViolation, InvalidRequest
from outrider.sampling import MODE_NUMBERS, RULE_NUMBERS
from outrider.v1 import common_pb2, generation_pb2


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
_PARTS: dict[str, Any] = {
    "sampling_params": generation_pb2.SamplingParams,
    "speculation": generation_pb2.SpeculationParams,
}


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


class GenerateOptions(StructuredOptions, total=False):
    """Every parameter of a generation; generation.proto (`SamplingParams`, `SpeculationParams`) says what each means.

    None is the same as absent. `timeout_s` bounds the whole generation (default 600; None is no bound).
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    n: int | None
    logprobs: int | None
    forced_token_ids: Sequence[int] | None
    speculation: Literal["async", "sync", "off"]
    sources: Sequence[Literal["model", "ngram", "eagle"]] | None
    max_nodes: int | None
    max_depth: int | None
    verification: Literal["coupled", "target_only", "rejection", "synthetic"] | None
    threshold_single: float | None
    threshold_acc: float | None
    synthetic_rates: Sequence[float] | None
    request_id: str | None
    trace: bool
    record_tree: bool
    timeout_s: float | None


def build_request(prompt: str | Sequence[int], options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The message of a prompt and options.

    Raises:
        InvalidRequest: a value that the message cannot hold.
        TypeError: an option that does not exist.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request, violations = generation_pb2.GenerateRequest(), []

    def put(field_name: str, value: Callable[[], Any]) -> None:
        try:
            request.MergeFrom(_message(field_name, value()))
        except (TypeError, ValueError, UnicodeError) as error:
            violations.append(FieldViolation(field_name, str(error)))

    if isinstance(prompt, str):
        put("text", lambda: prompt)
    else:
        put("token_ids", lambda: generation_pb2.TokenIds(ids=prompt))
    given["speculation"] = given.get("speculation", "async")
    for name, attribute, numbers in (
        ("speculation", "mode", MODE_NUMBERS),
        ("verification", "verification", RULE_NUMBERS),
    ):
        if (word := given.pop(name, None)) in numbers:
            setattr(request.speculation, attribute, numbers[word])
        elif word is not None:
            violations.append(FieldViolation(name, f"{word!r} given, {', '.join(numbers)} needed"))
    sources = given.pop("sources", ())
    words = [sources] if isinstance(sources, str) else sources
    put("sources", lambda: [to_proto(source_of_word(word)) for word in words])
    put("structured_outputs", lambda: take_structured(given))
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    unknown = given.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    for name, value in given.items():
        put(name, lambda value=value: value)
    if violations:
        raise InvalidRequest(violations)
    return request


def _message(field_name: str, value: Any) -> generation_pb2.GenerateRequest:
    """A request that has one field alone, wherever it belongs; None is the same as absent."""
    if value is None:
        return generation_pb2.GenerateRequest()
    for part, kind in _PARTS.items():
        if field_name in kind.DESCRIPTOR.fields_by_name:
            return generation_pb2.GenerateRequest(**{part: kind(**{field_name: value})})
    return generation_pb2.GenerateRequest(**{field_name: value})
