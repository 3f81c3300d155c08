"""The Triton kernels of the pool against its compiled loops: the same bits after every operator of random histories."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from outrider.kernels.pool.append import append, append_reference
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.graft import graft, graft_reference
from outrider.kernels.pool.pack import Packed, pack, pack_reference
from outrider.kernels.pool.re_root import re_root, re_root_reference
from outrider.kernels.pool.records import Records
from outrider.kernels.pool.select import Selection, select, select_reference

_OF_ENTRIES = ("token", "parent", "depth", "acceptance", "value", "ids", "drafters", "stopped", "slot", "expanded")
_SCRATCH = ("released", "limit", "eligible", "keys", "ordered")
_TOKENS = 3
_BUCKETS = [(4, 2, 4), (8, 4, 8), (24, 4, 24), (64, 4, 64)]
_CHILDREN = 2


class Pair:
    """One history, lived through by the loops on a CPU and by the kernels on `device`."""

    def __init__(
        self, device: torch.device, *, drafts: bool, seed: int, sessions: int, capacity: int, places: int
    ) -> None:
        self.device, self.random, self.drafts = device, random.Random(seed), drafts
        self.loops, self.kernels = (
            Pool.allocate(
                sessions=sessions,
                max_len=96,
                capacity=capacity,
                places=places,
                trail=8,
                node_slots=512 if drafts else None,
                device=where,
            )
            for where in ("cpu", device)
        )
        self.generation = [0] * sessions
        # A drafter that computes here counts its own ids from 1.
        self.ids = [[1_000_000 if drafts else 1] * places for _ in range(sessions)]
        self.selections = Selection.allocate(self.loops, _BUCKETS), Selection.allocate(self.kernels, _BUCKETS)
        for pool in (self.loops, self.kernels):
            pool.table.copy_(torch.arange(pool.table.numel()).view_as(pool.table) % 500)
            pool.stops[:, 0] = 2
            pool.min_end.fill_(40)
            if pool.nodes is not None:
                pool.nodes.free.copy_(torch.arange(512))
                pool.nodes.free_tail.fill_(500)

    def host(self, name: str) -> list[int]:
        return getattr(self.loops, name).tolist()

    def graft(self, count: int) -> list[int]:
        records = Records()
        for _ in range(count):
            self._add_record(records)
        words = torch.from_numpy(records.array())
        counts = torch.tensor([len(words)], dtype=torch.int32)
        verdicts = torch.full((len(words),), -1, dtype=torch.int32)
        theirs = verdicts.to(self.device)
        graft_reference(self.loops, words, counts, verdicts)
        graft(self.kernels, words.to(self.device), counts.to(self.device), theirs)
        assert theirs.tolist() == verdicts.tolist()
        # A prefill that nobody runs here: rows are there as soon as they are opened, preempted ones get slots again.
        for pool in (self.loops, self.kernels):
            in_prefill = pool.state == RowState.PREFILL
            pool.state.copy_(torch.where(in_prefill, RowState.RUNNING, pool.state))
            if not self.drafts:
                pool.table_len.copy_(torch.where(in_prefill, pool.length + 6, pool.table_len))
                pool.cached.copy_(torch.where(in_prefill, pool.length - 1, pool.cached))
        return verdicts.tolist()

    def _add_record(self, records: Records) -> None:
        chance, row = self.random.random(), self.random.randrange(self.loops.sessions)
        generation = self.generation[row]
        if generation == 0 or chance < 0.02:
            self.generation[row] += 1
            length = self.random.randint(1, 12)
            cached = self.random.randint(0, length) if self.drafts else length - 1
            end = length + self.random.randint(1, 60)
            records.open(row, self.generation[row], length=length, cached=cached, end=end, allow=end)
        elif chance < 0.03:
            records.close(row, generation)
            self.generation[row] = 0
        elif chance < 0.04:
            records.preempt(row, generation)
        elif chance < 0.06:
            records.forget(row, generation, place=self.random.randrange(self.loops.places))
        elif chance < 0.08:
            records.resent(row, generation, place=self.random.randrange(self.loops.places))
        elif chance < 0.12:
            records.limits(row, generation, end=90, allow=self.random.choice([0, 20, 90]))
        elif chance < 0.15 and not self.drafts:
            slots = [self.random.randrange(500) for _ in range(self.random.randint(0, 6))]
            records.slots(row, generation, start=self.host("length")[row] + self.random.randint(0, 4), slots=slots)
        elif chance < 0.17:
            records.growth(99, 1, place=0, node_id=1, parent_id=0, as_of=1, token=1, acceptance=0.5)
        else:
            place = self.random.randrange(self.loops.places)
            known = self.ids[row][place]
            if self.random.random() < 0.9:
                node_id, self.ids[row][place] = known, known + 1
            else:
                node_id = max(self.random.randint(known - 5, known - 1), 1)
            records.growth(
                row,
                generation - (self.random.random() < 0.03),
                place=place,
                node_id=node_id,
                parent_id=self.random.choice([0, *range(max(known - 12, 1), known)]),
                as_of=self.host("length")[row] - self.random.choice([0, 0, 0, 0, 1, 3, 9, 30]),
                token=self.random.randrange(_TOKENS),
                acceptance=self.random.choice([0.0, 0.25, 0.3, 0.7, 0.7, 1.0]),
                drafter=self.random.randrange(8),
            )

    def commit(self) -> None:
        sessions = self.loops.sessions
        tokens = torch.zeros(sessions, 4, dtype=torch.int32)
        counts = torch.zeros(sessions, dtype=torch.int32)
        states, lengths = self.host("state"), self.host("length")
        for row in range(sessions):
            if states[row] == RowState.RUNNING and lengths[row] < 80:
                counts[row] = self.random.choice([0, 0, 1, 1, 2, 3])
            tokens[row] = torch.tensor([self.random.randrange(_TOKENS) for _ in range(4)])
        re_root_reference(self.loops, tokens, counts)
        re_root(self.kernels, tokens.to(self.device), counts.to(self.device))

    def step(self) -> None:
        launched = self.random.randrange(len(_BUCKETS))
        rows, sessions, _ = _BUCKETS[launched]
        least = self.random.choice([0.0, 0.0, 0.1])
        for selection in self.selections:
            selection.least_value.fill_(least)
            selection.reserved_sessions.fill_(int(launched > 1))
        mine, theirs = self.selections
        children = _CHILDREN if self.drafts else 0
        select_reference(self.loops, mine, launched, children=children)
        select(self.kernels, theirs, launched, children=children)
        self._compare(mine, theirs)
        words = max(self.loops.capacity // 64, 1)
        packs = [
            Packed.allocate(rows=rows, sessions=sessions, words=words, scrap_slot=511, device=device)
            for device in ("cpu", self.device)
        ]
        for packed in packs:
            packed.tokens.fill_(-7)
        pack_reference(self.loops, mine, packs[0])
        pack(self.kernels, theirs, packs[1])
        self._compare(*packs)
        if self.drafts:
            tokens = torch.stack([torch.randperm(_TOKENS, dtype=torch.int32)[:_CHILDREN] for _ in range(rows)])
            tokens = torch.where(torch.rand(tokens.shape) < 0.1, -1, tokens)
            acceptances = torch.rand(rows, _CHILDREN).round(decimals=2)
            append_reference(self.loops, packs[0], tokens, acceptances, drafter=3)
            append(self.kernels, packs[1], tokens.to(self.device), acceptances.to(self.device), drafter=3)

    @staticmethod
    def _compare(mine: Any, theirs: Any) -> None:
        for column in fields(mine):
            ours: Any = getattr(mine, column.name)
            other: Any = getattr(theirs, column.name, None)
            if isinstance(ours, torch.Tensor) and column.name not in _SCRATCH:
                assert torch.equal(ours, other.cpu()), column.name

    def compare(self) -> None:
        used = torch.arange(self.loops.capacity)[None, :] < self.loops.count[:, None]
        groups: list[tuple[Any, Any]] = [(self.loops, self.kernels)]
        if self.drafts:
            groups.append((self.loops.nodes, self.kernels.nodes))
        for mine, theirs in groups:
            for column in fields(type(mine)):
                ours: Any = getattr(mine, column.name)
                other: Any = getattr(theirs, column.name, None)
                if not isinstance(ours, torch.Tensor) or column.name in _SCRATCH:
                    continue
                if column.name in _OF_ENTRIES:
                    ours, other = ours[used], other.cpu()[used]
                assert torch.equal(ours, other.cpu()), column.name


# (histories, steps of each, verdicts that occur at least): short ones for the interpreter and for sanitizers.
_LENGTHS = {"short": (1, 10, 4), "long": (20, 100, 8)}


@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("length", list(_LENGTHS))
def test_kernels_leave_the_same_bits(triton_device: torch.device, drafts: bool, length: str) -> None:
    if length == "long" and triton_device.type != "cuda":
        pytest.skip("too much for the interpreter")
    histories, steps, least = _LENGTHS[length]
    seen: set[int] = set()
    for seed in range(histories):
        pair = Pair(triton_device, drafts=drafts, seed=seed, sessions=5, capacity=16, places=1 if drafts else 4)
        for _ in range(steps):
            seen |= set(pair.graft(pair.random.choice([0, 3, 10])))
            pair.compare()
            pair.commit()
            pair.compare()
            pair.step()
            pair.compare()
    # Not a history in which nothing happens.
    assert len(seen) >= least, sorted(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
def test_kernels_leave_the_same_bits_at_full_size(triton_device: torch.device, drafts: bool) -> None:
    if triton_device.type != "cuda":
        pytest.skip("too much for the interpreter")
    pair = Pair(triton_device, drafts=drafts, seed=1, sessions=64, capacity=256, places=1 if drafts else 4)
    for _ in range(40):
        pair.graft(300)
        pair.compare()
        pair.commit()
        pair.step()
        pair.compare()
