"""The two kinds of request, from JSON to an `Asked`: /v1/completions and /v1/chat/completions."""

import re
import uuid
from collections.abc import Mapping, Sequence
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
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import FieldViolation, InvalidRequest
from outrider.v1 import generation_pb2

REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,64}")
_ANY_COUNT = (1 << 32) - 1


def read_completion(
    content: Mapping[str, Any], *, model: str, tokenizer: TextTokenizer | None, request_id: str | None = None
) -> Asked:
    """A request to /v1/completions.

    Args:
        content: its JSON.
        model: that is served.
        tokenizer: of it.
        request_id: of the request's headers.

    Raises:
        InvalidRequest: names every field that is wrong in itself; what depends on the model is checked later.
    """
    fields = Fields(content)
    _check_model(fields, model)
    prompts = _prompts(fields)
    params = read_sampling(fields)
    length_name = read_length(fields, params, "max_tokens")
    logprobs = fields.whole("logprobs", low=0, high=_ANY_COUNT)
    if logprobs is not None:
        params.logprobs = logprobs
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        fields.wrong("echo", "not served together with logprobs: the prompt's own are not computed")
    has_special_tokens = fields.flag("add_special_tokens", default=True)
    common = _common(fields, params, request_id=request_id, prefix="cmpl")
    choices = params.n or 1
    refuse_what_is_not_served(fields, NEUTRAL, choices=choices)
    fields.check()
    requests = []
    for prompt in prompts:
        request = generation_pb2.GenerateRequest(sampling_params=params, **common["shared"])
        if isinstance(prompt, str) and (has_special_tokens or tokenizer is None):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            ids = tokenizer.encode(prompt, special_tokens=False) if isinstance(prompt, str) and tokenizer else prompt
            request.token_ids.ids.extend(ids)  # pyright: ignore[reportArgumentType] a str has become ids
        requests.append(request)
    is_list = len(prompts) > 1
    names = [{"max_new_tokens": length_name, **_prompt_names(f"prompt[{i}]" if is_list else "prompt")}
             for i in range(len(prompts))]  # fmt: skip
    return Asked(
        requests=_with_ids(requests, common["request_id"]),
        choices=choices,
        logprobs=logprobs,
        echo=[_text_of(prompt, tokenizer) for prompt in prompts] if echo else [""] * len(prompts),
        names=names,
        request_id=common["request_id"],
        **common["asked"],
    )


def read_chat(
    content: Mapping[str, Any],
    *,
    model: str,
    tokenizer: TextTokenizer | None,
    template: ChatTemplate | NoChatTemplate,
    request_id: str | None = None,
) -> Asked:
    """A request to /v1/chat/completions; arguments and errors as of `read_completion`."""
    fields = Fields(content)
    _check_model(fields, model)
    messages = _messages(fields)
    params = read_sampling(fields)
    length_name = read_length(fields, params, "max_completion_tokens", "max_tokens")
    logprobs = _chat_logprobs(fields)
    if logprobs is not None:
        params.logprobs = logprobs
    _refuse_tools(fields)
    options = {
        "add_generation_prompt": fields.flag("add_generation_prompt", default=True),
        "more": _template_names(fields),
    }
    has_special_tokens = fields.flag("add_special_tokens")
    common = _common(fields, params, request_id=request_id, prefix="chatcmpl")
    choices = params.n or 1
    refuse_what_is_not_served(fields, NEUTRAL | NEUTRAL_IN_CHAT, choices=choices)
    if tokenizer is None:
        fields.wrong("messages", "this model has no tokenizer: send token ids to /v1/completions")
    fields.check()
    assert tokenizer is not None
    text = template.render(messages, **options)
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
        names=[{"max_new_tokens": length_name, "logprobs": "top_logprobs", **_prompt_names("messages")}],
        request_id=common["request_id"],
        **common["asked"],
    )


def _common(
    fields: Fields, params: generation_pb2.SamplingParams, *, request_id: str | None, prefix: str
) -> dict[str, Any]:
    """What both kinds read alike: for every GenerateRequest, for the Asked, and the request's id."""
    given = fields.text("request_id") or request_id
    if given is not None and not REQUEST_ID.fullmatch(given):
        fields.wrong("request_id", "up to 64 letters, digits and . _ : - needed")
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
        "request_id": f"{prefix}-{given or uuid.uuid4().hex}",
    }


def _with_ids(
    requests: Sequence[generation_pb2.GenerateRequest], request_id: str
) -> Sequence[generation_pb2.GenerateRequest]:
    for place, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else f"{request_id}-{place}"
    return requests


def _prompt_names(name: str) -> dict[str, str]:
    return {"text": name, "token_ids.ids": name, "token_ids": name, "prompt": name}


def _check_model(fields: Fields, served: str) -> None:
    given = fields.text("model")
    if given and given != served:
        raise UnknownModel(given[:200], served)


# --------------------------------------------------------------------------------------------------------- completions


def _prompts(fields: Fields) -> list[str | list[int]]:
    given: Any = fields.take("prompt")
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
    given = fields.take("messages")
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
    return {**message, "content": content}


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, count = fields.flag("logprobs"), fields.whole("top_logprobs", low=0, high=_ANY_COUNT)
    if count and not wanted:
        fields.wrong("top_logprobs", "only with logprobs: true")
    return (count or 0) if wanted else None


def _refuse_tools(fields: Fields) -> None:
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    if tools and choice != "none":
        fields.wrong("tools", 'tool calls are not served: leave them out, or give tool_choice "none"')
    elif choice not in (None, "none", "auto"):
        fields.wrong("tool_choice", 'tool calls are not served: only "none" and, without tools, "auto" are')


def _template_names(fields: Fields) -> dict[str, Any]:
    """What a chat template may want to know beside the messages."""
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
