"""Plans over a slot table without a model: who computes what, who waits, and whose slots are taken."""

import random
from collections.abc import Sequence
from itertools import count

import pytest

from outrider.engine.kv_slots import SlotTable
from outrider.sampling import SamplingSpec
from outrider.target_worker.planning import Planner, Work, step_shape
from outrider.target_worker.session_kv import SessionKv
from outrider.target_worker.sessions import Session, TreeRequest
from outrider.target_worker.step_cost import StepCost, StepShape


class Bench:
    """Sessions and plans; a finished plan leaves the KV of what it computed, and commits one token to who verified."""

    def __init__(self, *, num_slots: int = 4000, remembers: bool = True, fills_graphs: bool = False) -> None:
        self.slots = SlotTable(num_slots=num_slots, max_rows=40, max_row_len=2000)
        self.kv = SessionKv(self.slots, remembers=remembers)
        self.cost = StepCost(slowdown=0.4, prior_rows=256)
        self.planner = Planner(self.kv, self.cost, max_tree_nodes=16, fills_graphs=fills_graphs)
        self.sessions: list[Session] = []

    def open(self, tokens: Sequence[int], *, order: int | None = None) -> Session:
        number = len(self.sessions) if order is None else order
        session = Session(
            key=(1, number),
            epoch=1,
            order=number,
            row=self.slots.acquire_row(),
            tokens=list(tokens),
            prompt_len=len(tokens),
            sampling=SamplingSpec(),
            limit=2000,
        )
        self.sessions.append(session)
        self.kv.take(session)
        return session

    def begin(self, asked: Sequence[Session], *, nodes: int = 0, max_rows: int = 512) -> list[Work]:
        works = self.planner.plan(
            [(session, self.tree(session, nodes)) for session in asked], self.sessions, max_rows=max_rows
        )
        for work in works:
            work.session.in_flight = work.rows > 0
        return works

    def finish(self, works: Sequence[Work]) -> None:
        for work in (work for work in works if work.rows):
            session = work.session
            session.in_flight = False
            if work.verifies:
                self.slots.retain(session.row, session.root_index, [0])
                session.tokens.append(7)
            session.note_reached(self.kv.length(session))
            if work.prefill and self.kv.pending(session) == 0:
                self.kv.keep(session)

    def step(self, asked: Sequence[Session], *, nodes: int = 0, max_rows: int = 512) -> dict[int, Work]:
        works = self.begin(asked, nodes=nodes, max_rows=max_rows)
        self.finish(works)
        return {work.session.order: work for work in works}

    def tree(self, session: Session, nodes: int) -> TreeRequest:
        return TreeRequest(
            key=session.key, epoch=1, length=len(session.tokens), tokens=[1] * nodes, parents=list(range(nodes))
        )


def test_choices_of_one_prompt_prefill_it_once() -> None:
    bench = Bench()
    prompt = list(range(100))
    choices = [bench.open(prompt) for _ in range(4)]
    other = bench.open([*range(50), *range(300, 350)])
    first = bench.step([*choices, other], max_rows=60)
    # The first computes; the others wait for it, the one that shares half with it as well.
    assert [first[number].rows if number in first else 0 for number in range(5)] == [60, 0, 0, 0, 0]
    second = bench.step([*choices, other], max_rows=60)
    assert [second[number].rows if number in second else 0 for number in range(5)] == [40, 0, 0, 0, 0]
    third = bench.step([*choices, other], max_rows=60)
    assert [third[number].prefill for number in range(5)] == [0, 0, 0, 0, 49]
    assert [third[number].verifies for number in range(5)] == [True] * 5
    assert [session.cached_tokens for session in bench.sessions] == [0, 99, 99, 99, 50]
    assert bench.slots.used == 99 + 50 + 1 + 4


def test_no_one_waits_for_little() -> None:
    bench = Bench()
    sessions = [bench.open([1, 2, 3, *range(number, number + 90)]) for number in (100, 300)]
    works = bench.step(sessions)
    assert [works[number].prefill for number in range(2)] == [92, 92]


def test_without_a_cache_nobody_waits_and_nothing_is_shared() -> None:
    bench = Bench(remembers=False)
    sessions = [bench.open(range(40)) for _ in range(3)]
    works = bench.step(sessions)
    assert [work.prefill for work in works.values()] == [39] * 3
    assert bench.slots.used == 3 * 40


def test_prefill_beside_a_verification_keeps_the_pace() -> None:
    bench = Bench()
    running = [bench.open([number]) for number in range(16)]
    for _ in range(5):
        works = bench.step(running, nodes=3)
        assert step_shape(works.values()).verify_rows == 64
        bench.cost.observe(StepShape(verify_rows=64), 4e6)
    long = bench.open(range(1000, 2500))
    bench.step([*running, long], nodes=3)
    for _ in range(5):
        bench.cost.observe(StepShape(verify_rows=64, prefill_rows=100), 5e6)
    works = bench.step([*running, long], nodes=3)
    # 40 % of 4 ms at 10 us a row.
    assert (works[16].prefill, works[16].verifies) == (160, False)
    assert all(works[number].nodes == 3 for number in range(16))
    short = bench.open(range(5000, 5040))
    works = bench.step([*running, long, short], nodes=3)
    # A short prompt overtakes the long one, which goes on in what is left.
    assert (works[17].prefill, works[17].verifies, works[16].prefill) == (39, True, 121)
    # One that would take nearly all of it waits its turn.
    medium = bench.open(range(6000, 6131))
    works = bench.step([*running, long, medium], nodes=3)
    assert (works[18].prefill, works[16].prefill) == (0, 160)


def test_chunks_end_where_a_graph_does() -> None:
    bench = Bench(fills_graphs=True)
    running = [bench.open([number]) for number in range(7)]
    bench.step(running)
    long = bench.open(range(1000, 2500))
    # 102 rows are granted at first: 57 of them fill up 64, and prompts that end in this step end.
    assert bench.step([*running, long])[7].prefill == 57
    short = bench.open(range(3000, 3010))
    works = bench.step([*running, long, short])
    assert (works[7].prefill, works[8].prefill, works[8].verifies) == (47, 9, True)
    # What would fill less than half of itself is let be.
    assert bench.step(running[:1], max_rows=90)[7].prefill == 63
    assert bench.step([], max_rows=60)[7].prefill == 60


def test_a_session_in_flight_is_left_alone() -> None:
    bench = Bench(num_slots=100)
    old = bench.open(range(11))
    bench.step([old])
    young = bench.open(range(100, 161))
    flying = bench.begin([young])
    assert young.in_flight and not old.in_flight
    old.tokens += range(500, 560)
    # 61 slots are missing and 28 are free: the young one's cannot be taken now.
    works = bench.begin([old])
    assert [work.rows for work in works] == [0]
    assert bench.planner.preemptions == 0
    bench.finish(flying)
    # Nor does the young one go on and keep them: it is the older one's turn.
    works = bench.begin([young])
    assert {work.session.order: work.rows for work in works} == {1: 0, 0: 60}
    assert bench.planner.preemptions == 1
    assert bench.kv.length(young) == 0
    bench.finish(works)


def test_a_preempted_session_finds_what_is_left_of_its_kv() -> None:
    bench = Bench(num_slots=100)
    old, young = bench.open(range(20)), bench.open(range(100, 150))
    bench.step([old, young])
    assert bench.slots.used == 70
    old.tokens += range(500, 550)
    assert bench.step([old])[0].prefill == 50
    assert (bench.planner.preemptions, bench.slots.used) == (1, 71)
    bench.kv.cut(old, 21)
    old.truncate(22)
    works = bench.step([old, young])
    # 29 of its tokens were still there, which is no gift to it; the older one has kept the rest of its own as well.
    assert works[1].context == 29
    assert young.cached_tokens == 0
    assert young.tokens[-1] == 7


def test_a_session_that_cannot_go_on_leaves_its_room_to_others() -> None:
    bench = Bench(num_slots=60)
    old, young = bench.open(range(20)), bench.open(range(100, 130))
    nodes = [bench.step([old, young], nodes=3)[0].nodes for _ in range(30)]
    # Both fit at first; since the younger one was displaced, nothing of it stands in the way of the older one's trees.
    assert bench.planner.preemptions == 1
    assert nodes[10:] == [3] * 20


@pytest.mark.parametrize("remembers", [True, False])
def test_the_youngest_go_first_and_shared_slots_do_not_count_as_gained(remembers: bool) -> None:
    bench = Bench(num_slots=100, remembers=remembers)
    sessions = [bench.open(range(30)) for _ in range(3)] if remembers else [bench.open(range(30)) for _ in range(2)]
    for _ in range(3):
        bench.step(sessions)
    old = sessions[0]
    free = bench.slots.free
    old.tokens += range(500, 500 + free + 3)
    assert bench.step([old])[0].rows == free + 4
    assert bench.planner.preemptions == (2 if remembers else 1)


class Memory(Bench):
    """A bench whose slots remember what was written to them, with up to two steps in flight."""

    def __init__(self, **options: bool | int) -> None:
        super().__init__(**options)  # pyright: ignore[reportArgumentType]
        self.content: dict[int, tuple[int, ...]] = {}

    def of(self, session: Session) -> list[int]:
        return self.slots.table[session.row, : self.slots.length(session.row)].tolist()

    def begin(self, asked: Sequence[Session], *, nodes: int = 0, max_rows: int = 512) -> list[Work]:
        works = super().begin(asked, nodes=nodes, max_rows=max_rows)
        for work in (work for work in works if work.rows):
            slots = self.of(work.session)
            assert len(slots) == work.context + work.rows
            elsewhere = {slot for other in self.sessions if other is not work.session for slot in self.of(other)}
            known = {slot for edge in self.kv._cache._all() for slot in edge.slots} if self.kv._cache else set()
            for index in range(work.context, len(slots)):
                assert slots[index] not in elsewhere | known, "a shared slot is written"
                self.content[slots[index]] = tuple(work.session.tokens[: index + 1])
        return works

    def close(self, session: Session) -> None:
        self.sessions.remove(session)
        self.kv.release(session)

    def check(self) -> None:
        for session in self.sessions:
            sure = len(session.tokens) if not session.in_flight else session.reached
            for index, slot in enumerate(self.of(session)[:sure]):
                assert self.content[slot] == tuple(session.tokens[: index + 1]), "other tokens' KV"
        held = {slot for session in self.sessions for slot in self.of(session)}
        assert self.slots.used == len(held)
        assert self.slots.free == self.slots.num_slots - len(held)


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_random_traces_with_two_steps_in_flight(seed: int, remembers: bool) -> None:
    rng, memory, flying, numbers = random.Random(seed), Memory(num_slots=150, remembers=remembers), [], count()
    verified = 0
    for _ in range(1000):
        idle = [session for session in memory.sessions if not session.in_flight]
        action = rng.choice(["open", "begin", "begin", "finish", "close", "truncate"])
        if action == "open" and len(memory.sessions) < 6:
            first = 50 * rng.randrange(2)
            prefix = range(first, first + rng.choice([3, 20, 40]))
            memory.open([*prefix, *(rng.randrange(3) for _ in range(6))], order=next(numbers))
        elif action == "begin" and len(flying) < 2:
            asked = [session for session in idle if rng.random() < 0.7]
            flying.append(memory.begin(asked, nodes=rng.randrange(3), max_rows=rng.choice([9, 40, 200])))
        elif action == "finish" and flying:
            verified += sum(work.verifies for work in flying[0])
            memory.finish(flying.pop(0))
        elif action == "close" and idle and rng.random() < 0.3:
            memory.close(rng.choice(idle))
        elif action == "truncate" and idle:
            session = rng.choice(idle)
            length = rng.randint(session.prompt_len, len(session.tokens))
            memory.kv.cut(session, min(length - 1, memory.kv.length(session)))
            session.truncate(length)
        memory.check()
    while flying:
        memory.finish(flying.pop(0))
    assert verified > 150
    assert memory.planner.preemptions > 0
    for session in list(memory.sessions):
        memory.close(session)
    assert (memory.slots.used, memory.slots.free) == (0, 150)


def test_steps_that_overlap_do_not_starve_an_older_session() -> None:
    bench = Bench(num_slots=100)
    old, *young = (bench.open(range(100 * number, 100 * number + 11 + 20 * (number > 0))) for number in range(3))
    bench.step([old, *young])
    flying = [bench.begin([young[0]])]
    # It lacks 71 slots. 26 are free, and one of the young ones, who hold 31 each, is always in flight.
    old.tokens += range(500, 570)
    for turn in range(1, 6):
        flying.append(bench.begin([young[turn % 2]]))
        bench.finish(flying.pop(0))
    assert bench.kv.pending(old) == 0
    assert bench.planner.preemptions == 2
