"""benchmarks/streams.py: what counts as lost, and what as wrong."""

import argparse
import asyncio
import math

import pytest
from benchmarks import streams
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings

from outrider.coordinator.loadtest.records import RequestRecord, RoundTime
from outrider.coordinator.loadtest.senders import Ask

SETTINGS = Settings(sessions=4)
MODEL = PathModel(seed=SETTINGS.seed, rank_rates=SETTINGS.rank_rates, spread=SETTINGS.spread)
TOKENS = 5


def share(**changes) -> streams.Share:
    settings = {
        "endpoint": "127.0.0.1:1",
        "settings": SETTINGS,
        "first": 10,
        "count": 4,
        "tokens": TOKENS,
        "mode": "async",
        "begin_s": 0.0,
        "ramp_s": 0.0,
        "traced": 1,
        "timeout_s": 1.0,
    }
    return streams.Share(**settings | changes)


class FakeSender:
    """Gives every stream its tokens; `spoil` maps a key to what it gets instead, or to an error."""

    def __init__(self, spoil: dict[int, tuple[int, ...] | str]) -> None:
        self.spoil = spoil

    async def send(self, ask: Ask, record: RequestRecord, *, begin_s: float) -> tuple[int, ...]:
        key = int(ask.prompt[0])
        right = tuple(MODEL.token(key, 2 + position) for position in range(ask.max_new_tokens))
        given = self.spoil.get(key, right)
        if isinstance(given, str):
            record.error = given
            return ()
        record.sent_s, record.chunk_s = 0.5, [1.0, 2.0]
        record.output_tokens = len(given)
        if ask.is_traced:
            record.rounds = [RoundTime(1, 1, 3_000_000, 0, 4_000_000, 2, 1, result_ns=1_750_000_000)]
        return given


async def read(spoil: dict[int, tuple[int, ...] | str]) -> dict:
    outcome, one = streams.Outcome(), share()
    for place in range(one.count):
        await streams._stream(one, place, FakeSender(spoil), MODEL, outcome)  # pyright: ignore[reportArgumentType]
    options = argparse.Namespace(streams=one.count, tokens=TOKENS)
    return streams._figures(options, [outcome], [100.0, 180.0], after_mib=120.0, cpu_s=[1.0])


def test_streams_that_get_what_they_must_are_neither_lost_nor_wrong():
    figures = asyncio.run(read({}))
    assert (figures["lost"], figures["wrong"]) == (0, 0)
    assert figures["tokens_per_s"] == 4 * TOKENS / 2.0
    assert figures["peak_streams"] == 4
    # The result was there at 1.75 s, its tokens at 2 s; 3 + 4 ms lay beside the step.
    assert figures["p99_delivery_ms"] == pytest.approx(250)
    assert figures["p99_round_ms"] == pytest.approx(7)
    assert figures["memory_kib_per_stream"] == 1024 * 80 / 4


def test_what_ends_early_is_lost_and_what_differs_is_wrong():
    right = tuple(MODEL.token(12, 2 + position) for position in range(TOKENS))
    figures = asyncio.run(read({11: "WorkerUnavailable: gone", 12: right[:-1], 13: (*right[:-1], right[-1] + 1)}))
    assert figures["lost"] == 2
    assert figures["wrong"] == 1
    assert figures["errors"] == ["WorkerUnavailable: gone"]


def test_nothing_traced_has_no_figure():
    assert math.isnan(streams._spread("delivery_ms", [])["p99_delivery_ms"])
