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
_CPU = torch.device("cpu")


@dataclass
class Case:
    """A step, the tables and hidden rows that it reads, and what its rows are to enter with."""

    packed: Packed
    table: torch.Tensor
    target_table: torch.Tensor
    features: torch.Tensor
    grown: torch.Tensor
    wanted: Entering

    def arguments(self, device: torch.device) -> tuple[Packed, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of the operator; the packed step is moved."""
        packed = Packed.of_shape(rows=_ROWS, sessions=_SESSIONS, mask_words=2, scrap_slot=_SLOTS, device=device)
        packed.words.copy_(self.packed.words)
        tables = self.table.to(device), self.target_table.to(device)
        return packed, *tables, self.features.to(device), self.grown.to(device)


def random_case(seed: int, *, size: int = 12) -> Case:
    """Sessions with committed tokens, some from the first on, or with entries anywhere in their trees; then padding."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = Pool.allocate(
        sessions=4, max_len=_MAX_LEN, capacity=_CAPACITY, places=1, trail=2, node_slots=256, device=_CPU
    )
    packed = Packed.allocate(pool, (_ROWS, _SESSIONS, _ROWS, _ROWS), scrap_slot=_SLOTS)
    table, target_table = (
        torch.randint(_SLOTS, (4, width), generator=generator, dtype=torch.int32)
        for width in (_MAX_LEN + _CAPACITY, _MAX_LEN)
    )
    features, grown = (torch.randn((_SLOTS, size), generator=generator) for _ in range(2))
    wanted = Entering(
        torch.zeros((_ROWS, size)),
        *(torch.zeros(count, dtype=torch.int32) for count in (_ROWS, _ROWS, _SESSIONS, _SESSIONS)),
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
                at += 1
            keys = length
        else:
            parents, masks, depths = list[int](), list[int](), list[int]()
            for key in range(rng.choice([3, 70, 100])):
                parents.append(rng.choice([-1, *range(key)[-9:]]))
                above = parents[key]
                masks.append(1 << key | (masks[above] if above >= 0 else 0))
                depths.append(1 + (depths[above] if above >= 0 else 0))
            for key in sorted(rng.sample(range(len(parents)), min(len(parents), 12))):
                packed.entries[at], packed.sessions[at] = key, session
                packed.positions[at], packed.prefix_len[at] = length - 1 + depths[key], length
                for word in range(2):
                    bits = masks[key] >> 64 * word & (1 << 64) - 1
                    packed.tree_mask[at, word] = bits - (bits >> 63 << 64)
                slot = table[row, length + parents[key]] if parents[key] >= 0 else table[row, length - 1]
                wanted.hidden[at] = grown[slot]
                wanted.positions[at], wanted.prefix_len[at] = length - 2 + depths[key], length - 1
                at += 1
            keys = length + len(parents)
        packed.tree_start[session], packed.key_len[session] = length, keys
        wanted.tree_start[session], wanted.key_len[session] = length - 1, keys - 1
    packed.query_start[2:] = at
    return Case(packed, table, target_table, features, grown, wanted)


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
            packed, table, target_table, features, grown = case.arguments(_CPU)
            own = grown if has_grown else None
            wanted = enter_rows_reference(packed, table, target_table, features, own, count=count)
            packed, table, target_table, features, grown = case.arguments(triton_device)
            own = grown if has_grown else None
            found = enter_rows(packed, table, target_table, features, own, count=count)
            for column, expected in zip(found, wanted, strict=True):
                assert torch.equal(column.cpu(), expected)


def test_without_hidden_rows_of_its_own_entries_enter_with_zeros():
    for seed in range(10):
        case = random_case(seed)
        packed, table, target_table, features, _ = case.arguments(_CPU)
        found = enter_rows(packed, table, target_table, features, None)
        assert torch.equal(found.hidden, case.wanted.hidden.masked_fill((packed.entries >= 0)[:, None], 0))
        assert all(map(torch.equal, found[1:], case.wanted[1:]))


def test_a_step_that_nobody_has_packed_reads_within_its_tensors(device: torch.device):
    packed = Packed.of_shape(rows=8, sessions=2, mask_words=2, scrap_slot=_SLOTS, device=device)
    case = random_case(1)
    tables = (torch.full_like(case.table, -1), torch.full_like(case.target_table, -1))
    found = enter_rows(packed, *(tensor.to(device) for tensor in (*tables, case.features, case.grown)))
    assert torch.equal(found.hidden.cpu(), case.grown[:1].expand(8, -1))


def test_hidden_rows_of_two_sizes_are_refused():
    packed, *tables, features, grown = random_case(0).arguments(_CPU)
    with pytest.raises(ValueError, match=r"grown: .* given"):
        enter_rows(packed, tables[0], tables[1], features, grown[:, :-1])
