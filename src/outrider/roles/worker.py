"""The part of a process that both workers share: interpreter, name of the model, end (torch-free)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from outrider.v1 import common_pb2

if TYPE_CHECKING:
    from outrider.engine.checkpoint import ModelCard

_SWITCH_INTERVAL_S = 0.0005


def share_interpreter() -> None:
    """Let the thread of the event loop have the interpreter soon while another thread computes.

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


async def until_any(*awaitables: Awaitable[object]) -> None:
    """Wait for the first to end, cancel the rest, and raise what the first raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
