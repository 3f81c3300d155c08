"""/v1/responses, without memory: every request brings the whole conversation, and nothing of it is kept.

A request becomes the chat that says the same, and is read as one. What comes back has its own shape: a list of items,
and in a stream named events, each with a number.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.coordinator.api.http.fields import Fields
from outrider.coordinator.api.http.formats import Scores, WholeChoice, compact
from outrider.coordinator.api.http.parameters import Asked
from outrider.coordinator.api.http.requests import read_chat
from outrider.coordinator.api.http.tool_calls import CallParser, CallPiece
from outrider.coordinator.sessions.messages import ChoiceResult, FinishReason, TokenDelta
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import FieldViolation, InvalidRequest

# Ours to a chat's, where they differ.
_NAMES = {"max_output_tokens": "max_completion_tokens"}
# What asks for nothing here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_response(fields: Fields, **how: Any) -> Asked:
    """A request to /v1/responses.

    Raises:
        InvalidRequest: names every field that is wrong, as it is called here.
    """
    chat: dict[str, Any] = {"messages": _messages(fields)}
    for name, allowed in _NEUTRAL.items():
        if (value := fields.take(name)) is not None and value not in allowed:
            fields.wrong(name, "not served: every request brings the whole conversation; leave it out")
    chat["tools"] = [_nested_tool(tool) for tool in _list(fields, "tools")]
    if isinstance(choice := fields.take("tool_choice"), dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    if (text := fields.within("text")) is not None:
        form = text.within("format")
        text.take("verbosity")
        text.refuse_others(kind="a field of text")
        if form is not None and form.take("type") == "json_schema":
            schema = {name: form.take(name) for name in ("name", "description", "schema", "strict") if name in form}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form is not None:
            chat["response_format"] = {"type": form.take("type")}
    if (reasoning := fields.within("reasoning")) is not None:
        chat["reasoning_effort"] = reasoning.text("effort")
        reasoning.take("summary")
        reasoning.refuse_others(kind="a field of reasoning")
    fields.check()
    chat |= {_NAMES.get(name, name): value for name, value in fields.unread().items()}
    chat |= {"n": 1, "return_token_ids": False}
    try:
        asked = read_chat(Fields(chat), prefix="resp", **how)
    except InvalidRequest as error:
        raise InvalidRequest([_renamed(violation) for violation in error.violations]) from error
    names = {name: _renamed(FieldViolation(field, "")).field for name, field in asked.names[0].items()}
    asked.names[0].update(names)  # pyright: ignore[reportAttributeAccessIssue] read_chat makes a dict
    return asked


def _renamed(violation: FieldViolation) -> FieldViolation:
    field = violation.field
    for theirs, ours in (
        ("max_completion_tokens", "max_output_tokens"),
        ("messages", "input"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
    ):
        if field.startswith(theirs):
            field = ours + field.removeprefix(theirs)
            break
    return FieldViolation(field, violation.description, violation.code)


def _list(fields: Fields, name: str) -> list[Any]:
    value = fields.take(name)
    if value is None or isinstance(value, list):
        return value or []
    fields.wrong(name, "a list needed")
    return []


def _nested_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = list[dict[str, Any]]()
    if (instructions := fields.text("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
    given = fields.take("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        fields.wrong("input", "a string, or a list of at least one item, needed")
        return messages
    for place, item in enumerate(given):
        message = _message(item) if isinstance(item, dict) else None
        if message is None:
            fields.wrong(f"input[{place}]", "a message, a function_call or a function_call_output needed")
        elif "tool_calls" in message and messages and "tool_calls" in messages[-1]:
            # Calls that were made together are one message of a chat.
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": _content(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    return None


def _content(content: Any) -> Any:
    """A message's parts, as a chat's."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


class ResponsesFormat:
    """Format of /v1/responses; arguments as of `CompletionFormat`."""

    def __init__(self, asked: Asked, *, model: str, created: int, tokenizer: TextTokenizer | None) -> None:
        del tokenizer
        params, tools = asked.requests[0].sampling_params, asked.tools
        self._about: dict[str, Any] = {
            "id": asked.request_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": params.max_new_tokens if params.HasField("max_new_tokens") else None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "tool_choice": "auto",
            "tools": [] if tools is None else [{"type": "function", **each["function"]} for each in tools.functions],
            "top_p": params.top_p if params.HasField("top_p") else 1.0,
            "truncation": "disabled",
        }
        self._parser = None if tools is None else CallParser(tools)
        self._number, self._items = 0, list[dict[str, Any]]()
        # The item that is open: the last of `_items`.
        self._is_open, self._reason = False, FinishReason.STOP

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """None are served here."""
        del delta, index
        return ()

    def first(self, index: int, prompt_token_ids: Sequence[int], echo: str, scores: Scores) -> str:
        """The events before the first tokens."""
        del index, prompt_token_ids, echo, scores
        begun = {**self._about, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunk(self, delta: TokenDelta, index: int, usage: str) -> str:
        """New tokens."""
        del index, usage
        pieces = [CallPiece(content=delta.text)] if self._parser is None else self._parser.push(delta.text)
        return "".join(self._piece(piece) for piece in pieces)

    def last(self, choice: ChoiceResult, index: int, usage: str) -> str:
        """Return the events of the text that is left."""
        del index, usage
        self._reason = choice.finish_reason
        pieces = [] if self._parser is None else self._parser.push("", is_last=True)
        return "".join(self._piece(piece) for piece in pieces) + self._close()

    def end(self, usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The end of a stream."""
        response = self._response(self._items, usage) | metrics
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: dict[str, Any]) -> str:
        """The end of a stream that an error has ended."""
        about = {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]}
        response = {**self._about, "status": "failed", "error": about, "output": self._items, "usage": None}
        return self._event("response.failed", response=response)

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The response that is not a stream."""
        (choice,) = choices
        assert choice.result is not None
        self._reason = choice.result.finish_reason
        text = "".join(choice.texts)
        content, calls = (text, []) if self._parser is None else self._parser.whole(text)
        items = [_text_item(content)] if content or not calls else []
        items += [_call_item(call["function"], call["id"]) for call in calls]
        return compact(self._response(items, usage) | metrics)

    def _response(self, items: Sequence[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        is_cut = self._reason is FinishReason.LENGTH
        return self._about | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _event(self, kind: str, **content: Any) -> str:
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\ndata: {compact({'type': kind, 'sequence_number': number, **content})}\n\n"

    def _piece(self, piece: CallPiece) -> str:
        told = ""
        if piece.content:
            if not self._is_open or self._items[-1]["type"] != "message":
                told = self._open(_text_item(""), part=True)
            item = self._items[-1]
            item["content"][0]["text"] += piece.content
            told += self._event(
                "response.output_text.delta", **self._place(part=True), delta=piece.content, logprobs=[]
            )
        if piece.name:
            told += self._open(_call_item({"name": piece.name, "arguments": ""}))
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            told += self._event("response.function_call_arguments.delta", **self._place(), delta=piece.arguments)
        return told

    def _open(self, item: dict[str, Any], *, part: bool = False) -> str:
        told = self._close()
        self._items.append(item)
        self._is_open = True
        begun = {**item, "status": "in_progress"} | ({"content": []} if part else {})
        told += self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun)
        if part:
            told += self._event("response.content_part.added", **self._place(part=True), part=item["content"][0])
        return told

    def _close(self) -> str:
        if not self._is_open:
            return ""
        self._is_open, item, told = False, self._items[-1], ""
        if item["type"] == "message":
            place, part = self._place(part=True), item["content"][0]
            told += self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            told += self._event("response.content_part.done", **place, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            told += self._event("response.function_call_arguments.done", **self._place(), **done)
        return told + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, *, part: bool = False) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if part else {})


def _text_item(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": _id("msg"), "status": "completed", "role": "assistant", "content": content}


def _call_item(function: Mapping[str, str], call_id: str = "") -> dict[str, Any]:
    call_id = call_id or _id("call")
    return {"type": "function_call", "id": _id("fc"), "call_id": call_id, "status": "completed", **function}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
