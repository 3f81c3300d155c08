"""Slots are neither lost nor given twice, whatever is done to rows."""

import random

import pytest

from outrider.compiled import IS_COMPILED
from outrider.engine import kv_slots
from outrider.engine.kv_slots import SlotTable
from outrider.errors import OutOfSlots


def slots_of(table: SlotTable, row: int) -> list[int]:
    return table.table[row, : table.length(row)].tolist()


def test_random_use_never_loses_or_doubles_a_slot() -> None:
    rng = random.Random(0)
    table = SlotTable(num_slots=40, max_rows=4, max_row_len=24)
    rows: dict[int, list[int]] = {}
    for _ in range(3000):
        action = rng.choice(["acquire", "release", "extend", "truncate", "retain"])
        row = rng.choice(list(rows)) if rows else None
        if action == "acquire" and len(rows) < 4:
            rows[table.acquire_row()] = []
        elif row is None:
            continue
        elif action == "release":
            table.release_row(row)
            del rows[row]
        elif action == "extend":
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
            tail = rows[row][start:]
            kept = rng.sample(range(len(tail)), rng.randint(0, len(tail)))
            table.retain(row, start, kept)
            rows[row] = rows[row][:start] + [tail[place] for place in kept]
        held = [slot for slots in rows.values() for slot in slots]
        assert len(set(held)) == len(held)
        assert (table.used, table.free) == (len(held), 40 - len(held))
        assert all(slots_of(table, number) == slots for number, slots in rows.items())
        assert all((table.table[number, len(slots) :] == -1).all() for number, slots in rows.items())
    for row in rows:
        table.release_row(row)
    assert (table.used, table.free_rows) == (0, 4)


def test_fresh_slots_are_consecutive() -> None:
    table = SlotTable(num_slots=16, max_rows=2, max_row_len=16)
    first = table.acquire_row()
    table.extend(first, 5)
    assert slots_of(table, first) == [0, 1, 2, 3, 4]
    table.truncate(first, 2)
    table.extend(first, 4)
    assert slots_of(table, first) == [0, 1, 2, 3, 4, 5]


def test_no_row_left() -> None:
    table = SlotTable(num_slots=4, max_rows=1, max_row_len=4)
    table.acquire_row()
    with pytest.raises(OutOfSlots, match="max_num_seqs"):
        table.acquire_row()


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="num_slots: 0"):
        SlotTable(num_slots=0, max_rows=1, max_row_len=1)


def test_a_copy_that_takes_changes_follows_the_table() -> None:
    rng = random.Random(1)
    table = SlotTable(num_slots=60, max_rows=2, max_row_len=24)
    rows = [table.acquire_row(), table.acquire_row()]
    copy = table.table.copy()
    for _ in range(2000):
        row = rng.choice(rows)
        length = table.length(row)
        action = rng.choice(["extend", "truncate", "retain", "reuse"])
        if action == "extend":
            table.extend(row, rng.randint(0, min(6, 24 - length)))
        elif action == "truncate":
            table.truncate(row, rng.randint(0, length))
        elif action == "retain":
            start = rng.randint(0, length)
            table.retain(row, start, rng.sample(range(length - start), rng.randint(0, length - start)))
        else:
            table.release_row(row)
            assert table.acquire_row() == row
        if rng.random() < 0.5:
            [changed_from], [length] = table.take_changes([row])
            assert length == table.length(row)
            copy[row, changed_from:length] = table.table[row, changed_from:length]
            assert copy[row, :length].tolist() == slots_of(table, row)
            assert table.take_changes([row]) == ([length], [length])


@pytest.mark.parametrize("is_compiled", [True, False] if IS_COMPILED else [False])
def test_rows_at_once_are_as_one_after_the_other(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_slots, "IS_COMPILED", is_compiled)
    rng = random.Random(2)
    one, all_at_once = (SlotTable(num_slots=400, max_rows=6, max_row_len=60) for _ in range(2))
    for table in (one, all_at_once):
        for row in range(6):
            assert table.acquire_row() == row
            table.extend(row, 1 + row)
    copy = all_at_once.table.copy()
    for _ in range(500):
        rows = rng.sample(range(6), rng.randint(1, 6))
        starts = [one.length(row) for row in rows]
        counts = [rng.choice([1, 1, 3, 8]) for _ in rows]
        for row, count in zip(rows, counts, strict=True):
            one.extend(row, count)
        assert all_at_once.extend_rows(rows, starts, counts)
        for row, begin, end in zip(rows, *all_at_once.take_changes(rows), strict=True):
            copy[row, begin:end] = all_at_once.table[row, begin:end]
        kept = [kept_of(rng, count) for count in counts]
        for row, start, offsets in zip(rows, starts, kept, strict=True):
            one.retain(row, start, offsets)
        before = [slots_of(all_at_once, row) for row in rows]
        all_at_once.retain_rows(
            rows,
            starts,
            counts,
            kept=[offset for offsets in kept for offset in offsets],
            sizes=[len(offsets) for offsets in kept],
        )
        for row, start, offsets, had in zip(rows, starts, kept, before, strict=True):
            assert slots_of(all_at_once, row) == [*had[:start], *(had[start + offset] for offset in offsets)]
            assert all_at_once.length(row) == one.length(row)
            if one.length(row) > 40:
                for table in (one, all_at_once):
                    table.truncate(row, 5)
        held = [slot for row in range(6) for slot in slots_of(all_at_once, row)]
        assert len(held) == len(set(held)) == 400 - all_at_once.free
        assert all_at_once.free == one.free
        everyone = list(range(6))
        for row, begin, end in zip(everyone, *all_at_once.take_changes(everyone), strict=True):
            copy[row, begin:end] = all_at_once.table[row, begin:end]
            assert copy[row, :end].tolist() == slots_of(all_at_once, row)


def kept_of(rng: random.Random, count: int) -> list[int]:
    """The root's slot, and some of the others in ascending order: the first ones, or any."""
    others = rng.randint(0, count - 1)
    return [0, *(range(1, 1 + others) if rng.random() < 0.5 else sorted(rng.sample(range(1, count), others)))]


def test_rows_at_once_get_all_or_nothing() -> None:
    table = SlotTable(num_slots=10, max_rows=2, max_row_len=6)
    rows = [table.acquire_row(), table.acquire_row()]
    assert table.extend_rows(rows, [0, 0], [4, 5])
    assert not table.extend_rows(rows, [4, 5], [1, 1]), "one slot is free"
    assert not table.extend_rows(rows[:1], [4], [3]), "a row holds six"
    assert [table.length(row) for row in rows] == [4, 5] and table.free == 1
