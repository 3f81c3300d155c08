"""Functions that a model may call: calls in what it writes, however that is cut, and what a request says of them."""

import json
from typing import Any

import pytest
from tests.byte_tokenizer import byte_tokenizer

from outrider.coordinator.api.http.fields import Fields
from outrider.coordinator.api.http.tool_calls import Calling, CallParser, CallPiece, Tools, read_tools
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import InvalidRequest
from outrider.grammar.matcher import SessionGrammar
from outrider.grammar.request import grammar_of
from outrider.v1 import common_pb2, generation_pb2

TOKENIZER, END = TextTokenizer(byte_tokenizer("<end>")), 256

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD: Any = {"type": "function", "function": {"name": "add"}}
FREE = Tools(functions=[WEATHER, ADD], names=["get_weather", "add"], calling=Calling.FREE)
NAMED = Tools(functions=[WEATHER, ADD], names=["add"], calling=Calling.NAMED)

Call = tuple[str, Any]
BERN: Call = ("get_weather", {"city": "Bern"})
TEXTS: dict[str, tuple[str, str, list[Call]]] = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        "Let me see.\n",
        [BERN],
    ),
    "hermes-twice": (
        '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": 2}]}}</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        "",
        [("add", {"a": [1, {"b": 2}]}), BERN],
    ),
    "llama": ('{"name": "get_weather", "parameters": {"city": "Bern"}}', "", [BERN]),
    "llama-with-type": ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    "llama-twice": (
        '\n{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Bern"}}',
        "",
        [("add", {}), BERN],
    ),
    "mistral": (
        ' [{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {"city": "Bern"}}]',
        "",
        [("add", {"a": 1}), BERN],
    ),
    "mistral-with-ids": ('[{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", [("add", {"a": 1})]),
    "marks-in-strings": (
        '{"name": "get_weather", "parameters": {"city": "}] \\"{ <tool_call> \\\\"}}',
        "",
        [("get_weather", {"city": '}] "{ <tool_call> \\'})],
    ),
    "name-last": ('{"arguments": {"city": "Bern"}, "name": "get_weather"}', "", [BERN]),
    "no-arguments": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    "text": ("It is {sunny} [here], a < b.", "It is {sunny} [here], a < b.", []),
    "no-call": ('{"answer": {"name": "add"}}', '{"answer": {"name": "add"}}', []),
    "list": ("[1, 2, 3]", "[1, 2, 3]", []),
    "another-function": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "half-a-mark": ("see <tool_ca", "see <tool_ca", []),
    "cut-before-the-name": ('{"na', '{"na', []),
    "empty": ("", "", []),
}


def collected(pieces: list[CallPiece]) -> tuple[str, list[tuple[str, str]]]:
    """Put together what a client would of a stream."""
    content, calls = "", dict[int, list[str]]()
    for piece in pieces:
        content += piece.content
        if piece.name:
            assert piece.call not in calls
            calls[piece.call] = [piece.name, ""]
        if piece.arguments:
            calls[piece.call][1] += piece.arguments
    assert list(calls) == list(range(len(calls)))
    return content, [(name, arguments) for name, arguments in calls.values()]


def pushed(tools: Tools, *parts: str) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(tools)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return collected([*pieces, *parser.push("", is_last=True)])


@pytest.mark.parametrize("kind", TEXTS)
def test_calls_are_found_however_the_text_is_cut(kind: str) -> None:
    text, content, calls = TEXTS[kind]
    whole, found = CallParser(FREE).whole(text)
    assert (whole, [call["function"]["name"] for call in found]) == (content, [name for name, _ in calls])
    assert [json.loads(call["function"]["arguments"]) for call in found] == [arguments for _, arguments in calls]
    assert len({call["id"] for call in found}) == len(found)
    expected = content, [(call["function"]["name"], call["function"]["arguments"]) for call in found]
    assert pushed(FREE, *text) == expected
    for place in range(len(text)):
        assert pushed(FREE, text[:place], text[place:]) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(FREE)
    assert parser.push('{"name": "add", "argum') == []
    assert parser.push('ents": {"a": ') == [CallPiece(name="add"), CallPiece(arguments='{"a": ')]
    assert parser.push("1}") == [CallPiece(arguments="1}")]
    assert parser.push("}") == []
    assert parser.calls == 1


def test_a_call_that_is_cut_off_keeps_what_there_is_of_its_arguments() -> None:
    assert pushed(FREE, '{"name": "add", "arguments": {"a": 1, "b') == ("", [("add", '{"a": 1, "b')])


def test_a_function_that_the_request_has_named_is_its_arguments_alone() -> None:
    assert pushed(NAMED, '{"a"', ": 1}") == ("", [("add", '{"a": 1}')])
    assert CallParser(NAMED).whole('{"a": 1}')[1][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def read(**given: Any) -> tuple[Tools | None, Any]:
    fields, params = Fields({"tools": [WEATHER, ADD]} | given), generation_pb2.SamplingParams()
    tools = read_tools(fields, params)
    fields.check()
    return tools, json.loads(params.structured_outputs.json or "null")


def test_the_choice_says_how_calls_are_written() -> None:
    assert read() == read(tool_choice="auto") == (FREE, None)
    assert read(tool_choice="none") == (None, None)
    assert read(tools=None) == read(tools=[], tool_choice="auto") == (None, None)
    named, schema = read(tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert named is not None
    assert (named.calling, named.names) == (Calling.NAMED, ["get_weather"])
    assert schema == WEATHER["function"]["parameters"]
    required, schema = read(tool_choice="required")
    assert required is not None
    assert required.calling is Calling.REQUIRED
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    calls = schema["items"]["anyOf"]
    assert [call["properties"]["name"] for call in calls] == [{"const": "get_weather"}, {"const": "add"}]
    assert calls[0]["properties"]["parameters"] == WEATHER["function"]["parameters"]
    assert read(tool_choice="required", parallel_tool_calls=False)[1]["maxItems"] == 1


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_references_of_each_functions_schema_stay_within_it(place: str) -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    kinds = {"f": {"enum": ["one"]}, "g": {"enum": [2]}}
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"$ref": f"#/{place}/X"}},
                    "required": ["x"],
                    place: {"X": kind},
                },
            },
        }
        for name, kind in kinds.items()
    ]
    _, schema = read(tools=tools, tool_choice="required")
    for name, x, is_right in (("f", "one", True), ("g", 2, True), ("f", 2, False), ("g", "one", False)):
        assert matches(schema, json.dumps([{"name": name, "parameters": {"x": x}}])) == is_right


def matches(schema: Any, text: str) -> bool:
    """Follow the grammar of a schema token by token."""
    outputs = common_pb2.StructuredOutputs(json=json.dumps(schema), whitespace_pattern=" ?")
    assert TOKENIZER.grammars is not None
    grammar = SessionGrammar(TOKENIZER.grammars.start(grammar_of(outputs), (END,), lambda: None), (END,))
    return grammar.follow([*TOKENIZER.encode(text), END])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": {"f": ADD}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"parallel_tool_calls": 3}, "parallel_tool_calls"),
    ],
)
def test_what_is_wrong_with_tools_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**given)
    assert field in {violation.field for violation in caught.value.violations}
