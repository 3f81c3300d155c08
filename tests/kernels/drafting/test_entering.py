"""Input rows of a head: the reference against plain Python over random trees, and the kernel against the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from outrider.kernels.drafting.entering import Entering, enter_rows, enter_rows_reference
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import COMMITTED, PADDING, ROOT, Packed

_SESSIONS, _ROWS, _MAX_LEN, _CAPACITY, _SLOTS = 3, 40, 30, 128, 200
_PLACES = 4 * (_CAPACITY + 1) + 1
_CPU = torch.device("cpu")


@dataclass
class Case:
    """A step, what it reads, and what its rows are to enter with."""

    packed: Packed
    pool: Pool
    target_table: torch.Tensor
    features: torch.Tensor
    grown: torch.Tensor
    wanted: Entering

    def arguments(self, device: torch.device) -> tuple[Packed, Pool, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of the operator, on a device."""
        packed = Packed.of_shape(rows=_ROWS, sessions=_SESSIONS, mask_words=2, scrap_slot=_SLOTS, device=device)
        packed.words.copy_(self.packed.words)
        pool = empty_pool(device)
        pool.parent.copy_(self.pool.parent)
        return packed, pool, self.target_table.to(device), self.features.to(device), self.grown.to(device)


def empty_pool(device: torch.device) -> Pool:
    return Pool.allocate(
        sessions=4, max_len=_MAX_LEN, capacity=_CAPACITY, places=1, trail=2, node_slots=256, device=device
    )


def random_case(seed: int, *, size: int = 12) -> Case:
    """Sessions with committed tokens, some from the first on, or with entries anywhere in their trees; then padding."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = empty_pool(_CPU)
    packed = Packed.allocate(pool, (_ROWS, _SESSIONS, _ROWS, _ROWS), scrap_slot=_SLOTS)
    target_table = torch.randint(_SLOTS, (4, _MAX_LEN), generator=generator, dtype=torch.int32)
    features, grown = (torch.randn((count, size), generator=generator) for count in (_SLOTS, _PLACES))
    wanted = Entering(
        torch.zeros((_ROWS, size)),
        positions=torch.zeros(_ROWS, dtype=torch.int32),
        prefix_len=torch.zeros(_ROWS, dtype=torch.int32),
        places=torch.full((_ROWS,), _PLACES - 1),
        tree_start=torch.zeros(_SESSIONS, dtype=torch.int32),
        key_len=torch.zeros(_SESSIONS, dtype=torch.int32),
    )
    packed.entries.fill_(PADDING)
    packed.sessions.fill_(-1)
    packed.pool_rows.fill_(-1)
    at = 0
    for session, row in enumerate(rng.sample(range(4), 2)):
        packed.pool_rows[session], packed.query_start[session] = row, at
        length = rng.choice([1, 2, 9, 20])
        if session == 0:
            start = rng.choice([0, length - 1])
            for index in range(start, length):
                packed.entries[at] = ROOT if index == length - 1 else COMMITTED
                packed.positions[at], packed.prefix_len[at], packed.sessions[at] = index, index + 1, session
                if index:
                    wanted.hidden[at] = features[target_table[row, index - 1]]
                wanted.positions[at], wanted.prefix_len[at] = max(index - 1, 0), index
                if index == length - 1:
                    wanted.places[at] = place_of(row)
                at += 1
            keys = length
        else:
            parents, depths = list[int](), list[int]()
            for key in range(rng.choice([3, 70, 100])):
                parents.append(rng.choice([-1, *range(key)[-9:]]))
                above = parents[key]
                depths.append(1 + (depths[above] if above >= 0 else 0))
            pool.parent[row, : len(parents)] = torch.tensor(parents)
            for key in sorted(rng.sample(range(len(parents)), min(len(parents), 12))):
                packed.entries[at], packed.sessions[at] = key, session
                packed.positions[at], packed.prefix_len[at] = length - 1 + depths[key], length
                wanted.hidden[at], wanted.places[at] = grown[place_of(row, parents[key])], place_of(row, key)
                wanted.positions[at], wanted.prefix_len[at] = length - 2 + depths[key], length - 1
                at += 1
            keys = length + len(parents)
        packed.tree_start[session], packed.key_len[session] = length, keys
        wanted.tree_start[session], wanted.key_len[session] = length - 1, keys - 1
    packed.query_start[2:] = at
    return Case(packed, pool, target_table, features, grown, wanted)


def place_of(row: int, entry: int = -1) -> int:
    """The place of an entry's hidden row, or the root's."""
    return row * (_CAPACITY + 1) + entry + 1


def test_rows_enter_with_the_hidden_row_before_them():
    for seed in range(30):
        case = random_case(seed)
        found = enter_rows(*case.arguments(_CPU))
        used = int(case.packed.query_start[-1])
        without_padding = enter_rows(*case.arguments(_CPU), count=used)
        for column, shorter, wanted in zip(found, without_padding, case.wanted, strict=True):
            assert torch.equal(column, wanted)
            assert torch.equal(shorter, wanted[:used] if len(wanted) == _ROWS else wanted)


def test_the_kernel_gathers_the_same_rows(triton_device: torch.device):
    for seed in range(4 if triton_device.type == "cpu" else 40):
        case = random_case(seed, size=(12, 33)[seed % 2])
        for count, has_grown in ((None, True), (3, True), (None, False)):
            packed, pool, target_table, features, grown = case.arguments(_CPU)
            own = grown if has_grown else None
            wanted = enter_rows_reference(packed, pool, target_table, features, own, count=count)
            packed, pool, target_table, features, grown = case.arguments(triton_device)
            own = grown if has_grown else None
            found = enter_rows(packed, pool, target_table, features, own, count=count)
            for column, expected in zip(found, wanted, strict=True):
                assert torch.equal(column.cpu(), expected)


def test_without_hidden_rows_of_its_own_entries_enter_with_zeros():
    for seed in range(10):
        case = random_case(seed)
        packed, pool, target_table, features, _ = case.arguments(_CPU)
        found = enter_rows(packed, pool, target_table, features, None)
        assert torch.equal(found.hidden, case.wanted.hidden.masked_fill((packed.entries >= 0)[:, None], 0))
        assert all(map(torch.equal, found[1:], case.wanted[1:]))


def test_a_step_that_nobody_has_packed_reads_within_its_tensors(device: torch.device):
    packed = Packed.of_shape(rows=8, sessions=2, mask_words=2, scrap_slot=_SLOTS, device=device)
    case = random_case(1)
    target_table = torch.full_like(case.target_table, -1)
    tensors = (tensor.to(device) for tensor in (target_table, case.features, case.grown))
    found = enter_rows(packed, empty_pool(device), *tensors)
    assert torch.equal(found.hidden.cpu(), case.grown[place_of(0, 0)].expand(8, -1))


def test_hidden_rows_of_two_sizes_are_refused():
    packed, pool, target_table, features, grown = random_case(0).arguments(_CPU)
    with pytest.raises(ValueError, match=r"grown: .* given"):
        enter_rows(packed, pool, target_table, features, grown[:, :-1])
