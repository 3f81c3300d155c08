"""Alarms ring once, and as late as asked at the soonest; on Linux by a timer descriptor, elsewhere by the loop."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from benchmarks.simulation import virtual_time

from outrider.coordinator import alarm as alarms
from outrider.coordinator.alarm import Alarm


@pytest.fixture(params=["descriptor", "loop"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "loop":
        monkeypatch.setattr(alarms, "_LIBC", None)
    elif alarms._LIBC is None:
        pytest.skip("no timer descriptors here")
    return request.param


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def timer_descriptors() -> set[str]:
    """This process's: threads of other tests may open and close sockets meanwhile."""
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir() if alarms._LIBC is not None else ():
        with suppress(FileNotFoundError):
            if "timerfd" in str(link.readlink()):
                found.add(link.name)
    return found


@pytest.mark.parametrize("after_s", [-1.0, 0.0, 1e-9, 0.002, 0.15])
async def test_it_rings_once_and_not_before(kind, after_s):
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(time.monotonic()))
    set_at = time.monotonic()
    alarm.set(after_s)
    assert not rung
    await until(lambda: bool(rung))
    # A loop's timer may be a millisecond early.
    assert rung[0] - set_at >= after_s - 0.0015
    await asyncio.sleep(0.01)
    assert len(rung) == 1
    alarm.set(0.001)
    await until(lambda: len(rung) == 2)
    alarm.close()


@pytest.mark.parametrize("first_s", [0.0, 0.003, 1.0])
async def test_a_cancelled_one_does_not_ring_and_one_set_anew_rings_once(kind, first_s):
    rung: list[int] = []
    alarm = Alarm(lambda: rung.append(1))
    alarm.set(first_s)
    alarm.cancel()
    await asyncio.sleep(0.01)
    assert not rung
    alarm.set(first_s)
    # It may have expired by now, and the loop has not looked.
    time.sleep(0.005)  # noqa: ASYNC251 - the loop is to miss it
    alarm.set(0.005)
    await until(lambda: bool(rung))
    await asyncio.sleep(0.02)
    assert len(rung) == 1
    alarm.close()


async def test_a_closed_one_gives_its_descriptor_back_and_may_be_set_again(kind):
    rung: list[int] = []
    alarm = Alarm(lambda: rung.append(1))
    for _ in range(3):
        before = timer_descriptors()
        alarm.open()
        held = timer_descriptors()
        alarm.set(0.05)
        assert timer_descriptors() == held
        assert len(timer_descriptors() - before) == (kind == "descriptor")
        alarm.close()
        assert timer_descriptors() == before
        alarm.close()
    await asyncio.sleep(0.06)
    assert not rung
    alarm.set(0.001)
    await until(lambda: bool(rung))
    alarm.close()


def test_on_a_simulated_clock_it_keeps_to_that():
    async def main() -> float:
        is_due, begun = asyncio.Event(), asyncio.get_running_loop().time()
        alarm = Alarm(is_due.set)
        alarm.set(0.002)
        await is_due.wait()
        alarm.close()
        return asyncio.get_running_loop().time() - begun

    assert virtual_time.run(main()) == pytest.approx(0.002, abs=1e-6)
