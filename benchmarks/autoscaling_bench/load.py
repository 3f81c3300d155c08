"""Clients that come and go, and what they and the deployment say of it, second by second."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.client import AsyncClient
from outrider.deploy.cluster import Deployment
from outrider.models import held_out_prompts

_TOKENS = 256
_LOOK_S = 0.5


@dataclass
class Record:
    """Everything that was seen; times in seconds from the beginning.

    Attributes:
        deltas: (time, tokens) of all clients.
        looks: (time, clients, drafts wanted, drafts serving).
        failures: requests that ended otherwise than they should.
    """

    deltas: list[tuple[float, int]] = field(default_factory=list)
    looks: list[tuple[float, int, int, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Load:
    """As many clients as are asked for, each with one request after the other."""

    def __init__(self, endpoint: str, record: Record, began_s: float) -> None:
        self._client = AsyncClient(endpoint)
        self._record, self._began_s = record, began_s
        self._prompts, self._keys = held_out_prompts(), itertools.count()
        self._clients: list[asyncio.Task[None]] = []

    def resize(self, clients: int) -> None:
        """From now on so many."""
        while len(self._clients) > clients:
            self._clients.pop().cancel()
        while len(self._clients) < clients:
            self._clients.append(asyncio.create_task(self._run()))

    @property
    def clients(self) -> int:
        """That there are."""
        return len(self._clients)

    async def close(self) -> None:
        """Ends all."""
        ended = list(self._clients)
        self.resize(0)
        await asyncio.gather(*ended, return_exceptions=True)
        await self._client.close()

    async def _run(self) -> None:
        while True:
            try:
                prompt = self._prompts[next(self._keys) % len(self._prompts)]
                async with self._client.stream(prompt, max_new_tokens=_TOKENS, ignore_eos=True) as stream:
                    async for delta in stream:
                        self._record.deltas.append((time.monotonic() - self._began_s, len(delta.token_ids)))
            except Exception as error:  # noqa: BLE001 whatever a client is told is a figure of the run
                self._record.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)


async def drive(deployment: Deployment, phases: Sequence[tuple[int, float]]) -> Record:
    """Runs the phases, each so many clients for so many seconds, one after the other."""
    record, began_s = Record(), time.monotonic()
    load = Load(deployment.endpoint, record, began_s)
    looking = asyncio.create_task(_look(deployment, load, record, began_s))
    try:
        for clients, seconds in phases:
            load.resize(clients)
            await asyncio.sleep(seconds)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await load.close()
    return record


async def _look(deployment: Deployment, load: Load, record: Record, began_s: float) -> None:
    while True:
        status = await deployment.status()
        serving = sum(own["role"] == "draft" and own["state"] == "serving" for own in status["workers"])
        record.looks.append((time.monotonic() - began_s, load.clients, status["wanted"]["draft"], serving))
        await asyncio.sleep(_LOOK_S)
