"""The Triton kernels of the pool against its compiled loops: the same bits after every operator of random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.tensors import assert_same_columns

from outrider.kernels.pool.append import append, append_reference
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.graft import graft, graft_reference
from outrider.kernels.pool.pack import Packed, pack, pack_reference
from outrider.kernels.pool.re_root import re_root, re_root_reference
from outrider.kernels.pool.records import Records, Verdict
from outrider.kernels.pool.select import Selection, select, select_reference

_TOKENS, _CHILDREN = 9, 3
_MAX_LEN, _NUM_SLOTS = 96, 1 << 15
# Products of many of the first are denormal numbers.
_ACCEPTANCES = (0.0, 0.01, 0.5, 0.9, 0.97, 1.0)


class Pair:
    """One history, lived through by the loops on a CPU and by the kernels on `device`."""

    def __init__(
        self,
        device: torch.device,
        *,
        drafts: bool,
        seed: int,
        sessions: int,
        capacity: int,
        places: int,
        buckets: list[tuple[int, int, int, int]],
    ) -> None:
        self.device, self.random, self.drafts, self.buckets = device, random.Random(seed), drafts, buckets
        self.loops, self.kernels = (
            Pool.allocate(
                sessions=sessions,
                max_len=_MAX_LEN,
                capacity=capacity,
                places=places,
                trail=8,
                node_slots=_NUM_SLOTS if drafts else None,
                device=where,
            )
            for where in ("cpu", device)
        )
        self.selections = [Selection.allocate(pool, buckets) for pool in (self.loops, self.kernels)]
        # More than a row has room for, and hardly more than records bring.
        self.most_commits = 256 if drafts else 8
        self.generation = [0] * sessions
        # A drafter that computes here counts its own ids from 1.
        self.next_id = [[1 << 30 if drafts else 1] * places for _ in range(sessions)]
        for pool in (self.loops, self.kernels):
            pool.table.copy_(torch.arange(pool.table.numel()).view_as(pool.table) % (_NUM_SLOTS - 1))
            pool.stops[:, 0] = 2
            pool.min_end.fill_(40)
            if pool.nodes is not None:
                pool.nodes.free.copy_(torch.arange(_NUM_SLOTS))
                pool.nodes.free_tail.fill_(_NUM_SLOTS)

    def graft(self, count: int) -> list[int]:
        """Records of all kinds, most of them growth below what is alive, and what they commit; their verdicts."""
        records, sent = Records(), {}
        for row in range(self.loops.sessions):
            self._add_commit(records, row)
        for _ in range(count):
            self._add_record(records, sent)
        words = torch.from_numpy(records.array())
        counts = torch.tensor([len(words)], dtype=torch.int32)
        verdicts = torch.full((len(words),), -1, dtype=torch.int32)
        commits = torch.full((self.loops.sessions, self.most_commits), -1, dtype=torch.int32)
        num_commits = torch.full((self.loops.sessions,), -1, dtype=torch.int32)
        theirs = [tensor.to(self.device, copy=True) for tensor in (verdicts, commits, num_commits)]
        graft_reference(self.loops, words, counts, verdicts, commits, num_commits)
        graft(self.kernels, words.to(self.device), counts.to(self.device), *theirs)
        is_written = torch.arange(self.most_commits)[None, :] < num_commits[:, None]
        assert theirs[0].tolist() == verdicts.tolist()
        assert theirs[2].tolist() == num_commits.tolist()
        assert torch.equal(theirs[1].cpu()[is_written], commits[is_written])
        self.compare()
        ends = torch.full_like(num_commits, -1)
        its_ends = ends.to(self.device, copy=True)
        # Drafters of both kinds, one after the other.
        regrows = self.drafts and self.random.random() < 0.3
        re_root_reference(self.loops, commits, num_commits, ends, regrows=regrows)
        re_root(self.kernels, theirs[1], theirs[2], its_ends, regrows=regrows)
        assert its_ends.tolist() == ends.tolist()
        self.compare()
        if not self.drafts:
            # A prefill that nobody runs here: rows run as soon as they are opened.
            for pool in (self.loops, self.kernels):
                in_prefill = pool.state == RowState.PREFILL
                pool.state.copy_(torch.where(in_prefill, RowState.RUNNING, pool.state))
                pool.cached.copy_(torch.where(in_prefill, pool.length - 1, pool.cached))
        return verdicts.tolist()

    def _add_commit(self, records: Records, row: int) -> None:
        """Tokens of one row in five, down its tree or beside it."""
        pool, rng = self.loops, self.random
        if pool.state[row] != RowState.RUNNING or pool.length[row] > 80 or rng.random() < 0.8:
            return
        tokens, entry = [], -1
        for _ in range(rng.choice([1, 1, 2, 2, 3, 3, 7])):
            children = [at for at in range(int(pool.count[row])) if pool.parent[row, at] == entry]
            entry = rng.choice(children) if children and rng.random() < 0.9 else -9
            tokens.append(int(pool.token[row, entry]) if entry >= 0 else 0)
        records.commit(row, self.generation[row], tokens)

    def _add_record(self, records: Records, sent: dict[tuple[int, int], list[int]]) -> None:
        chance, row = self.random.random(), self.random.randrange(self.loops.sessions)
        place = self.random.randrange(self.loops.places)
        generation, length = self.generation[row], int(self.loops.length[row])
        if generation == 0 or chance < 0.002:
            self.generation[row] += 1
            length = self.random.choice([self.random.randint(1, 12), self.random.randint(13, 50)])
            end = min(length + self.random.randint(20, 80), _MAX_LEN)
            cached = 0 if self.drafts else self.random.choice([0, length // 2, length - 1, length - 1])
            records.open(row, self.generation[row], length=length, cached=cached, end=end, allow=end)
            if not self.drafts:
                # A chunk that is another operator's, and slots for a row that runs at once.
                records.prefill(row, self.generation[row], start=cached, size=1)
                records.slots(row, self.generation[row], start=_MAX_LEN, slots=[])
        elif chance < 0.004:
            self.random.choice([records.close, records.preempt])(row, generation)
            records.commit(row, generation, [1] * self.random.randrange(7))
        elif chance < 0.008:
            self.random.choice([records.forget, records.resent])(row, generation, place=place)
        elif chance < 0.012:
            records.limits(row, generation, end=90, allow=self.random.choice([0, 20, 90]))
        elif chance < 0.02 and not self.drafts:
            slots = [self.random.randrange(500) for _ in range(self.random.randint(0, 6))]
            records.slots(row, generation, start=self.random.randrange(_MAX_LEN - 6), slots=slots)
        elif chance < 0.03:
            # Nothing of this may take effect.
            records.growth(99, 1, place=0, node_id=1, parent_id=0, as_of=1, token=1, acceptance=0.5)
            records.forget(row, generation, place=self.loops.places)
            records.open(row, generation + 9, length=0, cached=0, end=1, allow=1)
            records.open(row, generation + 9, length=3, cached=3, end=9, allow=9)
            if self.drafts:
                records.prefill(row, generation, start=0, size=1)
                records.open(row, generation + 9, length=1, cached=1, end=2, allow=2)
        else:
            count, ids = int(self.loops.count[row]), self.loops.ids[row, :, place]
            alive = [node for node in ids[:count].tolist() if node][-30:]
            new = sent.setdefault((row, place), [])
            node_id = self.next_id[row][place]
            if self.random.random() < 0.97:
                self.next_id[row][place] += 1
                new.append(node_id)
            else:
                node_id = max(node_id - self.random.randint(1, 5), 1)
            records.growth(
                row,
                generation - (self.random.random() < 0.01),
                place=place,
                node_id=node_id,
                parent_id=self.random.choice([0, node_id + 7, *alive, *new[-9:]]),
                as_of=length - self.random.choice([0] * 9 + [1, 3, 9, 30]),
                token=self.random.randrange(_TOKENS),
                acceptance=self.random.choice(_ACCEPTANCES),
                drafter=self.random.randrange(8),
            )

    def step(self) -> None:
        """A selection, its rows, and in a drafter's pool their children."""
        launched = self.random.randrange(len(self.buckets))
        least, reserved = self.random.choice([0.0, 0.0, 0.1]), self.random.choice([0, 0, 1])
        for selection in self.selections:
            selection.least_value.fill_(least)
            selection.reserved_sessions.fill_(reserved)
        mine, theirs = self.selections
        bounds = {"children": _CHILDREN, "chunk": self.random.choice([5, 20, 60])} if self.drafts else {}
        select_reference(self.loops, mine, launched, **bounds)
        select(self.kernels, theirs, launched, **bounds)
        assert_same_columns(mine, theirs)
        packs = [
            Packed.allocate(pool, self.buckets[launched], scrap_slot=_NUM_SLOTS - 1)
            for pool in (self.loops, self.kernels)
        ]
        for packed in packs:
            # What is not written shows.
            packed.words.view(torch.int32).fill_(-7)
        pack_reference(self.loops, mine, packs[0])
        pack(self.kernels, theirs, packs[1])
        assert_same_columns(packs[0], packs[1])
        self.compare()
        if self.drafts:
            rows = self.buckets[launched][0]
            tokens = torch.stack([torch.randperm(_TOKENS, dtype=torch.int32)[:_CHILDREN] for _ in range(rows)])
            tokens = torch.where(torch.rand(tokens.shape) < 0.1, -1, tokens)
            acceptances = torch.tensor(_ACCEPTANCES)[torch.randint(len(_ACCEPTANCES), tokens.shape)]
            outputs = [torch.full(shape, -7, dtype=torch.int32) for shape in (tokens.shape, (rows,))]
            its = [tensor.to(self.device, copy=True) for tensor in (tokens, acceptances, *outputs)]
            append_reference(self.loops, packs[0], tokens, acceptances, outputs[0], outputs[1], 0, 8)
            append(self.kernels, packs[1], *its, drafter=3)
            for output, its_output in zip(outputs, its[2:], strict=True):
                assert torch.equal(output, its_output.cpu())
            self.compare()

    def compare(self) -> None:
        used = torch.arange(self.loops.capacity)[None, :] < self.loops.count[:, None]
        assert_same_columns(self.loops, self.kernels, used)
        if self.drafts:
            assert_same_columns(self.loops.nodes, self.kernels.nodes, used)


# (seeds, steps, records of a step, sessions, capacity, buckets); the last one is a row full of entries, all selected.
_SHORT = (1, 10, 12, 3, 16, [(4, 2, 4, 9), (20, 3, 20, 3), (90, 3, 64, 60)])
_LONG = {
    "small": (8, 100, 20, 5, 16, [(4, 2, 4, 9), (5, 5, 1, 2), (40, 5, 20, 12), (120, 5, 64, 90)]),
    "one": (4, 80, 150, 1, 256, [(256, 1, 256, 256), (7, 1, 7, 7)]),
    "wide": (1, 30, 1500, 37, 256, [(512, 37, 256, 400), (100, 20, 60, 100), (2000, 37, 200, 2000)]),
    "many": (1, 6, 4000, 256, 256, [(512, 256, 256, 512), (300, 200, 60, 90)]),
}


def _live(
    device: torch.device, drafts: bool, history: tuple[int, int, int, int, int, Any]
) -> tuple[set[int], int, int]:
    """Live through histories; verdicts seen, most entries of a row, and most that a row had selected."""
    seeds, steps, records, sessions, capacity, buckets = history
    seen, most, selected = set(), 0, 0
    for seed in range(seeds):
        torch.manual_seed(seed)
        places = 2 if drafts else 4
        pair = Pair(
            device, drafts=drafts, seed=seed, sessions=sessions, capacity=capacity, places=places, buckets=buckets
        )
        for _ in range(steps):
            seen |= {*pair.graft(records)}
            pair.step()
            most = max(most, int(pair.loops.count.max()))
            selected = max(selected, int(pair.selections[0].num_selected.max()))
    return seen, most, selected


@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
def test_kernels_leave_the_same_bits_short(triton_device: torch.device, drafts: bool) -> None:
    seen, most, selected = _live(triton_device, drafts, _SHORT)
    # Not a history in which nothing happens.
    assert len(seen) >= 5 and most > 4 and selected > 1


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "drafter"])
@pytest.mark.parametrize("size", list(_LONG))
def test_kernels_leave_the_same_bits_long(triton_device: torch.device, drafts: bool, size: str) -> None:
    if triton_device.type != "cuda":
        pytest.skip("too much for the interpreter")
    seen, most, selected = _live(triton_device, drafts, _LONG[size])
    if size == "many":
        assert len(seen) >= 9 and most > 32 and selected > 4
    else:
        assert seen == {*Verdict} and most == _LONG[size][4] and selected > 3
