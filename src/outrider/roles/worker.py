"""What both workers do as processes: share the interpreter, introduce themselves, end (torch-free)."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING

from outrider import __version__
from outrider.drafting.growth_source import GrowthSource, sources_to_proto
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire import WIRE_VERSION

if TYPE_CHECKING:
    from outrider.engine.checkpoint import ModelCard

_SWITCH_INTERVAL_S = 0.0005


def share_interpreter() -> None:
    """Lets the thread of the event loop have the interpreter soon while another thread computes.

    By default a thread gives the interpreter up after 5 ms. A message passes through it several times, so that on two
    busy cores growth and commits arrived in bursts, up to 70 ms late.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def model_info(card: ModelCard) -> common_pb2.ModelInfo:
    """A model's card as it travels."""
    return common_pb2.ModelInfo(
        name=card.name,
        vocab_size=card.vocab_size,
        tokenizer_hash=card.tokenizer_hash,
        dtype=card.dtype,
        max_model_len=card.max_model_len,
        eos_token_ids=card.eos_token_ids,
    )


def introduce(
    role: registry_pb2.WorkerRole,
    *,
    address: str,
    model: common_pb2.ModelInfo,
    limits: registry_pb2.WorkerLimits,
    name: str = "",
    sources: Iterable[GrowthSource] = (),
) -> registry_pb2.WorkerIntroduction:
    """An introduction with an id of its own: make one per process start.

    Args:
        role: draft or target.
        address: host:port of the worker's server, as coordinators can dial it.
        model: what it serves.
        limits: how much of it.
        name: the same after a restart of the process.
        sources: by what a draft grows (none: a model).
    """
    kind = registry_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
    return registry_pb2.WorkerIntroduction(
        worker_id=f"{kind}-{secrets.token_hex(6)}",
        role=role,
        address=address,
        model=model,
        limits=limits,
        version=__version__,
        name=name,
        sources=sources_to_proto(sources),
        wire_version=WIRE_VERSION,
    )


async def until_any(*awaitables: Awaitable[object]) -> None:
    """Waits for the first to end, cancels the rest, and raises what the first raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
