"""A prefix cache against memory that is written and read: what a row borrows holds the KV of the row's own tokens."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from outrider.engine.kv_slots import SlotTable
from outrider.engine.prefix_cache import PrefixCache
from outrider.errors import OutOfSlots

NUM_SLOTS, ROWS, ROW_LEN = 60, 5, 30


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Memory:
    """Rows of a table with their tokens; slots remember which tokens their KV was computed from."""

    def __init__(self, *, num_slots: int = NUM_SLOTS, rows: int = ROWS, row_len: int = ROW_LEN) -> None:
        self.table = SlotTable(num_slots=num_slots, max_rows=rows, max_row_len=row_len)
        self.cache = PrefixCache(self.table)
        self.content: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.empty = list(range(rows))

    def slots(self, row: int) -> list[int]:
        return self.table.table[row, : self.table.length(row)].tolist()

    def start(self, tokens: list[int]) -> tuple[int, int]:
        row = self.empty.pop(0)
        had = self.cache.take(row, ids(tokens))
        self.tokens[row] = tokens[:had]
        return row, had

    def compute(self, row: int, tokens: list[int]) -> None:
        """Appends tokens, writing their KV."""
        start = self.table.length(row)
        self.table.extend(row, len(tokens))
        self.tokens[row] += tokens
        shared = {slot for other in self.tokens if other != row for slot in self.slots(other)}
        for index in range(start, len(self.tokens[row])):
            slot = self.slots(row)[index]
            assert slot not in shared, "a slot that another row reads is written"
            self.content[slot] = tuple(self.tokens[row][: index + 1])

    def end(self, row: int) -> None:
        self.cache.keep(row, ids(self.tokens.pop(row)))
        self.table.truncate(row, 0)
        self.empty.append(row)

    def check(self) -> None:
        for row, tokens in self.tokens.items():
            slots = self.slots(row)
            assert len(slots) == len(tokens)
            for index, slot in enumerate(slots):
                assert self.content[slot] == tuple(tokens[: index + 1]), "a row reads other tokens' KV"
            own = set(slots[self.table.borrowed(row) :])
            others = {slot for other in self.tokens if other != row for slot in self.slots(other)}
            assert own.isdisjoint(others), "two rows own a slot"
        held = {slot for row in self.tokens for slot in self.slots(row)}
        assert self.table.used == len(held)
        assert self.table.free == self.table.num_slots - len(held)
        owned = sum(self.table.length(row) - self.table.borrowed(row) for row in self.tokens)
        assert self.cache.size == len(held) - owned + self.cache.unused, "a slot of the cache is lost"


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_loses_a_slot_nor_writes_a_shared_one(seed: int) -> None:
    rng, memory, taken = random.Random(seed), Memory(), 0
    table, cache = memory.table, memory.cache
    for _ in range(1500):
        action = rng.choice(["start", "compute", "compute", "end", "truncate", "keep", "retake"])
        row = rng.choice(list(memory.tokens)) if memory.tokens else None
        # Three tokens alone: sequences that begin alike are the rule.
        fresh = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if action == "start" and memory.empty:
            taken += memory.start(fresh)[1]
        elif row is None:
            continue
        elif action == "compute" and len(fresh) <= table.free and table.length(row) + len(fresh) <= ROW_LEN:
            memory.compute(row, fresh)
        elif action == "end":
            memory.end(row)
        elif action == "truncate":
            length = rng.randint(0, table.length(row))
            table.truncate(row, length)
            del memory.tokens[row][length:]
        elif action == "keep":
            cache.keep(row, ids(memory.tokens[row]))
            assert table.borrowed(row) == table.length(row)
        elif action == "retake":
            wanted = memory.tokens[row] + fresh
            had = cache.take(row, ids(wanted))
            memory.tokens[row] = wanted[:had]
        memory.check()
        emptied = [other for other in memory.tokens if rng.random() < 0.5]
        kept = {slot for other in memory.tokens if other not in emptied for slot in memory.slots(other)}
        lost = {slot for other in emptied for slot in memory.slots(other)} - kept
        assert cache.freed_by(emptied) == len(lost)
    assert taken > 100, "hardly anything was shared"
    for row in list(memory.tokens):
        memory.end(row)
    assert (table.used, table.free, cache.size) == (0, NUM_SLOTS, cache.unused)
    for row in range(2):
        table.extend(row, ROW_LEN)
    assert (cache.size, table.free) == (0, 0)
    with pytest.raises(OutOfSlots):
        table.extend(2, 1)


def test_the_least_recently_used_goes_first_from_its_end() -> None:
    memory = Memory(num_slots=12, row_len=12)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9]):
        row, had = memory.start(tokens)
        memory.compute(row, tokens[had:])
        memory.end(row)
    assert (memory.cache.size, memory.table.free, memory.table.used) == (9, 12, 0)
    row, had = memory.start([5, 6, 7, 8])
    assert had == 4
    memory.end(row)
    # 3 slots are free; two more come from the end of 1 2 3 4, which was used longest ago; 1 2 are needed by 1 2 9.
    row, _ = memory.start([0])
    memory.compute(row, [0] * 5)
    assert [memory.start(tokens)[1] for tokens in ([1, 2, 3], [1, 2, 9])] == [2, 3]


def test_equal_work_done_twice_is_kept_once() -> None:
    memory = Memory()
    first, second = memory.start([1, 2])[0], memory.start([1, 2])[0]
    memory.compute(first, [1, 2, 3])
    memory.compute(second, [1, 2, 4])
    memory.cache.keep(first, ids([1, 2, 3]))
    memory.cache.keep(second, ids([1, 2, 4]))
    assert memory.slots(first)[:2] == memory.slots(second)[:2]
    assert (memory.table.used, memory.cache.size) == (4, 4)
    memory.check()


def test_a_cache_that_is_full_of_leftovers_stays_small_in_itself() -> None:
    memory = Memory(num_slots=40, row_len=40)
    row, _ = memory.start([7, 7, 7])
    memory.compute(row, [7, 7, 7])
    memory.end(row)
    for _ in range(500):
        memory.end(memory.start([7, 7, 7])[0])
    assert len(memory.cache._leaves) < 80


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """The numbers of all lines of Python that are gone through."""
    lines: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.append(frame.f_lineno)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield lines
    finally:
        sys.settrace(before)


def test_long_prompts_are_taken_in_whole_arrays() -> None:
    length = 131_072
    memory = Memory(num_slots=3 * length, rows=4, row_len=length + 10)
    prompt = np.random.default_rng(0).integers(0, 128_000, length).astype(np.int32)
    memory.table.extend(0, length)
    memory.cache.keep(0, prompt)
    memory.table.truncate(0, 0)
    other = prompt.copy()
    other[length // 2] += 1
    with counted_lines() as lines:
        assert memory.cache.take(1, prompt) == length
        assert memory.cache.take(2, other) == length // 2
    # A loop over the tokens goes through one a token, at least.
    assert 0 < len(lines) < 1_000
