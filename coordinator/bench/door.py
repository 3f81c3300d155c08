"""The OpenAI door as `outrider bench` asks it: the model's name, and the token ids of a prompt."""

import asyncio
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.coordinator.bench.prompts import BenchPrompt
from outrider.coordinator.loadtest.client_process import Access
from outrider.coordinator.loadtest.http_connection import HttpConnection, HttpError
from outrider.errors import LoadtestFailed
from outrider.security.bearer import check_transport
from outrider.security.tls import TlsConfig

# A shorter output says nothing about speed.
LEAST_NEW_TOKENS = 8
_ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A prompt as the service gets it.

    Attributes:
        prompt: of the file.
        token_ids: of the whole prompt, with the chat template's.
        max_new_tokens: asked for, as far as the model's length allows.
    """

    prompt: BenchPrompt
    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """All prompts of a run.

    Attributes:
        model: name of the served model.
        prompts: that fit.
        left_out: ids of prompts that leave no room for an output.
        has_template: conversations went through the model's chat template; without one they are plain text.
    """

    model: str
    prompts: Sequence[TokenizedPrompt]
    left_out: Sequence[str]
    has_template: bool


async def tokenize(endpoint: str, prompts: Sequence[BenchPrompt], access: Access) -> Tokenized:
    """Ask the service for the token ids of all prompts.

    Args:
        endpoint: host:port of the OpenAI door.
        prompts: of the run.
        access: how clients get in.

    Raises:
        LoadtestFailed: the service does not answer, or refuses a prompt.
    """
    door = _Door(endpoint, access)
    try:
        return await door.tokenize(prompts)
    except (HttpError, OSError, TimeoutError, ValueError, LookupError) as error:
        message = str(error) or f"no answer within {_ANSWER_S:g} s"
        raise LoadtestFailed(f"{endpoint} is no OpenAI door of this project: {message}") from error
    finally:
        door.close()


class _Door:
    def __init__(self, endpoint: str, access: Access) -> None:
        tls = None if access.tls_ca is None else TlsConfig(ca=access.tls_ca)
        check_transport(endpoint, tls=tls, token=access.token, insecure=False)
        host, _, port = endpoint.rpartition(":")
        context = None if tls is None else ssl.create_default_context(cafile=str(tls.ca))
        self._connection = HttpConnection(host.strip("[]"), int(port), tls=context)
        self._headers = {"content-type": "application/json"}
        if access.token is not None:
            self._headers["authorization"] = f"Bearer {access.token}"
        self._has_template = True

    async def tokenize(self, prompts: Sequence[BenchPrompt]) -> Tokenized:
        async with asyncio.timeout(_ANSWER_S):
            await self._connection.open()
            served = (await self._ask("GET", "/v1/models"))["data"][0]
        tokenized, left_out = [], []
        for prompt in prompts:
            async with asyncio.timeout(_ANSWER_S):
                token_ids = prompt.token_ids or await self._tokens(prompt)
            room = min(prompt.max_new_tokens, served["max_model_len"] - len(token_ids))
            if room < min(prompt.max_new_tokens, LEAST_NEW_TOKENS):
                left_out.append(prompt.id)
            else:
                tokenized.append(TokenizedPrompt(prompt=prompt, token_ids=token_ids, max_new_tokens=room))
        return Tokenized(model=served["id"], prompts=tokenized, left_out=left_out, has_template=self._has_template)

    async def _tokens(self, prompt: BenchPrompt) -> tuple[int, ...]:
        if prompt.messages and self._has_template:
            try:
                return tuple((await self._ask("POST", "/tokenize", {"messages": prompt.messages}))["tokens"])
            except HttpError as error:
                # The door's words for a model without a template; any other refusal is a mistake in the file.
                if "chat template" not in str(error):
                    raise
                self._has_template = False
        text = prompt.text or "\n\n".join(message["content"] for message in prompt.messages)
        return tuple((await self._ask("POST", "/tokenize", {"prompt": text}))["tokens"])

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        parts = [part async for part in self._connection.request(method, path, headers=self._headers, body=content)]
        return json.loads(b"".join(parts))

    def close(self) -> None:
        self._connection.close()
