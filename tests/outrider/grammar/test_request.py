"""Structures that a request may ask of its output, and the errors of others."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.library import GrammarError
from outrider.grammar.request import ConstraintError, grammar_of
from outrider.models import embedded_target_path
from outrider.v1 import common_pb2

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

TOKENIZER = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))
COMPILER = GrammarCompiler.of_checkpoint(embedded_target_path())
END = 0


def asked(**fields: Any) -> common_pb2.StructuredOutputs:
    if isinstance(fields.get("json"), dict):
        fields["json"] = json.dumps(fields["json"])
    if "choice" in fields:
        fields["choice"] = common_pb2.ChoiceList(values=fields["choice"])
    return common_pb2.StructuredOutputs(**fields)


def matches(grammar: str, text: str) -> bool:
    """Return True if the text, token by token, is a whole output."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    matcher = COMPILER.compile(grammar, (END,)).deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": OBJECT}, ['{"a": 1}', '{ "a" :1, "b": [2]}'], ['{"a": "x"}', '{"b": 1}', '{"a": 1', '{"a": 1}}']),
        ({"json": OBJECT, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', ' {"a":1}']),
        ({"json": OBJECT, "disable_additional_properties": True}, ['{"a":1}'], ['{"a":1,"b":2}']),
        (
            {"json": {**OBJECT, "additionalProperties": True}, "disable_additional_properties": True},
            ['{"a":1,"b":2}'],
            ["{}"],
        ),
        ({"json": OBJECT, "whitespace_pattern": "~"}, ['{~"a":~1}', '{"a":1}'], ['{ "a":1}']),
        ({"json_object": True}, ["{}", '{"x": [1, null]}'], ["[]", "1", ""]),
        ({"regex": "(ab)+c?"}, ["ab", "ababc"], ["", "abc ", "xab", "a"]),
        ({"choice": ["yes", 'no "really"', "a\\b\n", "/[x]/"]}, ["yes", 'no "really"', "a\\b\n", "/[x]/"], ["ye", "x"]),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a", "ba"]),
        ({"grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a", "ba"]),
    ],
)
def test_outputs(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(asked(**fields))
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


def test_objects_within_are_closed_wherever_they_stand() -> None:
    inner = {"type": "object", "properties": {"enum": OBJECT, "x": {"enum": [{"properties": {}}]}}}
    schema = {"$defs": {"d": inner}, "type": "array", "items": {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]}}
    grammar = grammar_of(asked(json=schema, disable_additional_properties=True))
    assert matches(grammar, '[null, {"enum": {"a": 1}, "x": {"properties": {}}}]')
    assert not matches(grammar, '[{"enum": {"a": 1, "b": 2}}]')
    assert not matches(grammar, '[{"y": 1}]')


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({}, "", "empty: give one of json, regex, choice, grammar and json_object"),
        ({"disable_any_whitespace": True}, "", "empty: give one of json, regex, choice, grammar and json_object"),
        ({"json": ""}, "json", "empty: give at least one character"),
        ({"json": "{"}, "json", "not JSON: "),
        ({"json": "[" * 60_000}, "json", "not JSON: "),
        ({"json": "[]"}, "json", "a JSON schema is an object, list given"),
        ({"json": {"x-guidance": {"lenient": True}}}, "json", "x-guidance is not taken"),
        ({"json": " " * 65_537}, "json", "65537 bytes given, at most 65536 allowed"),
        ({"json_object": False}, "json_object", "false given: leave structured_outputs out"),
        ({"regex": ""}, "regex", "empty: give at least one character"),
        ({"regex": "é" * 5_000}, "regex", "10000 bytes given, at most 8192 allowed"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern",
            "only with json and json_object, not with regex",
        ),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace", "not with regex: leave it out"),
        (
            {"json_object": True, "disable_additional_properties": True},
            "disable_additional_properties",
            "only with json,",
        ),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "whitespace_pattern",
            "give one of them",
        ),
        ({"choice": []}, "choice", "empty: give at least one text"),
        ({"choice": ["a", ""]}, "choice.values[1]", "0 bytes given, 1 to 1024 needed"),
        ({"choice": ["a"] * 1025}, "choice", "1025 texts given, at most 1024 allowed"),
        ({"grammar": "no grammar !"}, "grammar", "neither Lark's notation nor GBNF's: "),
    ],
)
def test_what_is_wrong(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(asked(**fields))
    assert caught.value.field == field
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
        ({"json": {"type": "string", "minLength": 2, "maxLength": 1}}, "Unsatisfiable schema"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, "unknown name"),
        # More work than a request may make.
        ({"json": {"allOf": [{"type": "string", "pattern": f".*{word}.*"} for word in "abcdefghijkl"]}}, "regex"),
        (
            {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}.{j}": {}}} for j in range(4)]} for i in range(12)]}},
            "large",
        ),
        ({"regex": "(" * 4000 + "a" + ")" * 4000}, "invalid regex"),
        ({"grammar": "start: " + "(" * 9000 + '"x"' + ")" * 9000}, "too deeply nested"),
    ],
)
def test_what_does_not_compile(fields: dict[str, Any], said: str) -> None:
    grammar = grammar_of(asked(**fields))
    with pytest.raises(GrammarError) as caught:
        COMPILER.compile(grammar, (END,))
    assert said in str(caught.value)
    assert len(str(caught.value)) <= 300
