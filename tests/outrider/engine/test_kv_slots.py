"""Slots are neither lost nor given twice, whatever is done to rows."""

import random

import pytest

from outrider.engine.kv_slots import SlotTable
from outrider.errors import OutOfSlots


def slots_of(table: SlotTable, row: int) -> list[int]:
    return table.table[row, : table.length(row)].tolist()


def test_random_use_never_loses_or_doubles_a_slot() -> None:
    rng = random.Random(0)
    table = SlotTable(num_slots=40, max_rows=4, max_row_len=24)
    rows: list[list[int]] = [[] for _ in range(4)]
    for _ in range(3000):
        action, row = rng.choice(["extend", "truncate", "reorder"]), rng.randrange(4)
        if action == "extend":
            count = rng.randint(0, 8)
            if count > table.free or len(rows[row]) + count > 24:
                with pytest.raises(OutOfSlots):
                    table.extend(row, count)
            else:
                table.extend(row, count)
                fresh = slots_of(table, row)[len(rows[row]) :]
                assert len(fresh) == count
                rows[row] += fresh
        elif action == "truncate":
            length = rng.randint(0, 24)
            table.truncate(row, length)
            rows[row] = rows[row][:length]
        else:
            start = rng.randint(0, len(rows[row]))
            count = rng.randint(0, len(rows[row]) - start)
            kept = rng.sample(range(count), rng.randint(0, count))
            table.reorder(row, start, count, kept)
            part = rows[row][start : start + count]
            others = [slot for place, slot in enumerate(part) if place not in kept]
            rows[row][start : start + count] = [part[place] for place in kept] + others
        held = [slot for slots in rows for slot in slots]
        assert len(set(held)) == len(held)
        assert (table.used, table.free) == (len(held), 40 - len(held))
        assert all(slots_of(table, number) == slots for number, slots in enumerate(rows))
        assert all((table.table[number, len(slots) :] == -1).all() for number, slots in enumerate(rows))


def test_fresh_slots_are_consecutive() -> None:
    table = SlotTable(num_slots=16, max_rows=2, max_row_len=16)
    table.extend(0, 5)
    assert slots_of(table, 0) == [0, 1, 2, 3, 4]
    table.truncate(0, 2)
    table.extend(0, 4)
    assert slots_of(table, 0) == [0, 1, 2, 3, 4, 5]
