"""Steps that hang, and pauses that are nobody else's fault."""

import asyncio

import pytest

from outrider.errors import WorkerHung
from outrider.roles import step_watch
from outrider.roles.step_watch import StepWatch, Stopwatch


def test_a_stopwatch_counts_the_same_thing_only() -> None:
    clock = [100.0]
    stopwatch, lasted = Stopwatch(1.0, lambda: clock[0]), []
    for what in ("a", "a", "a", "b", "b", None, None, "b", "b"):
        clock[0] += 1.5
        lasted.append(stopwatch.look(what))
    assert lasted == [0, 1.5, 3.0, 0, 1.5, 0, 0, 0, 1.5]


def test_a_pause_of_the_whole_process_counts_as_one_look() -> None:
    clock = [100.0]
    stopwatch = Stopwatch(1.0, lambda: clock[0])
    stopwatch.look("a")
    clock[0] += 3600
    assert stopwatch.look("a") == 2.0


async def watched(watch: StepWatch, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float) -> None:
    monkeypatch.setattr(step_watch, "_LOOK_S", 0.01)
    async with asyncio.timeout(timeout_s):
        await watch.watch()


async def test_a_step_may_take_ten_times_what_it_usually_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "LEAST_PATIENCE_S", 0.1)
    watch = StepWatch()
    watch.begin(0.03)
    with pytest.raises(WorkerHung, match=r"\d\.\d s, 0\.3 s is the most"):
        await watched(watch, monkeypatch, timeout_s=20)


async def test_nothing_is_said_of_what_rests_gets_on_or_may_be_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "patience_s", lambda usual_s, least_s: 0.2)
    watch = StepWatch()
    assert (watch.age_s, watch.is_preparing) == (0.0, False)
    with pytest.raises(TimeoutError):
        await watched(watch, monkeypatch, timeout_s=0.3)
    watch.begin(None)
    assert watch.is_preparing
    with pytest.raises(TimeoutError):
        await watched(watch, monkeypatch, timeout_s=0.3)
    assert watch.age_s >= 0.3

    async def get_on() -> None:
        while True:
            watch.begin(0.0)
            await asyncio.sleep(0.02)

    working = asyncio.create_task(get_on())
    with pytest.raises(TimeoutError):
        await watched(watch, monkeypatch, timeout_s=0.5)
    working.cancel()
    watch.idle()
    assert watch.age_s == 0.0
