"""The embedded pair, to be put under load."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.local import LocalService
from outrider.models import embedded_target_path, held_out_prompts


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that runs.

    Attributes:
        endpoint: of its coordinator.
        coordinator_pid: whose memory is watched.
        prompts: for its requests, without end.
    """

    endpoint: str
    coordinator_pid: int
    prompts: Iterator[list[int]]


@contextlib.asynccontextmanager
async def embedded_pair(coordinator_args: Sequence[str], *, seed: int) -> AsyncIterator[Service]:
    """The embedded pair, one thread each."""
    service = LocalService(drafts=1, target_threads=1, coordinator_args=coordinator_args)
    await asyncio.to_thread(service.start)
    try:
        tokenizer = TextTokenizer.load(embedded_target_path())
        prompts = [tokenizer.encode(text)[:18] for text in held_out_prompts()]
        random.Random(seed).shuffle(prompts)
        yield Service(
            endpoint=service.endpoint,
            coordinator_pid=service.processes["coordinator"].pid,
            prompts=itertools.cycle(prompts),
        )
    finally:
        await asyncio.to_thread(service.stop)
