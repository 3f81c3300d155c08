"""Several coordinators at one worker: nobody is promised what another has, and nothing stands idle for long."""

import asyncio

import pytest
from tests.coordinator.fake_workers import FakeTarget, make_request, tokens_read
from tests.polling import until

from outrider.coordinator.sessions.messages import FaultKind
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.workers.shared_places import SharedPlaces, places
from outrider.v1 import common_pb2, registry_pb2

PLACES = 8


@pytest.mark.parametrize(
    ("coordinators", "sessions", "own", "expected"),
    [
        (0, 5, 5, 8),  # of a heartbeat that does not say
        (1, 5, 5, 8),
        (2, 0, 0, 7),  # one is kept for the other
        (2, 7, 7, 7),
        (2, 8, 7, 4),  # it has come: what was borrowed goes back
        (2, 8, 1, 4),  # the share holds, whoever has it now
        (2, 8, 4, 4),
        (2, 6, 2, 4),  # the other has used up its share, and nothing is kept for it
        (2, 6, 5, 6),
        (3, 0, 0, 6),
        (3, 4, 4, 6),
        (16, 0, 0, 1),  # more coordinators than places
    ],
)
def test_places_are_shared_by_need(coordinators: int, sessions: int, own: int, expected: int):
    load = common_pb2.WorkerLoad(coordinators=coordinators, sessions=sessions)
    assert places(PLACES, load, own) == expected


def test_a_refused_place_is_not_used_before_the_worker_is_heard_again():
    shared = SharedPlaces(PLACES)
    assert shared.hear(common_pb2.WorkerLoad(coordinators=1, sessions=8), 8) is False
    shared.hear(common_pb2.WorkerLoad(coordinators=2, sessions=3), 3)
    assert shared.most_sessions == 7
    assert shared.note_refusal(5) is True
    assert shared.most_sessions == 5
    assert shared.hear(common_pb2.WorkerLoad(coordinators=2, sessions=6), 5)
    assert shared.note_refusal(3) is False
    assert shared.most_sessions == 3
    assert shared.note_refusal(4) is True
    assert shared.most_sessions == 3


class Room:
    """Places of one worker, for all coordinators together."""

    def __init__(self) -> None:
        self.held: set[tuple[str, int]] = set()
        self.most = 0


class SharedTarget(FakeTarget):
    """One coordinator's stream to a worker that refuses what it has no place for."""

    def __init__(self, name: str, room: Room) -> None:
        super().__init__(step_s=0.02)
        self.name, self.room = name, room
        self.fault_kind = FaultKind.NO_ROOM
        self.refused = 0

    def open_session(self, opening: common_pb2.SessionOpen) -> None:
        super().open_session(opening)
        if len(self.room.held) < PLACES:
            self.room.held.add((self.name, opening.session_id))
            self.room.most = max(self.room.most, len(self.room.held))
        else:
            self.refused += 1
            self.fail_sessions.add(opening.session_id)

    def close_session(self, session_id: int, epoch: int) -> None:
        self.room.held.discard((self.name, session_id))
        super().close_session(session_id, epoch)


@pytest.fixture
async def pair(make_bench):
    """Two coordinators' schedulers at one worker, which tells both every half second how it is."""
    room, limits = Room(), registry_pb2.WorkerLimits(max_sessions=PLACES)
    schedulers: dict[str, Scheduler] = {}
    targets: dict[str, SharedTarget] = {}
    for name in ("a", "b"):
        bench = make_bench()
        bench.limits = limits
        schedulers[name], targets[name] = bench.scheduler, bench.add_target(target=SharedTarget(name, room))

    async def beat() -> None:
        while True:
            load = common_pb2.WorkerLoad(coordinators=2, sessions=len(room.held))
            for scheduler in schedulers.values():
                scheduler.note_load("target", load)
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    yield schedulers, targets, room
    beating.cancel()


async def serve(scheduler: Scheduler, number: int, *, tokens: int) -> int:
    return len(await tokens_read(scheduler.submit(make_request(number, tokens=tokens), [TextStream(None)])))


async def test_two_coordinators_fill_a_worker_and_never_more(pair):
    schedulers, _, room = pair
    lone = [asyncio.create_task(serve(schedulers["a"], number, tokens=60)) for number in range(14)]
    await until(lambda: len(room.held) == PLACES - 1)
    assert schedulers["a"].waiting_requests == 7
    # One place was kept: the first that comes to the other waits for nobody.
    first = asyncio.create_task(serve(schedulers["b"], 20, tokens=20))
    assert await first == 20
    assert not any(task.done() for task in lone)
    more = [asyncio.create_task(serve(schedulers["b"], 30 + number, tokens=60)) for number in range(10)]
    assert await asyncio.gather(*lone, *more) == [60] * 24
    assert room.most == PLACES
    assert not room.held


async def test_what_was_borrowed_goes_back_as_sessions_end(pair):
    schedulers, targets, room = pair

    async def client(name: str, number: int) -> None:
        while True:
            await serve(schedulers[name], number, tokens=25)

    crowd = [asyncio.create_task(client("a", number)) for number in range(12)]
    await until(lambda: len(room.held) == PLACES - 1)
    crowd += [asyncio.create_task(client("b", 50 + number)) for number in range(12)]
    await until(lambda: sum(name == "b" for name, _ in room.held) == PLACES // 2)
    refused = [target.refused for target in targets.values()]
    await asyncio.sleep(2.0)
    assert sum(name == "b" for name, _ in room.held) == PLACES // 2
    # Both keep to their shares: nobody asks for what is not there.
    assert [target.refused for target in targets.values()] == refused
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


async def test_a_place_that_another_took_first_is_waited_for(pair):
    """Both are promised the same places by one heartbeat."""
    schedulers, targets, room = pair
    tasks = [
        asyncio.create_task(serve(schedulers[name], number, tokens=40)) for name in schedulers for number in range(7)
    ]
    await until(lambda: any(target.refused for target in targets.values()))
    assert await asyncio.gather(*tasks) == [40] * 14
    assert room.most == PLACES
