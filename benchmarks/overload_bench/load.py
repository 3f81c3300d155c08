"""Requests that come whether or not the others are done, and what became of each."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from outrider.client_errors import error_of
from outrider.errors import Overloaded
from outrider.rpc import CHANNEL_OPTIONS
from outrider.v1 import generation_pb2, generation_pb2_grpc

_CHANNELS = 4
_DEADLINE_S = 120.0
_TICK_S = 0.01


@dataclass(kw_only=True)
class Request:
    """One request; times are by `time.monotonic`, 0 where it did not come to that.

    Attributes:
        due: when it was to be sent.
        retry_after_s: what a refusal told; None without RetryInfo.
    """

    due: float
    sent: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    status: str = ""
    message: str = ""
    retry_after_s: float | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether it was served to its end."""
        return self.status == "OK"

    @property
    def is_refused(self) -> bool:
        """Whether it was turned away before anything of it was served."""
        return self.status == "RESOURCE_EXHAUSTED" and not self.first_token


@dataclass(kw_only=True)
class Lags:
    """How late this process's event loop was, by ticks of 10 ms: what the client's side adds to every time."""

    late_s: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.late_s.append(time.monotonic() - due)


class LoadGenerator:
    """Sends requests to one coordinator; use with `async with`.

    Args:
        prompts: taken in turn.
        max_new_tokens: of every request.
        seed: of the arrivals and of the requests' noise.
    """

    def __init__(self, endpoint: str, prompts: Iterator[list[int]], *, max_new_tokens: int, seed: int) -> None:
        self._channels = [
            grpc.aio.insecure_channel(endpoint, options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
            for _ in range(_CHANNELS)
        ]
        self._stubs = itertools.cycle([generation_pb2_grpc.GenerationServiceStub(c) for c in self._channels])
        self._prompts, self._max_new_tokens = prompts, max_new_tokens
        self._random = random.Random(seed)

    async def __aenter__(self) -> "LoadGenerator":
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def open_loop(self, rate: float, seconds: float) -> list[Request]:
        """Send Poisson arrivals of so many a second; return when all that came in have ended."""
        requests: list[Request] = []
        tasks: list[asyncio.Task[None]] = []
        end = (due := time.monotonic()) + seconds
        while (due := due + self._random.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            requests.append(request := Request(due=due))
            tasks.append(asyncio.create_task(self._send(request)))
        await asyncio.gather(*tasks)
        return requests

    async def closed_loop(self, clients: int, seconds: float) -> list[Request]:
        """Run so many clients, each with its next request as soon as the last one has ended, in whatever way."""
        requests: list[Request] = []
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                requests.append(request := Request(due=time.monotonic()))
                await self._send(request)

        await asyncio.gather(*(client() for _ in range(clients)))
        return requests

    async def _send(self, request: Request) -> None:
        message = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=next(self._prompts)),
            sampling_params=generation_pb2.SamplingParams(max_new_tokens=self._max_new_tokens, ignore_eos=True),
        )
        request.sent = time.monotonic()
        call = next(self._stubs).Generate(message, timeout=_DEADLINE_S)
        try:
            async for event in call:
                if event.HasField("delta"):
                    request.first_token = request.first_token or time.monotonic()
                    request.tokens += len(event.delta.token_ids)
            request.status = "OK"
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
            request.status, request.message = failure.code().name, str(error)
            request.retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        request.ended = time.monotonic()
