"""Functions that a chat's model may call: what a request says of them, and the calls in what the model has written.

Families write calls in their own ways, each an object with the function's name and its arguments: Qwen and Hermes
between `<tool_call>` and `</tool_call>`, Llama and Mistral at the beginning of the answer, Mistral as a list. One
parser reads all of them. Calls that are required are held to a list of such objects by a grammar, and a function that
is named to its arguments alone.
"""

import enum
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.coordinator.api.http.fields import Fields
from outrider.v1 import generation_pb2

_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_MARK = "<tool_call>"
# What stands between calls, and before the first one of an answer.
_BETWEEN = re.compile(r"(?:\s|[\[\],;]|</?tool_call>)*")
_BEFORE = re.compile(r"\s*\[?\s*")
_ENDS = ("</tool_call>", _MARK)
_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"\s*:')
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ARGUMENTS = ("arguments", "parameters")
_KNOWN_KEYS = {"name", "type", "id", *_ARGUMENTS}


class Calling(enum.Enum):
    """Syntax of tool calls."""

    FREE = enum.auto()
    """As the model was taught, or none at all."""
    REQUIRED = enum.auto()
    """As a list, which a grammar holds the output to."""
    NAMED = enum.auto()
    """As the arguments of one function, likewise."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The functions of a request.

    Attributes:
        functions: as the chat template gets them, which are OpenAI's objects.
        names: theirs; of one that is named, that alone.
        calling: how calls are written.
    """

    functions: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    calling: Calling


class CallPiece(NamedTuple):
    """Something new of an answer: text, or a part of a call.

    Attributes:
        call: number of the call within the answer.
        name: of the function, where the call begins here.
    """

    content: str = ""
    call: int = 0
    name: str = ""
    arguments: str = ""


def read_tools(fields: Fields, params: generation_pb2.SamplingParams) -> Tools | None:
    """Return the functions that a chat's model may call; None for none. A grammar for calls is put into `params`."""
    given, choice = fields.take("tools") or [], fields.take("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    if not isinstance(given, list) or not all(_is_function(tool) for tool in given):
        fields.wrong("tools", 'a list of {"type": "function", "function": {"name": ..., "parameters": {...}}} needed')
        return None
    functions = {tool["function"]["name"]: tool for tool in given}
    if len(functions) < len(given):
        fields.wrong("tools", "two functions of one name: give each its own")
    if choice == "none" or (not given and choice in (None, "auto")):
        return None
    names = _callable_names(fields, choice, list(functions))
    if choice in (None, "auto") or not names:
        return Tools(functions=given, names=names, calling=Calling.FREE)
    if params.HasField("structured_outputs"):
        fields.wrong("tool_choice", "calls that are required are JSON of their own: leave the output's format out")
    is_named = choice != "required"
    schema = _parameters(functions[names[0]]) if is_named else _list_schema(functions, is_parallel=is_parallel)
    params.structured_outputs.json = json.dumps(schema)
    # Without bounds, some models put out white space, or properties that nobody named, until they are cut off.
    params.structured_outputs.whitespace_pattern = " ?"
    params.structured_outputs.disable_additional_properties = True
    return Tools(functions=given, names=names, calling=Calling.NAMED if is_named else Calling.REQUIRED)


def _callable_names(fields: Fields, choice: Any, names: list[str]) -> list[str]:
    if not names:
        fields.wrong("tool_choice", "no tools are given: leave it out")
        return []
    if choice in (None, "auto", "required"):
        return names
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name in names:
        return [name]
    fields.wrong("tool_choice", f'"none", "auto", "required" or one of {", ".join(names)} needed')
    return []


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and _NAME.fullmatch(function["name"]) is not None
        and isinstance(function.get("parameters") or {}, dict)
        and isinstance(function.get("description") or "", str)
    )


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _list_schema(functions: Mapping[str, Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    calls = list[dict[str, Any]]()
    for number, (name, tool) in enumerate(functions.items()):
        # References are from the root, which is another one here.
        own = _with_references(_parameters(tool), f"#/items/anyOf/{number}/properties/parameters")
        properties = {"name": {"const": name}, "parameters": own}
        call = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        calls.append(call | {"additionalProperties": False})
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if is_parallel else {"maxItems": 1})


def _with_references(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_with_references(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_references(value, root) for key, value in schema.items()}
    if isinstance(reference := found.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = root + reference[1:]
    return found


def call_id() -> str:
    """Return a new id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallParser:
    """Finds the calls in one answer, however its text is cut into pieces."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.calls = 0
        """Calls that have begun and ended."""
        # Text that nothing is known of yet; whether a call may begin with it; what stood before the object under way.
        self._held, self._may_begin, self._before = "", True, ""
        self._object: _CallObject | None = None

    def push(self, text: str, *, is_last: bool = False) -> list[CallPiece]:
        """Return what is new with the text that follows; with the last of it, all that is left."""
        if self._tools.calling is Calling.NAMED:
            return self._push_arguments(text)
        self._held += text
        pieces = list(self._pieces(is_last=is_last))
        if is_last and self._held:
            if not self.calls:
                pieces.append(CallPiece(content=self._held))
            self._held = ""
        return pieces

    @property
    def is_free(self) -> bool:
        """True unless the request has named the function, which ends the answer as any other."""
        return self._tools.calling is not Calling.NAMED

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of an answer that has come whole, the calls as OpenAI has them."""
        content, functions = "", dict[int, dict[str, str]]()
        for piece in (*self.push(text), *self.push("", is_last=True)):
            content += piece.content
            if piece.name:
                functions[piece.call] = {"name": piece.name, "arguments": ""}
            if piece.arguments:
                functions[piece.call]["arguments"] += piece.arguments
        return content, [{"id": call_id(), "type": "function", "function": each} for each in functions.values()]

    def _push_arguments(self, text: str) -> list[CallPiece]:
        begins = [] if self.calls else [CallPiece(name=self._tools.names[0])]
        self.calls = 1
        return [*begins, CallPiece(arguments=text)] if text else begins

    def _pieces(self, *, is_last: bool) -> Iterator[CallPiece]:
        while self._held or (is_last and self._object is not None):
            if self._object is not None:
                yield from self._continue_object(self._object, is_last=is_last)
                if self._object is not None:
                    return
            elif self._may_begin:
                found = (_BETWEEN if self.calls or self._before else _BEFORE).match(self._held)
                rest = self._held[found.end() if found else 0 :]
                if rest.startswith("{"):
                    self._before += self._held[: len(self._held) - len(rest)]
                    self._object, self._held = _CallObject(self._tools.names), rest
                elif not is_last and (not rest or any(end.startswith(rest) for end in _ENDS)):
                    return
                else:
                    self._held = rest if self.calls else self._before + self._held
                    self._may_begin, self._before = False, ""
            else:
                content, mark, rest = self._held.partition(_MARK)
                if not mark and not is_last:
                    content = self._held[: len(self._held) - _overlap(self._held)]
                    rest = self._held[len(content) :]
                if content:
                    yield CallPiece(content=content)
                self._held, self._before, self._may_begin = rest, mark, bool(mark)
                if not mark:
                    return

    def _continue_object(self, call: "_CallObject", *, is_last: bool) -> Iterator[CallPiece]:
        text, self._held = self._held, ""
        for name, arguments in call.push(text):
            yield CallPiece(call=self.calls, name=name, arguments=arguments)
        if call.is_other or (is_last and not call.end and not call.has_begun):
            yield CallPiece(content=self._before + call.text)
            self._object, self._before, self._may_begin = None, "", False
        elif call.end:
            self._held = call.text[call.end :]
            self.calls += 1
            self._object, self._before, self._may_begin = None, "", True
        elif is_last:
            # Cut off within its arguments.
            self.calls += 1
            self._object = None


class _CallObject:
    """One JSON object that may be a call, as its text comes.

    Attributes:
        text: all of it so far.
        has_begun: whether its function is known.
        is_other: whether it is no call.
        end: where the object ends in the text; 0 until it does.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.text, self.has_begun, self.is_other, self.end = "", False, False, 0
        self._seen = self._told = self._depth = 0
        self._is_quoted = self._is_escaped = self._has_all = False

    def push(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the function's name once, and pieces of its arguments."""
        self.text += text
        if not self.has_begun:
            if head := _HEAD.match(self.text):
                name = json.loads(head[1])
                self.is_other = name not in self._names
                self.has_begun, self._told = not self.is_other, head.end()
                if self.has_begun:
                    yield name, ""
            elif (key := _KEY.match(self.text)) and key[1] not in _KNOWN_KEYS:
                self.is_other = True
        if self.is_other:
            return
        was_told, arguments_end = self._told, self._scan()
        if self.has_begun and not self._has_all:
            self._told = arguments_end or len(self.text)
            self._has_all = arguments_end > 0
            if self._told > was_told:
                yield "", self.text[was_told : self._told]
        elif self.end and not self.has_begun:
            yield from self._whole()

    def _scan(self) -> int:
        """Look at what is new; return where the arguments end, 0 if they do not yet."""
        arguments_end = 0
        while self._seen < len(self.text) and not self.end:
            char = self.text[self._seen]
            self._seen += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = char == "\\", char != '"'
            elif char == '"':
                self._is_quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1 and self.has_begun and self._seen > self._told and not arguments_end:
                    arguments_end = self._seen
                if not self._depth:
                    self.end = self._seen
        return arguments_end

    def _whole(self) -> Iterator[tuple[str, str]]:
        """The call of an object that does not begin with the function's name."""
        try:
            found = json.loads(self.text[: self.end])
        except ValueError:
            found = {}
        name = str(found.get("name"))
        arguments = next((found[key] for key in _ARGUMENTS if key in found), {})
        self.is_other = name not in self._names or not isinstance(arguments, dict | str)
        if not self.is_other:
            self.has_begun = True
            yield name, ""
            yield "", arguments if isinstance(arguments, str) else json.dumps(arguments)


def _overlap(text: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    return next((size for size in range(min(len(text), len(_MARK) - 1), 0, -1) if text.endswith(_MARK[:size])), 0)
