"""A coroutine that is begun at once and awaited later."""

import asyncio

import pytest

from outrider.coordinator.workers.worker_link import Begun


async def test_it_runs_to_its_first_wait_at_once_and_goes_on_where_it_is_awaited():
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    happened = []

    async def work() -> None:
        happened.append("begun")
        happened.append(await gate)
        await asyncio.sleep(0)
        happened.append("ended")

    begun = Begun(work())
    assert happened == ["begun"]
    assert not begun.is_over
    gate.set_result("let through")
    await asyncio.sleep(0)
    assert happened == ["begun"]
    await begun
    assert happened == ["begun", "let through", "ended"]
    assert begun.is_over


async def test_what_waits_for_nothing_is_over_at_once():
    async def work() -> None:
        pass

    begun = Begun(work())
    assert begun.is_over
    await begun


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_is_raised_to_who_awaits(waits):
    async def work() -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("broken")

    begun = Begun(work())
    assert not begun.is_over
    with pytest.raises(ValueError, match="broken"):
        await begun


async def test_it_is_cancelled_with_the_task_that_awaits_it():
    happened = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            happened.append("cancelled")
            raise

    async def wait(begun: Begun) -> None:
        await begun

    task = asyncio.create_task(wait(Begun(work())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert happened == ["cancelled"]
