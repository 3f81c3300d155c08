"""A search over all schedules of host and device around a ring: what both do, in every order that matters.

`first_fault` looks through all schedules. Host and device are greenlets that run the production classes and operators
on `Shared` memory, and may change places wherever that makes a difference. A schedule is followed to its end, then the
last choice that has an alternative is taken anew, until none is left. Two things keep this small without leaving
anything out:

- *Signals* are the words by which the sides learn of each other: head, and the number of a round in a buffer. The sides
  change places before every load and store of a signal. Any other access has to be ordered by signals: it is a fault if
  the other side accesses the same word and neither side knows which comes first, whatever the schedule. As long as
  there is no such fault, changing places before these accesses shows nothing new (one scenario does it all the same).
- A side is a program without chance, so what it has done and read says all about what it will do. A schedule ends where
  another one has been with both sides in the same state.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.engine.round_rings import Inbox, RingMemory, Rounds
from outrider.kernels.pool.records import WORDS, RecordKind
from outrider.kernels.pool.rings import publish_early_reference, publish_report_reference, take_records_reference

# A machine with a GPU may be without it.
greenlet: Any = importlib.import_module("greenlet") if importlib.util.find_spec("greenlet") else None

OPEN, CLOSE, LIMITS = RecordKind.OPEN, RecordKind.CLOSE, RecordKind.LIMITS
GROWTH, SLOTS = RecordKind.GROWTH, RecordKind.SLOTS


class Seen(Exception):
    """Another schedule has been here."""


class Side:
    """The host or the device.

    Attributes:
        history: what it has done and read, as a number.
        readings: what stood where it has read, of late.
        time: number of the signals it has given.
        knows: up to which signal of the other side it knows what that one has done.
    """

    def __init__(self, program: Callable[[], None]) -> None:
        self.run = greenlet.greenlet(program)
        self.can_go_on: Callable[[], bool] | None = None
        self.is_chosen = False
        self.history = 0
        self.readings: dict[tuple[int, int], tuple[Shared, int, Any]] = {}
        self.time, self.knows = 1, 0

    def signal(self) -> int:
        """Everything done so far is known to whoever learns of the signal with this number."""
        self.time += 1
        return self.time - 1

    def note(self, what: Any) -> None:
        self.history = hash((self.history, what))

    def is_ready(self) -> bool:
        return not self.run.dead and (self.can_go_on is None or self.can_go_on())


class Schedule:
    """One order of both sides' steps: as `prefix` says, then without a change of sides wherever there is a choice."""

    def __init__(self, prefix: tuple[int, ...], seen: set[int]) -> None:
        self._prefix, self._seen = prefix, seen
        self.choices: list[tuple[int, int]] = []

    def run(self, host: Callable[[], None], device: Callable[[], None]) -> None:
        """Run until no side can go on."""
        self._hub = greenlet.getcurrent()
        self.host, self.device = Side(host), Side(device)
        self._other, self.now = self.host, self.device
        try:
            while self.now.is_ready() or self._other.is_ready():
                if self.now.is_ready():
                    self.now.run.switch()
                else:
                    self._change()
            assert self.host.run.dead, "the host is stuck"
        finally:
            self.host.run.throw()
            self.device.run.throw()

    def choose(self, options: int, what: str) -> int:
        """Return the index of the option that the present side takes next."""
        choice = self._choice(options, what)
        self.now.note(choice)
        return choice

    def turn(self) -> None:
        """Let the other side come first, or not."""
        side = self.now
        if not side.is_chosen and self._other.is_ready() and self._choice(2, "turn"):
            self._other.is_chosen = True
            self._change()
        side.is_chosen = False

    def wait(self, can_go_on: Callable[[], bool]) -> None:
        """Let the other side come until the present one can go on, or longer."""
        side = self.now
        side.can_go_on = can_go_on
        if not can_go_on():
            if self._other.is_ready():
                self._change()
            else:
                self._hub.switch()
        side.can_go_on = None

    def _choice(self, options: int, what: str) -> int:
        if len(self.choices) < len(self._prefix):
            choice = self._prefix[len(self.choices)]
        else:
            state = hash((what, self.host.history, self.device.history))
            if state in self._seen:
                raise Seen
            self._seen.add(state)
            choice = 0
        self.choices.append((choice, options))
        return choice

    def _change(self) -> None:
        self.now, self._other = self._other, self.now
        self.now.run.switch()


def first_fault(scenario: Scenario) -> tuple[Exception | None, int]:
    """The first fault that a schedule leads to, None if none does; and how many schedules were followed."""
    seen: set[int] = set()
    prefixes: list[tuple[int, ...]] = [()]
    followed = 0
    while prefixes:
        prefix = prefixes.pop()
        schedule = Schedule(prefix, seen)
        followed += 1
        try:
            World(schedule, scenario).run()
        except Seen:
            pass
        except Exception as fault:  # noqa: BLE001 - any fault is what this looks for
            return fault, followed
        taken = tuple(choice for choice, _ in schedule.choices)
        for index in range(len(prefix), len(taken)):
            prefixes += [(*taken[:index], other) for other in range(1, schedule.choices[index][1])]
    return None, followed


class Shared:
    """Memory of both sides. Its cells, records of a ring or else words, are loaded and stored one at a time."""

    def __init__(self, schedule: Schedule, tensor: torch.Tensor, *, signals: Any, every_access: bool) -> None:
        self._schedule, self._every_access, self.shape = schedule, every_access, tensor.shape
        of_records = tensor.dtype == torch.int32
        self._dtype, self._cell_shape = (np.int32, (WORDS,)) if of_records else (np.int64, ())
        self._cells: list[Any] = (tensor if of_records else tensor.reshape(-1)).tolist()
        self._places = np.arange(len(self._cells)).reshape(tensor.shape[:1] if of_records else tensor.shape)
        # Numbers of the signals that stand there.
        self._signals = dict.fromkeys(self._places[signals].ravel().tolist(), 0)
        # Side and time of the last load and of the last store.
        self._loads: dict[int, tuple[Side, int]] = {}
        self._stores: dict[int, tuple[Side, int]] = {}

    def numpy(self) -> Shared:
        return self

    def __getitem__(self, key: Any) -> Any:
        places = self._places[key].tolist()
        if isinstance(places, int):
            return self._load(places)
        # A load of records takes them one by one, a load of words too.
        return np.array([self._load(place) for place in places], self._dtype).reshape((-1, *self._cell_shape))

    def __setitem__(self, key: Any, values: Any) -> None:
        places = self._places[key].tolist()
        cells = values.tolist() if hasattr(values, "tolist") else values
        for place, cell in [(places, cells)] if isinstance(places, int) else zip(places, cells, strict=True):
            self._store(place, cell)

    def _load(self, place: int) -> Any:
        if self._every_access or place in self._signals:
            self._schedule.turn()
        side, cell = self._schedule.now, self._cells[place]
        side.note(cell if isinstance(cell, int) else tuple(cell))
        side.readings[id(self), place] = (self, place, cell)
        if place in self._signals:
            side.knows = max(side.knows, self._signals[place])
        else:
            by, when = self._stores.get(place, (side, 0))
            assert by is side or when <= side.knows, "read what the other side may not have written yet"
            self._loads[place] = (side, side.time)
        return cell

    def _store(self, place: int, cell: Any) -> None:
        if self._every_access or place in self._signals:
            self._schedule.turn()
        side = self._schedule.now
        if place in self._signals:
            self._signals[place] = side.signal()
        else:
            by, when = self._loads.get(place, (side, 0))
            assert by is side or when <= side.knows, "overwrote what the other side may still read"
            self._stores[place] = (side, side.time)
        self._cells[place] = cell
        side.note("stored")

    def differs(self, place: int, cell: Any) -> bool:
        return self._cells[place] != cell


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Messages to the host, each as early or late as a schedule will have it.

    Messages, each of a session: open, grow (by n nodes), hold, resume, settle (only once nothing is under way: all that
    came has taken effect), close.
    """

    messages: tuple[str, ...]
    rows: int = 1
    ring: int = 8
    most: int = 2
    tokens: int = 1
    every_access: bool = False


@dataclass(kw_only=True)
class Opening:
    """A session as the device knows it."""

    session: int
    generation: int
    left: int
    slot: int = -1
    held: bool = False
    limits: int = -1
    queued: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    @property
    def can_run(self) -> bool:
        return self.left > 0 and self.slot >= 0 and not self.held


@dataclass(kw_only=True)
class Client:
    """A session as the host knows it. Its records are numbered."""

    session: int
    row: int
    generation: int
    slot: int = -1
    sent: int = 0
    limits: int = -1
    queued: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


class World:
    """Host and device, what each did, and what must be true of it.

    A record is (kind, row, generation, number, value, 0, 0, session), so the device can tell which one of whose it is.
    A round's early word is 10 x the bucket of the next round + the rows that take part. Its report is the rows that can
    run, then for each row 1000 x its generation + the token.
    """

    def __init__(self, schedule: Schedule, scenario: Scenario) -> None:
        self.schedule, self.scenario = schedule, scenario
        rows, every = scenario.rows, scenario.every_access
        memory = RingMemory.allocate(records=scenario.ring, early_words=1, report_words=1 + rows, pinned=False)
        # Stands for a `RingMemory`.
        shared: Any = SimpleNamespace(
            ring=Shared(schedule, memory.ring, signals=[], every_access=every),
            head=Shared(schedule, memory.head, signals=[0], every_access=every),
            early=Shared(schedule, memory.early, signals=np.s_[:, 0], every_access=every),
            reports=Shared(schedule, memory.reports, signals=np.s_[:, 0], every_access=every),
        )
        self.shared = shared
        self.inbox = Inbox(shared, rows=rows)
        self.rounds = Rounds(shared, self.inbox)
        # The host's.
        self.messages = [message.split() for message in scenario.messages]
        self.clients: dict[int, Client] = {}
        self.by_row: dict[Any, Client] = {}
        self.free_rows, self.free_slots = rows, list(range(rows))
        self.can_run, self.bucket, self.events = False, 99, 0
        self.launches: list[int] = []
        self.reports: list[Any] = []
        # The device's.
        self.openings: list[Opening | None] = [None] * rows
        self.closed: list[Opening] = []
        self.wrote: list[list[int]] = []
        self.tails = [0]
        self.idle_rounds = 0

    def run(self) -> None:
        self.schedule.run(self.run_host, self.run_device)
        assert len(self.closed) == len(self.clients), "a session was not closed"
        assert self.free_rows == len(self.free_slots) == self.scenario.rows, "a row or a slot was not given back"
        assert self.events == len(self.wrote) == 2 * len(self.launches), "a report was not read"
        for report in self.reports:
            self.deliver(report)
        for opening in self.closed:
            assert self.clients[opening.session].received == opening.emitted, "tokens were lost"

    def run_host(self) -> None:
        side, told_inbox = self.schedule.host, 0
        while not (self.is_quiet() and not self.messages):
            # With the state of the device, this is all that the host's next step depends on: polls in vain change
            # nothing.
            side.history = hash((told_inbox, self.events, len(self.launches)))
            side.readings.clear()
            assert not (self.is_quiet() and self.rounds.may_launch(self.can_run)), "launched while nothing was to do"
            if self.messages and self.is_due(self.messages[0][0]):
                verb, session, *count = self.messages.pop(0)
                self.receive(verb, int(session), *map(int, count))
                told_inbox = hash((told_inbox, "message"))
            elif (event := self.rounds.poll()) is not None:
                self.take(event)
                if self.events % 2 == 0 and self.tails[event.round] != self.tails[event.round + 1]:
                    told_inbox = hash((told_inbox, "tail"))
            elif self.rounds.may_launch(self.can_run):
                self.launch()
            else:
                read = tuple(side.readings.values())
                self.schedule.wait(lambda read=read: any(memory.differs(*cell) for memory, *cell in read))

    def is_quiet(self) -> bool:
        return not (self.rounds.under_way or self.can_run or self.inbox.has_records)

    def is_due(self, verb: str) -> bool:
        possible = {
            "open": self.free_rows > 0 and len(self.free_slots) > 0,
            "settle": self.is_quiet(),
        }.get(verb, True)
        if not possible or self.is_quiet():
            return possible
        self.schedule.turn()
        return self.schedule.choose(2, "message") == 0

    def receive(self, verb: str, session: int, count: int = 1) -> None:
        if verb == "open":
            taken = self.inbox.take_row()
            assert taken is not None, "a free row was not handed out"
            row, generation = taken
            assert self.openings[row] is None, "a row was handed out while a launched round could use it"
            self.free_rows -= 1
            self.clients[session] = Client(session=session, row=row, generation=generation)
            self.by_row[row, generation] = self.clients[session]
            self.put(session, OPEN)
        client = self.clients[session]
        if verb == "open":
            client.slot = self.free_slots.pop()
            assert all(opening is None or opening.slot != client.slot for opening in self.openings), (
                "a slot was handed out while a launched round could use it"
            )
            self.put(session, SLOTS, value=client.slot)
        elif verb == "grow":
            self.put(session, GROWTH, count=count)
        elif verb in {"hold", "resume"}:
            client.limits = client.sent
            self.put(session, LIMITS, value=int(verb == "hold"))
        elif verb == "settle":
            opening = self.openings[client.row]
            assert opening is not None, "a session was not opened"
            assert opening.limits == client.limits, "limits did not take effect"
            assert opening.queued == client.queued, "queued records did not take effect"
        elif verb == "close":
            self.put(session, CLOSE)

    def put(self, session: int, kind: RecordKind, *, count: int = 1, value: int = 0) -> None:
        client = self.clients[session]
        numbers = range(client.sent, client.sent + count)
        client.sent += count
        if kind in {SLOTS, GROWTH}:
            client.queued += numbers
        rows = [(kind, client.row, client.generation, number, value, 0, 0, session) for number in numbers]
        self.inbox.put(np.array(rows, np.int32))

    def take(self, event: Any) -> None:
        assert event.round == self.events // 2, "a report was read out of order"
        words = event.words.tolist()
        assert self.events < len(self.wrote) and words == self.wrote[self.events], "a report is not as it was written"
        self.events += 1
        self.can_run = words[0] % 10 > 0
        if self.events % 2:
            self.bucket = words[0] // 10
            return
        self.reports.append(event)
        for release in event.released:
            client = self.by_row[release.row, release.generation]
            self.free_rows += release.closed
            if client.slot >= 0:
                self.free_slots.append(client.slot)
            client.slot = -1

    def launch(self) -> None:
        round_ = self.rounds.launched()
        self.launches.append(self.schedule.host.signal())
        assert self.bucket == 99 + round_, "launched before its bucket was known"
        assert round_ < 20, "rounds without end"

    def deliver(self, report: Any) -> None:
        for row, word in enumerate(report.words[1:].tolist()):
            generation, token = divmod(word, 1000)
            if token:
                client = self.by_row[row, generation]
                assert token // 100 == client.session, "a token was delivered to another session"
                client.received.append(token)

    def run_device(self) -> None:
        shared, side = self.shared, self.schedule.device
        records = torch.zeros(self.scenario.most, WORDS, dtype=torch.int32)
        count = torch.zeros(1, dtype=torch.int32)
        tail, rounds, began = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
        while True:
            round_ = int(rounds[0])
            self.schedule.wait(lambda round_=round_: len(self.launches) > round_)
            side.knows = max(side.knows, self.launches[round_])
            take_records_reference(shared.ring, shared.head, records, count, tail, began)
            for record in records[: int(count[0])].tolist():
                self.apply(*record)
            running = [opening for opening in self.openings if opening is not None and opening.can_run]
            self.idle_rounds = 0 if running or int(count[0]) else self.idle_rounds + 1
            assert self.idle_rounds < 2, "rounds were launched while no row could run"
            self.wrote.append([10 * (100 + round_) + len(running)])
            publish_early_reference(shared.early, torch.tensor(self.wrote[-1]), rounds)
            report = []
            for opening in self.openings:
                token = 0
                if opening in running:
                    token = 100 * opening.session + len(opening.emitted) + 1
                    opening.emitted.append(token)
                    opening.left -= 1
                report.append(1000 * (opening.generation if opening is not None else 0) + token)
            can_run = sum(opening is not None and opening.can_run for opening in self.openings)
            self.tails.append(int(tail[0]))
            self.wrote.append([can_run, *report])
            publish_report_reference(shared.reports, torch.tensor(self.wrote[-1]), tail, rounds)

    def apply(self, kind: int, row: int, generation: int, number: int, value: int, *rest: int) -> None:
        assert kind, "a record was read before it was written"
        session, opening = rest[-1], self.openings[row]
        if kind == OPEN:
            assert opening is None, "a row was opened twice"
            self.openings[row] = Opening(session=session, generation=generation, left=self.scenario.tokens)
            return
        if opening is None or opening.generation != generation:
            return
        assert opening.session == session, "a record took effect in another session"
        if kind == LIMITS:
            assert number > opening.limits, "limits took effect twice or out of order"
            opening.limits, opening.held = number, bool(value)
        elif kind == CLOSE:
            self.closed.append(opening)
            self.openings[row] = None
        else:
            client = self.clients[session]
            expected = client.queued[len(opening.queued)]
            assert number == expected, "a record was lost, or took effect twice or out of order"
            opening.queued.append(number)
            if kind == SLOTS:
                opening.slot = value
