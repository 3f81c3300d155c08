"""The events of one HTTP request: of each of its prompts the scores and the output, of several side by side.

A prompt's own log probabilities are those of an output that is known (`forced_token_ids`): they come from a request of
its own, which begins with the prompt's first token and runs before the one that generates.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from outrider.coordinator.api.http.parameters import Asked, renamed
from outrider.coordinator.sessions.messages import (
    ChoiceResult,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    SpeculationCounts,
    TokenDelta,
    TokenLogprobs,
)
from outrider.errors import InvalidRequest
from outrider.v1 import generation_pb2

# Of several prompts' events, those that wait until the client has read on.
_MOST_EVENTS = 256

Event = GenerationRequest | TokenLogprobs | GenerationEvent
"""Events of a prompt: the checked request, log probabilities of its tokens behind the first, and its output."""
Stream = Callable[[generation_pb2.GenerateRequest], AsyncGenerator[GenerationRequest | GenerationEvent, None]]
Check = Callable[[generation_pb2.GenerateRequest], Awaitable[GenerationRequest]]

_NO_SCORES = TokenLogprobs(token_logprobs=(), top_token_ids=(), top_logprobs=())


async def prompt_events(begin: Stream, check: Check, asked: Asked) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of every prompt, each with its prompt's number."""
    if len(asked.requests) > 1:
        async with contextlib.aclosing(_merged(begin, check, asked)) as merged:
            async for each in merged:
                yield each
        return
    async with contextlib.aclosing(_events(begin, check, asked, 0)) as events:
        async for event in events:
            yield 0, event


async def _events(begin: Stream, check: Check, asked: Asked, prompt: int) -> AsyncGenerator[Event, None]:
    """The events of one prompt: its scores where they are asked for, then its output where there is to be one."""
    request = asked.requests[prompt]
    try:
        has_begun = asked.scores_prompts or not asked.generates
        if has_begun:
            checked = await check(request)
            if asked.scores_prompts and len(checked.prompt_token_ids) > 1:
                async with contextlib.aclosing(begin(_score_of(request))) as events:
                    # Its beginning is the first news of whether there is room.
                    await anext(events)
                    yield checked
                    async for event in events:
                        if isinstance(event, TokenDelta) and event.logprobs is not None:
                            yield event.logprobs
            else:
                yield checked
                if asked.scores_prompts:
                    yield _NO_SCORES
            if not asked.generates:
                yield _without_output(checked)
                return
        async with contextlib.aclosing(begin(request)) as events:
            async for event in events:
                if not (has_begun and isinstance(event, GenerationRequest)):
                    yield event
    except InvalidRequest as error:
        raise renamed(error, asked.names[prompt]) from error


def _score_of(request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
    """Return the request that scores a prompt: an output that is known, behind the first token."""
    first, *rest = request.token_ids.ids
    params = generation_pb2.SamplingParams(forced_token_ids=rest, logprobs=request.sampling_params.logprobs)
    score = generation_pb2.GenerateRequest(request_id=f"{request.request_id}-prompt", sampling_params=params)
    score.token_ids.ids.append(first)
    return score


def _without_output(checked: GenerationRequest) -> GenerationResult:
    ended = [
        ChoiceResult(index=index, finish_reason=FinishReason.LENGTH, completion_tokens=0) for index in range(checked.n)
    ]
    return GenerationResult(choices=ended, speculation=SpeculationCounts(), queue_s=0.0, ttft_s=0.0, total_s=0.0)


async def _merged(begin: Stream, check: Check, asked: Asked) -> AsyncGenerator[tuple[int, Event], None]:
    """Several prompts side by side; none begins before all are accepted, and the first error ends all."""
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(_MOST_EVENTS)

    async def run(prompt: int) -> None:
        end: Exception | None = None
        try:
            async with contextlib.aclosing(_events(begin, check, asked, prompt)) as events:
                async for event in events:
                    await queue.put((prompt, event))
        except Exception as error:  # noqa: BLE001 - a defect has to end the response like any error, not to hang it
            end = error
        await queue.put((prompt, end))

    tasks = [asyncio.create_task(run(prompt)) for prompt in range(len(asked.requests))]
    running, accepted, held = len(tasks), 0, list[tuple[int, Event]]()
    try:
        while running:
            prompt, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            elif isinstance(event, GenerationRequest):
                accepted += 1
                yield prompt, event
            elif accepted < len(tasks):
                held.append((prompt, event))
                continue
            else:
                yield prompt, event
            if accepted == len(tasks) and held:
                for each in held:
                    yield each
                held.clear()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
