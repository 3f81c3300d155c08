"""The OpenAI door as `outrider bench` asks it: the model's name, and the token ids of a prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.coordinator.bench.prompts import BenchPrompt
from outrider.coordinator.loadtest.client_process import Access
from outrider.coordinator.loadtest.http_connection import HttpError
from outrider.coordinator.loadtest.http_sender import HttpSender
from outrider.errors import LoadtestFailed

# A shorter output says nothing about speed.
LEAST_NEW_TOKENS = 8
_ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A prompt as the service gets it.

    Attributes:
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
        left_out: ids of prompts that leave no room for an output.
        has_template: conversations went through the model's chat template; without one they are plain text.
    """

    model: str
    prompts: Sequence[TokenizedPrompt]
    left_out: Sequence[str]
    has_template: bool


async def tokenize(endpoint: str, prompts: Sequence[BenchPrompt], access: Access) -> Tokenized:
    """Ask the service for the token ids of all prompts.

    Raises:
        LoadtestFailed: the service does not answer, or refuses a prompt.
    """
    door = HttpSender([endpoint], model=None, tls=access.tls, token=access.token)
    try:
        return await _tokenize(door, prompts)
    except (HttpError, OSError, TimeoutError, ValueError, LookupError) as error:
        message = str(error) or f"no answer within {_ANSWER_S:g} s"
        raise LoadtestFailed(f"{endpoint} is no OpenAI door of this project: {message}") from error
    finally:
        await door.close()


async def _tokenize(door: HttpSender, prompts: Sequence[BenchPrompt]) -> Tokenized:
    has_template, tokenized, left_out = True, list[TokenizedPrompt](), list[str]()

    async def tokens(prompt: BenchPrompt) -> tuple[int, ...]:
        nonlocal has_template
        if prompt.messages and has_template:
            try:
                return tuple((await door.ask("POST", "/tokenize", {"messages": prompt.messages}))["tokens"])
            except HttpError as error:
                # The door's words for a model without a template; any other refusal is a mistake in the file.
                if "chat template" not in str(error):
                    raise
                has_template = False
        text = prompt.text or "\n\n".join(message["content"] for message in prompt.messages)
        return tuple((await door.ask("POST", "/tokenize", {"prompt": text}))["tokens"])

    async with asyncio.timeout(_ANSWER_S):
        served = (await door.ask("GET", "/v1/models"))["data"][0]
    for prompt in prompts:
        async with asyncio.timeout(_ANSWER_S):
            token_ids = prompt.token_ids or await tokens(prompt)
        room = min(prompt.max_new_tokens, served["max_model_len"] - len(token_ids))
        if room < min(prompt.max_new_tokens, LEAST_NEW_TOKENS):
            left_out.append(prompt.id)
        else:
            tokenized.append(TokenizedPrompt(prompt=prompt, token_ids=token_ids, max_new_tokens=room))
    return Tokenized(model=served["id"], prompts=tokenized, left_out=left_out, has_template=has_template)
