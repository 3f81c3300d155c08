"""A toy service whose output has to be plain decoding: the pool's operators between a toy target and toy drafters.

The toy target keeps for each KV slot what the token stored there contributes to the sum of a text (`toy_drafters`). Its
choice at a packed row is a hash of the sum over the slots that the row attends to, by table, prefix and mask: any wrong
token, position, slot, mask bit or re-pointed table entry changes the tokens that come out. It walks down the packed
rows as far as choices agree. The pool may be on a GPU; the target computes on the host, from copies.

Rows open, are held, and close; workers are replaced; slots come short; not every bucket holds all sessions.
"""

# compiled loops take positional arrays
# ruff: noqa: PLR0917

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.pool_bench.toy_drafters import (
    LATEST,
    VOCABULARY,
    Sight,
    choose,
    contribution,
    new_drafters,
    new_mail,
    plain_decode,
    replace_worker,
    run_drafters,
)

from outrider.kernels.compiled import compiled
from outrider.kernels.pool.columns import MAX_STOPS, Pool, RowState
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import Packed, pack
from outrider.kernels.pool.re_root import re_root
from outrider.kernels.pool.records import WORDS, Records, Verdict
from outrider.kernels.pool.select import Selection, select

__all__ = ["Outcome", "ToyService"]

SESSIONS, PLACES = 8, 4
MAX_LEN = 256
BUCKETS = [(16, 8, 8, 16), (32, 8, 16, 10), (96, 8, 96, 96), (96, 2, 96, 96), (12, 3, 6, 12)]
"""Rows, sessions, most rows of a session, most entries."""
_MOST_TOKENS = 96
_RECORDS = 8192
_POISON = 0x0BAD_0BAD_0BAD


@dataclass
class Outcome:
    """What happened.

    Attributes:
        rounds, tokens, sessions: rounds, tokens emitted, sessions that came to their end.
        row_rounds: how many times a session took part in a round.
        verdicts: of all records, by name.
        mismatches: tokens that plain decoding would not have had there, and sessions that ended elsewhere.
    """

    rounds: int = 0
    tokens: int = 0
    sessions: int = 0
    row_rounds: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    mismatches: int = 0


class _Target(NamedTuple):
    """What the toy target knows of its sessions; S rows.

    Attributes:
        texts, plain: [S, MAX_LEN], what was committed, and what plain decoding gives.
        plain_length: [S], where plain decoding ends.
        length, end, allow, min_end: [S].
        stops: [S, 64], filled up with -1.
        kv: what the token in each slot contributes.
        tokens, num_tokens: [S, _MOST_TOKENS] and [S], what the last round emitted.
        finished: [S], whether the session ended in the last round.
        counters: [2], mismatches and sessions that took part.
    """

    texts: Any
    plain: Any
    plain_length: Any
    length: Any
    end: Any
    allow: Any
    min_end: Any
    stops: Any
    kv: Any
    tokens: Any
    num_tokens: Any
    finished: Any
    counters: Any


_PACKED = (
    "tokens",
    "positions",
    "slots",
    "parents",
    "prefix_len",
    "tree_mask",
    "pool_rows",
    "query_start",
    "tree_start",
)


class ToyService:
    """Eight sessions at a time and up to four drafters for each. `run` it as long as you like."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.outcome = Outcome()
        self._rng = random.Random(seed)
        self._device = torch.device(device)
        self._pool = Pool.allocate(
            sessions=SESSIONS, max_len=MAX_LEN, capacity=128, places=PLACES, trail=16, device=device
        )
        self._selection = Selection.allocate(self._pool, BUCKETS)
        scrap_slot = SESSIONS * MAX_LEN
        self._packed = [Packed.allocate(self._pool, bucket, scrap_slot=scrap_slot) for bucket in BUCKETS]
        # On a CPU what is packed can be looked at where it is.
        self._columns = [_host_columns(packed) if device == "cpu" else None for packed in self._packed]
        self._written = torch.zeros(_RECORDS, WORDS, dtype=torch.int32)
        self._delivered = 0
        # On a CPU where they were written.
        self._records = self._written.to(device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._verdicts = torch.zeros(_RECORDS, dtype=torch.int32, device=device)
        # A target commits what it has verified: no record does.
        self._commits = torch.zeros(SESSIONS, 1, dtype=torch.int32, device=device)
        self._num_commits = torch.zeros(SESSIONS, dtype=torch.int32, device=device)
        self._verdict_counts = np.zeros(len(Verdict), np.int64)

        def column(*shape: int) -> Any:
            return np.zeros((SESSIONS, *shape), np.int32)

        self._target = _Target(
            texts=column(MAX_LEN),
            plain=column(MAX_LEN),
            plain_length=column(),
            length=column(),
            end=column(),
            allow=column(),
            min_end=column(),
            stops=column(MAX_STOPS),
            kv=np.zeros(scrap_slot + 1, np.int64),
            tokens=column(_MOST_TOKENS),
            num_tokens=column(),
            finished=np.zeros(SESSIONS, np.bool_),
            counters=np.zeros(2, np.int64),
        )
        self._tokens, self._num_tokens = map(torch.from_numpy, (self._target.tokens, self._target.num_tokens))
        self._drafters = new_drafters(SESSIONS, PLACES, seed)
        self._mail = new_mail()
        self._sight = Sight(
            now=np.zeros(1, np.int64),
            texts=self._target.texts,
            lengths=np.zeros((LATEST, SESSIONS), np.int64),
            since=np.zeros(SESSIONS, np.int64),
            generations=np.zeros(SESSIONS, np.int64),
            lost=np.zeros((SESSIONS, PLACES), np.bool_),
        )
        self._states = [RowState.EMPTY] * SESSIONS
        self._permutations = np.random.default_rng(seed)
        self._slots: list[list[int]] = [[] for _ in range(SESSIONS)]
        self._given = [0] * SESSIONS
        self._workers = 0

    def run(self, rounds: int) -> Outcome:
        """Run rounds; what happened in all of them so far."""
        for _ in range(rounds):
            self._round()
        self.outcome.mismatches, self.outcome.row_rounds = (int(count) for count in self._target.counters)
        self.outcome.verdicts = {verdict.name: int(self._verdict_counts[verdict]) for verdict in Verdict}
        return self.outcome

    def _round(self) -> None:
        self._graft()
        self._prefill()
        launched = self._rng.randrange(len(BUCKETS))
        self._selection.least_value.fill_(self._rng.choice([0, 0, 0.02]))
        select(self._pool, self._selection, launched)
        pack(self._pool, self._selection, self._packed[launched])
        self._verify(launched)
        self._commit()
        self._run_drafters()
        self.outcome.rounds += 1

    # What the host writes.

    def _graft(self) -> None:
        records = Records()
        for row in range(SESSIONS):
            self._edit(row, records)
        edits = records.array()
        count = self._delivered + len(edits)
        self._written[self._delivered : count] = torch.from_numpy(edits)
        if self._records is not self._written:
            self._records[:count].copy_(self._written[:count])
        self._count.fill_(count)
        graft(self._pool, self._records, self._count, self._verdicts, self._commits, self._num_commits)
        self._verdict_counts += np.bincount(self._verdicts[:count].cpu().numpy(), minlength=len(Verdict))

    def _edit(self, row: int, records: Records) -> None:
        """What becomes of a row this round."""
        rng, target, generation = self._rng, self._target, int(self._sight.generations[row])
        length = int(target.length[row])
        match self._states[row]:
            case RowState.EMPTY:
                self._open(row, records)
                return
            case RowState.FINISHED:
                records.close(row, generation)
                self._states[row] = RowState.EMPTY
                return
            case RowState.HELD:
                if rng.random() < 0.1:
                    target.allow[row] = min(length + rng.randint(0, 20), MAX_LEN)
                    records.limits(row, generation, end=int(target.end[row]), allow=int(target.allow[row]))
                    if target.allow[row] > length:
                        self._states[row] = RowState.RUNNING
            case RowState.RUNNING if rng.random() < 0.02:
                if rng.random() < 0.5:
                    # Held, for no more may be sent to the client; or at most as much as this.
                    target.allow[row] = rng.choice([0, length + 5])
                    records.limits(row, generation, end=int(target.end[row]), allow=int(target.allow[row]))
                    if target.allow[row] == 0:
                        self._states[row] = RowState.HELD
                else:
                    self._replace_worker(row, rng.randrange(PLACES), records)
        self._extend_table(row, records)

    def _open(self, row: int, records: Records) -> None:
        rng, target = self._rng, self._target
        self._sight.generations[row] += 1
        length = rng.randint(1, 24)
        prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
        target.texts[row, :length] = target.plain[row, :length] = prompt
        target.length[row], target.end[row] = length, length + rng.randint(1, 200)
        target.allow[row] = rng.choice([MAX_LEN, length + 8])
        target.stops[row] = -1
        target.stops[row, :2] = rng.sample(range(VOCABULARY), 2)
        target.min_end[row] = length + rng.randint(0, 150)
        target.plain_length[row] = plain_decode(
            target.plain[row], length, int(target.end[row]), target.stops[row], int(target.min_end[row])
        )
        self._pool.history[row, :length] = torch.tensor(prompt, dtype=torch.int32)
        self._pool.stops[row] = torch.from_numpy(target.stops[row])
        self._pool.min_end[row] = int(target.min_end[row])
        records.open(
            row, int(self._sight.generations[row]), length=length, cached=0, end=int(target.end[row]),
            allow=int(target.allow[row]),
        )  # fmt: skip
        self._sight.since[row] = self._sight.now[0]
        self._states[row] = RowState.PREFILL
        self._give_new_slots(row)
        self._extend_table(row, records)
        drafters = rng.randint(0, PLACES)
        for place in range(PLACES):
            self._drafters.worker[row, place] = 0
            if place < drafters:
                self._replace_worker(row, place, None)

    def _replace_worker(self, row: int, place: int, records: Records | None) -> None:
        if records is not None:
            records.forget(row, int(self._sight.generations[row]), place=place)
        self._workers += 1
        replace_worker(
            self._drafters, row, place, self._workers, self._target.texts[row], int(self._target.length[row])
        )

    def _give_new_slots(self, row: int) -> None:
        self._slots[row] = (self._permutations.permutation(MAX_LEN) + row * MAX_LEN).tolist()
        self._given[row] = 0
        self._target.kv[row * MAX_LEN : (row + 1) * MAX_LEN] = _POISON

    def _extend_table(self, row: int, records: Records) -> None:
        """Give a row slots before it has none left: at times few, at times for all that a round may take."""
        length, given = int(self._target.length[row]), self._given[row]
        if given >= length + 8 or (given >= length and self._rng.random() < 0.5):
            return
        wanted = min(length + self._rng.choice([0, 4, 40, 100]), MAX_LEN)
        if wanted > given:
            slots = self._slots[row][given:wanted]
            records.slots(row, int(self._sight.generations[row]), start=given, slots=slots)
            self._given[row] = wanted

    # What the device does beside the pool's operators.

    def _prefill(self) -> None:
        for row, state in enumerate(self._states):
            if state == RowState.PREFILL:
                length = int(self._target.length[row])
                table = self._pool.table[row].cpu().numpy()
                for index in range(length - 1):
                    self._target.kv[table[index]] = contribution(int(self._target.texts[row, index]), index)
                self._pool.cached[row] = length - 1
                self._set_state(row, RowState.RUNNING)

    def _set_state(self, row: int, state: RowState) -> None:
        self._states[row] = state
        self._pool.state[row] = int(state)

    def _verify(self, launched: int) -> None:
        """Choices of the toy target, and its walk; accepted rows' slots move to the front of the table."""
        table = self._pool.table.cpu()
        self._target.num_tokens[:] = 0
        self._target.finished[:] = False
        _verify(self._target, table.numpy(), *(self._columns[launched] or _host_columns(self._packed[launched])))
        if self._device.type != "cpu":
            self._pool.table.copy_(table)

    def _commit(self) -> None:
        target = self._target
        re_root(self._pool, self._tokens.to(self._device), self._num_tokens.to(self._device))
        self._sight.lengths[self._sight.now[0] % LATEST] = target.length
        self.outcome.tokens += int(target.num_tokens.sum())
        for row in np.flatnonzero(target.finished | (target.length >= target.allow)).tolist():
            if target.finished[row]:
                self.outcome.sessions += 1
                self._set_state(row, RowState.FINISHED)
            elif target.num_tokens[row] > 0:
                self._set_state(row, RowState.HELD)

    def _run_drafters(self) -> None:
        self._sight.lost[:] = self._pool.lost.cpu().numpy()
        self._delivered = run_drafters(self._drafters, self._mail, self._sight, self._written.numpy())
        self._sight.now[0] += 1


def _host_columns(packed: Packed) -> list[Any]:
    return [getattr(packed, name).cpu().numpy() for name in _PACKED]


@compiled
def _verify(
    target: Any,
    table: Any,
    tokens: Any,
    positions: Any,
    slots: Any,
    parents: Any,
    prefix_len: Any,
    tree_mask: Any,
    pool_rows: Any,
    query_start: Any,
    tree_start: Any,
) -> None:
    for at in range(len(tokens)):
        target.kv[slots[at]] = contribution(tokens[at], positions[at])
    for session in range(len(pool_rows)):
        row = pool_rows[session]
        if row < 0:
            continue
        target.counters[1] += 1
        first, behind = query_start[session], query_start[session + 1]
        at, accepted = first, np.empty(behind - first, np.int64)
        start, steps = target.length[row], 0
        while True:
            total = _attend(target.kv, table[row], prefix_len[at], tree_start[session], tree_mask[at])
            token = choose(total)
            index = start + steps
            target.tokens[row, steps] = target.texts[row, index] = token
            target.counters[0] += token != target.plain[row, index]
            child = at + 1
            while child < behind and not (parents[child] == at and tokens[child] == token):
                child += 1
            is_stop = index >= target.min_end[row] and token in target.stops[row]
            target.finished[row] = is_stop or index + 1 == target.end[row]
            if child == behind:
                break
            if target.finished[row] or index + 1 == target.allow[row]:
                # Nothing there should have been selected.
                target.counters[0] += 1
                break
            accepted[steps] = child
            steps += 1
            at = child
        target.num_tokens[row] = steps + 1
        target.length[row] += steps + 1
        if target.finished[row] != (target.length[row] == target.plain_length[row]):
            target.counters[0] += 1
        _move_accepted(table[row], start - 1, first, behind, accepted[:steps])


@compiled
def _attend(kv: Any, table: Any, prefix_len: int, tree_start: int, mask: Any) -> int:
    """The sum over what a row attends to."""
    total = 0
    for key in range(prefix_len):
        total += kv[table[key]]
    for bit in range(64 * len(mask)):
        if mask[bit >> 6] >> (bit & 63) & 1:
            total += kv[table[tree_start + bit]]
    return total


@compiled
def _move_accepted(table: Any, start: int, first: int, behind: int, accepted: Any) -> None:
    """Point the table at the root's slot, those of accepted rows, then the others in order."""
    old = table[start : start + behind - first].copy()
    taken = np.zeros(len(old), np.bool_)
    taken[0] = True
    at = 1
    for row in accepted:
        table[start + at] = old[row - first]
        taken[row - first] = True
        at += 1
    for number in range(len(old)):
        if not taken[number]:
            table[start + at] = old[number]
            at += 1
