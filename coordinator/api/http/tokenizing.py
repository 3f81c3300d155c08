"""/tokenize, /detokenize and /tokenizer_info: the model's tokens for clients that count them; the shapes are vLLM's."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.http.chat_template import ChatTemplate, NoChatTemplate
from outrider.coordinator.api.http.errors import json_response
from outrider.coordinator.api.http.fields import Fields, read_json_object
from outrider.coordinator.api.http.requests import check_model, read_conversation
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import FieldViolation, InvalidRequest

# Text and token ids of the longest model that is served have less.
_MOST_BYTES = 16 << 20


def tokenizer_routes(
    generations: Generations, template: ChatTemplate | NoChatTemplate, config: Mapping[str, Any]
) -> list[BaseRoute]:
    """Return the routes."""

    def tokenizer() -> TextTokenizer:
        if generations.tokenizer is None:
            raise InvalidRequest([FieldViolation("model", "this model has no tokenizer")])
        return generations.tokenizer

    async def read(request: Request) -> Fields:
        content, _ = await read_json_object(request.scope, request.receive, most_bytes=_MOST_BYTES)
        fields = Fields(generations.with_own_name(content))
        check_model(fields, generations.model.name)
        return fields

    async def tokenize(request: Request) -> Response:
        fields, own = await read(request), tokenizer()
        is_chat, text = "messages" in fields, ""
        conversation = read_conversation(fields) if is_chat else {}
        if not is_chat and (text := fields.text("prompt") or "") == "" and "prompt" not in fields:
            fields.wrong("prompt", "missing: a string, or messages, needed")
        has_special_tokens = fields.flag("add_special_tokens", default=not is_chat)
        has_names = fields.flag("return_token_strs")
        fields.refuse_others()
        fields.check()
        if is_chat:
            text = template.render(**conversation)
        token_ids = await asyncio.to_thread(own.encode, text, special_tokens=has_special_tokens)
        content: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": generations.model.max_model_len,
            "tokens": token_ids,
        }
        if has_names:
            content["token_strs"] = [own.token_text(token_id) for token_id in token_ids]
        return json_response(content)

    async def detokenize(request: Request) -> Response:
        fields, own = await read(request), tokenizer()
        token_ids = fields.token_ids("tokens")
        if "tokens" not in fields:
            fields.wrong("tokens", "missing: a list of token ids needed")
        if max(token_ids, default=0) >= own.vocab_size:
            fields.wrong("tokens", f"ids below {own.vocab_size} needed: the vocabulary has no others")
        fields.refuse_others()
        fields.check()
        return json_response({"prompt": own.decode(token_ids)})

    async def info(request: Request) -> Response:
        tokenizer()
        return json_response({"eos_token": None, "bos_token": None} | dict(config))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", info, methods=["GET"]),
    ]
