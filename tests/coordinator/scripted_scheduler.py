"""A scheduler that plays scripts: what the tests of all doors share."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from tests.polling import until

from outrider.coordinator.api.access import Access, TokenInterceptor
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.service import SERVICE, GenerationServicer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.generation import Generation
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
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import OutriderError, Overloaded
from outrider.rpc import RoleServer, open_channel
from outrider.v1 import common_pb2, generation_pb2

Play = Callable[[GenerationRequest], Sequence[GenerationEvent | OutriderError | None]]


class ScriptedGeneration(Generation):
    """Plays one event after the other; None waits until it is told to go on, or ended."""

    def __init__(self, request: GenerationRequest, events: Sequence[GenerationEvent | OutriderError | None]) -> None:
        super().__init__(request, max_unread_rounds=1, release=lambda _: self.go_on.set())
        self._script = events
        self.go_on = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.played = 0

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for event in self._script:
            if event is None:
                await self.go_on.wait()
            if self.error is not None:
                raise self.error
            if isinstance(event, OutriderError):
                raise event
            if event is not None:
                self.played += 1
                yield event

    def cancel(self) -> None:
        super().cancel()
        self.is_cancelled.set()


class ScriptedScheduler(Scheduler):
    """Gives out generations made by `play`, and keeps what it was asked."""

    def __init__(self, play: Play) -> None:
        super().__init__(CoordinatorConfig())
        self.play = play
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.error: OutriderError | None = None
        self.room = 100

    def check_room(self, choices: int = 1, *, entry: str = "") -> None:
        if choices > self.room:
            raise Overloaded("full", retry_after_s=2.5)

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> ScriptedGeneration:
        if self.error is not None:
            raise self.error
        assert len(text_streams) == request.n
        self.requests.append(request)
        self.generations.append(ScriptedGeneration(request, self.play(request)))
        return self.generations[-1]


def delta(
    *token_ids: int, text: str = "", index: int = 0, offset: int = 0, logprobs: TokenLogprobs | None = None
) -> TokenDelta:
    """New tokens; as many characters as tokens went before."""
    return TokenDelta(index=index, token_ids=token_ids, text=text, offset=offset, text_offset=offset, logprobs=logprobs)


def result(*tokens: int, **ended: Any) -> GenerationResult:
    """The end of a request whose choices have so many tokens; `LENGTH` is why unless it is said."""
    ended.setdefault("finish_reason", FinishReason.LENGTH)
    return GenerationResult(
        choices=[ChoiceResult(index=index, completion_tokens=count, **ended) for index, count in enumerate(tokens)],
        speculation=SpeculationCounts(verify_steps=2, drafted_tokens=9, accepted_tokens=3),
        queue_s=0.001,
        ttft_s=0.011,
        total_s=0.031,
        cached_tokens=1,
    )


@contextlib.asynccontextmanager
async def grpc_door(
    scheduler: Scheduler,
    *,
    model: common_pb2.ModelInfo,
    info: generation_pb2.ServerInfo | None = None,
    token_file: Path | None = None,
    tokenizer: TextTokenizer | None = None,
) -> AsyncIterator[tuple[grpc.aio.Channel, GenerationServicer]]:
    """The public door over loopback; in the end nothing runs any more."""
    access = Access(token_file)
    generations = Generations(
        scheduler,
        model=model,
        tokenizer=tokenizer,
        limits=RequestLimits(),
    )
    servicer = GenerationServicer(generations, server_info=lambda: info or generation_pb2.ServerInfo(), access=access)
    server = RoleServer(
        services=[SERVICE.full_name],
        add_services=servicer.add_to,
        address="127.0.0.1:0",
        interceptors=[] if token_file is None else [TokenInterceptor(access)],
    )
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield channel, servicer
    finally:
        await server.stop(grace_s=0)
    await until(lambda: not servicer.generations.live)
