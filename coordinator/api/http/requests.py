"""The two kinds of request, from JSON to an `Asked`: /v1/completions and /v1/chat/completions."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from outrider.coordinator.api.http.chat_template import ChatTemplate, NoChatTemplate
from outrider.coordinator.api.http.errors import UnknownModel
from outrider.coordinator.api.http.fields import Fields, is_token_ids
from outrider.coordinator.api.http.parameters import (
    MAX_PROMPTS,
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    Asked,
    read_length,
    read_metrics,
    read_sampling,
    read_speculation,
    read_streaming,
    refuse_what_is_not_served,
)
from outrider.coordinator.api.http.structured_fields import names_of
from outrider.coordinator.api.http.tool_calls import Calling, Tools, read_tools
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import FieldViolation, InvalidRequest
from outrider.v1 import generation_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,64}")
_ANY_COUNT = (1 << 32) - 1
_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS_SCHEMA]}},
    ]
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
}


def read_completion(
    fields: Fields, *, model: str, tokenizer: TextTokenizer | None, request_id: str | None = None
) -> Asked:
    """A request to /v1/completions.

    Raises:
        InvalidRequest: names every field that is wrong in itself; what depends on the model is checked later.
    """
    check_model(fields, model)
    prompts = _prompts(fields)
    params, structured_names = read_sampling(fields)
    echo = fields.flag("echo")
    length_name = read_length(fields, params, "max_tokens", low=0 if echo else 1)
    generates = not params.HasField("max_new_tokens") or params.max_new_tokens > 0
    if not generates:
        # What nobody generates is checked as one token would be.
        params.max_new_tokens = 1
    logprobs = fields.whole("logprobs", low=0, high=_ANY_COUNT)
    if logprobs is not None:
        params.logprobs = logprobs
    scores_prompts = echo and logprobs is not None
    has_special_tokens = fields.flag("add_special_tokens", default=True)
    common = _common(fields, params, request_id=request_id, prefix="cmpl")
    choices = params.n or 1
    refuse_what_is_not_served(fields, NEUTRAL, choices=choices)
    fields.check()
    requests = []
    for prompt in prompts:
        request = generation_pb2.GenerateRequest(sampling_params=params, **common["shared"])
        if isinstance(prompt, str) and (tokenizer is None or (has_special_tokens and not scores_prompts)):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            ids = prompt
            if isinstance(prompt, str) and tokenizer is not None:
                ids = tokenizer.encode(prompt, special_tokens=has_special_tokens)
            request.token_ids.ids.extend(ids)  # pyright: ignore[reportArgumentType] a str has become ids
        requests.append(request)
    is_list = len(prompts) > 1
    names = [
        {"max_new_tokens": length_name, **structured_names, **_prompt_names(f"prompt[{i}]" if is_list else "prompt")}
        for i in range(len(prompts))
    ]
    return Asked(
        requests=_with_ids(requests, common["request_id"]),
        choices=choices,
        logprobs=logprobs,
        echo=[_text_of(prompt, tokenizer) for prompt in prompts] if echo else [""] * len(prompts),
        scores_prompts=scores_prompts,
        generates=generates,
        names=names,
        request_id=common["request_id"],
        **common["asked"],
    )


def read_chat(
    fields: Fields,
    *,
    model: str,
    tokenizer: TextTokenizer | None,
    template: ChatTemplate | NoChatTemplate,
    request_id: str | None = None,
    prefix: str = "chatcmpl",
) -> Asked:
    """A request to /v1/chat/completions; as `read_completion`, and `prefix` is in front of the response's id."""
    check_model(fields, model)
    params, structured_names = read_sampling(fields)
    length_name = read_length(fields, params, "max_completion_tokens", "max_tokens")
    logprobs = _chat_logprobs(fields)
    if logprobs is not None:
        params.logprobs = logprobs
    tools = read_tools(fields, params)
    if tools is not None and tools.calling is not Calling.FREE:
        structured_names = names_of("tools")
    conversation = read_conversation(fields, tools)
    has_special_tokens = fields.flag("add_special_tokens")
    common = _common(fields, params, request_id=request_id, prefix=prefix)
    choices = params.n or 1
    refuse_what_is_not_served(fields, NEUTRAL | NEUTRAL_IN_CHAT, choices=choices)
    if tokenizer is None:
        fields.wrong("messages", "this model has no tokenizer: send token ids to /v1/completions")
    fields.check()
    assert tokenizer is not None
    text = template.render(**conversation)
    # Roles, and what else the template was given, are in it, too.
    fields.is_text("messages", text)
    fields.check()
    prompt = tokenizer.encode(text, special_tokens=has_special_tokens)
    request = generation_pb2.GenerateRequest(sampling_params=params, **common["shared"])
    request.token_ids.ids.extend(prompt)
    return Asked(
        requests=_with_ids([request], common["request_id"]),
        choices=choices,
        logprobs=logprobs,
        echo=[""],
        names=[
            {"max_new_tokens": length_name, "logprobs": "top_logprobs", **structured_names, **_prompt_names("messages")}
        ],
        request_id=common["request_id"],
        tools=tools,
        **common["asked"],
    )


def read_conversation(fields: Fields, tools: Tools | None = None) -> dict[str, Any]:
    """Return what a chat's template is rendered with, as arguments of `ChatTemplate.render`."""
    return {
        "messages": _messages(fields),
        "add_generation_prompt": fields.flag("add_generation_prompt", default=True),
        "more": _template_names(fields) | ({"tools": tools.functions} if tools is not None else {}),
    }


def _common(
    fields: Fields, params: generation_pb2.SamplingParams, *, request_id: str | None, prefix: str
) -> dict[str, Any]:
    """Read the fields that both kinds of request share."""
    given = fields.text("request_id")
    if given is not None and not REQUEST_ID.fullmatch(given):
        fields.wrong("request_id", "up to 64 letters, digits and . _ : - needed")
    # Proxies may give one id to several requests, and all are served.
    own_id = uuid.uuid4().hex if request_id is None else f"{request_id}-{uuid.uuid4().hex[:8]}"
    metrics = read_metrics(fields)
    return {
        # Whoever asks how each of its verifications went gets them counted as they come.
        "shared": {"speculation": read_speculation(fields), "trace": metrics != "none" and (params.n or 1) == 1},
        "asked": {
            **read_streaming(fields),
            "return_token_ids": fields.flag("return_token_ids"),
            "metrics": metrics,
            "is_new": given is None,
        },
        "request_id": f"{prefix}-{given or own_id}",
    }


def _with_ids(
    requests: Sequence[generation_pb2.GenerateRequest], request_id: str
) -> Sequence[generation_pb2.GenerateRequest]:
    for place, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else f"{request_id}-{place}"
    return requests


def _prompt_names(name: str) -> dict[str, str]:
    return {"text": name, "token_ids.ids": name, "token_ids": name, "prompt": name}


def check_model(fields: Fields, served: str) -> None:
    """Refuse a request for another model than the one that is served.

    Raises:
        UnknownModel: it names another one.
    """
    given = fields.text("model")
    if given and given != served:
        raise UnknownModel(given[:200], served)


# --------------------------------------------------------------------------------------------------------- completions


def _prompts(fields: Fields) -> list[str | list[int]]:
    given: Any = fields.take("prompt", _PROMPT_SCHEMA)
    if isinstance(given, str) or (given and is_token_ids(given)):
        given = [given]
    if not isinstance(given, list) or not given:
        fields.wrong("prompt", "a string, a list of token ids, or a list of either needed")
        return []
    if len(given) > MAX_PROMPTS:
        fields.wrong("prompt", f"{len(given)} prompts given, at most {MAX_PROMPTS} allowed")
        return []
    for place, prompt in enumerate(given):
        if isinstance(prompt, str):
            fields.is_text(f"prompt[{place}]", prompt)
        elif not is_token_ids(prompt):
            fields.wrong(f"prompt[{place}]", "a string or a list of token ids (whole numbers, 0 or more) needed")
    return given


def _text_of(prompt: str | list[int], tokenizer: TextTokenizer | None) -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequest([FieldViolation("echo", "this model has no tokenizer: leave it out")])
    known = [token_id for token_id in prompt if token_id < tokenizer.vocab_size]
    return tokenizer.decode(known)


# ---------------------------------------------------------------------------------------------------------------- chat


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.take("messages", _MESSAGES_SCHEMA)
    if not isinstance(given, list) or not given:
        fields.wrong("messages", "a list of at least one message needed")
        return []
    return [_message(fields, f"messages[{place}]", message) for place, message in enumerate(given)]


def _message(fields: Fields, path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        fields.wrong(path, 'an object such as {"role": "user", "content": "..."} needed')
        return {}
    content = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            fields.wrong(f"{path}.content", 'only text is served: parts such as {"type": "text", "text": "..."} needed')
            return {}
        content = "\n".join(parts)
    if content is None and not message.get("tool_calls"):
        fields.wrong(f"{path}.content", "missing: text needed")
    elif not isinstance(content, str | None):
        fields.wrong(f"{path}.content", "a string, or a list of parts, needed")
    elif content is not None:
        fields.is_text(f"{path}.content", content)
    return {**message, "content": content} | _with_objects(fields, path, message)


def _with_objects(fields: Fields, path: str, message: dict[str, Any]) -> dict[str, Any]:
    """The calls of an earlier answer, with their arguments as templates take them: objects in the place of JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    found = list[dict[str, Any]]()
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not (isinstance(call, dict) and isinstance(function, dict) and isinstance(function.get("name"), str)):
            fields.wrong(f"{path}.tool_calls", 'objects such as {"id": ..., "function": {"name": ...}} needed')
            return {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                fields.wrong(f"{path}.tool_calls", f"the arguments of {function['name'][:64]} are no JSON")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return {"tool_calls": found}


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, count = fields.flag("logprobs"), fields.whole("top_logprobs", low=0, high=_ANY_COUNT)
    if count and not wanted:
        fields.wrong("top_logprobs", "only with logprobs: true")
    return (count or 0) if wanted else None


def _template_names(fields: Fields) -> dict[str, Any]:
    """Return the variables of a chat template beside the messages."""
    names = fields.take("chat_template_kwargs") or {}
    if not isinstance(names, dict):
        fields.wrong("chat_template_kwargs", "an object needed")
        names = {}
    if fields.take("chat_template") is not None:
        fields.wrong("chat_template", "the service's own template is used: leave it out")
    if (effort := fields.text("reasoning_effort")) is not None:
        names = {"reasoning_effort": effort, **names}
    documents = fields.take("documents")
    if documents is not None:
        names = {"documents": documents, **names}
    return names
