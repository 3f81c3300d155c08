"""What the drill makes of its streams: every token that is not as it was, every break and every pause is counted."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from benchmarks.cluster_drill import Event, Streams

from outrider.errors import WorkerUnavailable

WANTED = [5, 6, 7, 8]


class FakeClient:
    """Streams these (offset, tokens), and then what is given: an error, or an event to wait for."""

    def __init__(self, *deltas, then=None) -> None:
        self._deltas, self._then = deltas, then

    @asynccontextmanager
    async def stream(self, prompt, **options):
        yield self._events()

    async def _events(self):
        for offset, token_ids in self._deltas:
            yield SimpleNamespace(offset=offset, token_ids=token_ids)
        if isinstance(self._then, Exception):
            raise self._then
        if self._then is not None:
            await self._then.wait()


def streams() -> Streams:
    return Streams("unused:1", {}, expected=[WANTED])


@pytest.mark.parametrize(
    ("client", "broken", "changed"),
    [
        (FakeClient((0, [5, 6]), (2, [7, 8])), 0, 0),
        (FakeClient((0, [5, 9]), (2, [7, 8])), 0, 1),
        # Lost in the middle and at the end, doubled with and without its offset.
        (FakeClient((0, [5, 6]), (3, [8])), 0, 1),
        (FakeClient((0, [5, 6]), (2, [7])), 0, 1),
        (FakeClient((0, [5, 6]), (1, [6]), (2, [7, 8])), 0, 1),
        (FakeClient((0, [5, 6]), (2, [7, 8]), (4, [8])), 0, 1),
        # One that breaks is not right for that.
        (FakeClient((0, [5, 6]), then=WorkerUnavailable("gone")), 1, 0),
        (FakeClient((0, [5, 9]), then=WorkerUnavailable("gone")), 1, 1),
    ],
)
async def test_what_a_stream_gave_is_held_against_the_undisturbed_run(client, broken, changed):
    own, event = streams(), Event(name="killed")
    own.begin(event)
    await own.one(client, 0)
    assert (event.streams, event.broken, event.changed) == (1, broken, changed)
    assert not own.running


async def test_a_stream_that_hears_nothing_is_of_every_event_meanwhile():
    own, first, second = streams(), Event(name="first"), Event(name="second")
    waiting = asyncio.create_task(own.one(FakeClient((0, [5]), then=asyncio.Event()), 0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    own.begin(first)
    own.running[0].last_s -= 7.0
    own.end()
    assert first.pause_s >= 7.0
    own.begin(second)
    own.end()
    # The drill ends before it does.
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert [(event.streams, event.broken, event.changed) for event in (first, second)] == [(1, 0, 0)] * 2
