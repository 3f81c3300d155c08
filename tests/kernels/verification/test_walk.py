"""Walks of random rounds against a plain one, node by node; the kernel against the loops; whole generations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.tensors import assert_same_columns

from outrider.kernels.noise import STREAM_COINS, philox_uint32_reference
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.pack import COMMITTED, PADDING, ROOT, Packed
from outrider.kernels.verification.walk import (
    DRAFTERS_SHIFT,
    MAX_RATES,
    UNDECIDED,
    Finish,
    WalkRules,
    Walks,
    coin_rates,
    walk,
    walk_reference,
)
from outrider.sampling import SamplingSpec

_CPU = torch.device("cpu")
_ROWS, _PLACES, _MOST, _CAPACITY, _MAX_LEN = 7, 6, 9, 32, 60
_LEVEL = 2
_TOKENS = 6
_UNWRITTEN = -7


@dataclass(kw_only=True)
class Session:
    """One session of a round, rows counted from its root."""

    row: int
    tokens: list[int]
    parents: list[int]
    entries: list[int]
    drafters: list[int]
    choices: list[int]
    decided: list[int] | None
    length: int
    end: int
    allow: int
    stops: list[int]
    min_end: int
    level: int
    spec: SamplingSpec
    slots: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Outcome:
    tokens: list[int]
    accepted: list[int]
    finish: Finish
    is_held: bool


def _random_session(chance: random.Random, row: int, *, decides: bool) -> Session:
    count = chance.choice([1, 2, 4, _MOST])
    tokens, parents = [chance.randrange(_TOKENS)], [-1]
    while len(tokens) < count:
        # Chains as often as bushes.
        parent = chance.choice([len(tokens) - 1, chance.randrange(len(tokens))])
        siblings = {tokens[other] for other in range(len(tokens)) if parents[other] == parent}
        if free := [token for token in range(_TOKENS) if token not in siblings]:
            tokens.append(chance.choice(free))
            parents.append(parent)
    length = chance.randint(1, 20)
    stops = sorted(chance.sample(range(_TOKENS), chance.choice([0, 0, 1, 3])))
    # A likely path, so that walks get somewhere.
    choices = [
        chance.choice([*(tokens[child] for child in range(count) if parents[child] == at), chance.randrange(_TOKENS)])
        for at in range(count)
    ]
    choices = [-1 if chance.random() < 0.04 else choice for choice in choices]
    rates = tuple(chance.choice([0.0, 1.0, 0.7, chance.random()]) for _ in range(chance.choice([1, 1, 2, 5])))
    synthetic_rates = chance.choice([(), rates])
    decided = [UNDECIDED] * count if decides else None
    if decides and not synthetic_rates:
        decided = [
            chance.choice([UNDECIDED, -1, *([child for child in range(count) if parents[child] == at] * 2)])
            for at in range(count)
        ]
    end = length + chance.choice([1, 2, 3, 5, 30])
    return Session(
        row=row,
        tokens=tokens,
        parents=parents,
        entries=[ROOT, *sorted(chance.sample(range(_CAPACITY), count - 1))],
        drafters=[chance.randrange(256) for _ in range(count)],
        choices=choices,
        decided=decided,
        length=length,
        end=end,
        allow=chance.choice([end, length + 1, length + 3, 1000]),
        stops=stops,
        min_end=length + chance.choice([-1, 0, 1, 2]),
        level=chance.choice([0, _LEVEL, _LEVEL, _LEVEL + 1]),
        spec=SamplingSpec(
            seed=chance.getrandbits(64),
            choice_index=chance.choice([0, 3]),
            synthetic_rates=synthetic_rates,
            stop_token_ids=tuple(stops),
        ),
    )


def _plain_path(session: Session) -> Iterator[tuple[int, int]]:
    """Each token that the session's rule comes to, and its row, -1 where it ends the walk behind the last row."""
    if session.spec.synthetic_rates:
        yield from _synthetic_path(session)
        return
    at = 0
    while at >= 0:
        token = session.choices[at]
        children = [child for child in range(len(session.tokens)) if session.parents[child] == at]
        matching = [child for child in children if session.tokens[child] == token]
        child = matching[0] if matching else -1
        if session.decided is not None and session.decided[at] != UNDECIDED:
            child = session.decided[at]
            token = session.tokens[child] if child >= 0 else token
        yield token, child
        at = child


def _synthetic_path(session: Session) -> Iterator[tuple[int, int]]:
    """First children as long as coins fall below the rates, then the choice behind them, never the rejected token."""
    rates, at, rejected = session.spec.synthetic_rates, 0, -1
    for depth in range(len(session.tokens)):
        child = next((child for child, parent in enumerate(session.parents) if parent == at), -1)
        if child < 0:
            break
        if _coin(session.spec, session.length + depth) >= rates[min(depth, len(rates) - 1)]:
            rejected = session.tokens[child]
            break
        yield session.tokens[child], child
        at = child
    token = session.choices[at]
    if token >= 0 and token == rejected:
        below = (other for other in range(token - 1, -1, -1) if other not in session.stops)
        token = next(below, token + 1)
    yield token, -1


def _coin(spec: SamplingSpec, position: int) -> float:
    seed = torch.tensor([spec.seed - (spec.seed >> 63 << 64)])
    word = torch.zeros((1, 1), dtype=torch.int64)
    choice_index = torch.tensor([spec.choice_index])
    words = philox_uint32_reference(seed, torch.tensor([position]), word, STREAM_COINS, choice_index)
    return (int(words) >> 8) * 2.0**-24


def _plain_walk(session: Session) -> Outcome:
    outcome = Outcome(tokens=[], accepted=[], finish=Finish.NONE, is_held=False)
    if session.level > _LEVEL:
        return outcome
    for token, row in _plain_path(session):
        if token < 0:
            outcome.finish = Finish.FAULT
            break
        outcome.tokens.append(token)
        if row >= 0:
            outcome.accepted.append(row)
        reached = session.length + len(outcome.tokens)
        if token in session.stops and reached - 1 >= session.min_end:
            outcome.finish = Finish.STOP
            break
        if reached == session.end:
            outcome.finish = Finish.LENGTH
            break
        if reached >= session.allow:
            outcome.is_held = True
            break
    return outcome


class Round:
    """Sessions as the columns of a step on a device; between them a prefill chunk of a row, behind them padding."""

    def __init__(self, sessions: list[Session], device: torch.device) -> None:
        self.sessions = sessions
        self.pool = Pool.allocate(
            sessions=_ROWS, max_len=_MAX_LEN, capacity=_CAPACITY, places=1, trail=4, device=device
        )
        self.pool.table.copy_(torch.arange(self.pool.table.numel()).view_as(self.pool.table) + 100)
        self.pool.state.fill_(RowState.RUNNING)
        self.rules = WalkRules.allocate(_ROWS, device)
        self.walks = Walks.allocate(self.pool, sessions=_PLACES + 1, most=_MOST)
        for column in fields(self.walks):
            if isinstance(tensor := getattr(self.walks, column.name, None), torch.Tensor):
                tensor.fill_(_UNWRITTEN)
        rows = sum(len(session.tokens) for session in sessions) + 5
        self.packed = Packed.allocate(self.pool, (rows, _PLACES, _MOST, rows), scrap_slot=99)
        self.packed.entries.fill_(PADDING)
        self.packed.pool_rows.fill_(-1)
        self.packed.parents.fill_(-1)
        self.parameters = torch.full((_ROWS, 8), -1, dtype=torch.int32, device=device)
        self.choices = torch.full((rows,), 1, dtype=torch.int64, device=device)
        self.decided = None
        if sessions[0].decided is not None:
            self.decided = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.at = 0
        for number, session in enumerate(sessions):
            self._add(number, session)
        # The last chunk of a prompt whose root is verified, and one of a row that has nothing verified.
        chunks = [sessions[0].row, *({*range(_ROWS)} - {session.row for session in sessions})][:2]
        for number, row in enumerate(chunks, start=len(sessions)):
            self.packed.pool_rows[number] = row
            self.packed.query_start[number] = self.at
            self.packed.entries[self.at : self.at + 2] = COMMITTED
            self.at += 2
        self.packed.query_start[len(sessions) + 2 :] = self.at

    def _add(self, number: int, session: Session) -> None:
        pool, packed, row, count = self.pool, self.packed, session.row, len(session.tokens)
        rows = slice(self.at, self.at + count)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        session.slots = pool.table[row, session.length - 1 :][:count].tolist()
        packed.tokens[rows], packed.entries[rows] = ints(session.tokens), ints(session.entries)
        packed.slots[rows] = ints(session.slots)
        packed.parents[rows] = ints([-1 if parent < 0 else self.at + parent for parent in session.parents])
        packed.pool_rows[number], packed.query_start[number] = row, self.at
        self.choices[rows] = torch.tensor(session.choices)
        if self.decided is not None and session.decided is not None:
            self.decided[rows] = ints([child if child < 0 else self.at + child for child in session.decided])
        drafters = np.array(session.drafters, np.uint8).view(np.int8)
        for entry, bits in zip(session.entries[1:], drafters[1:], strict=True):
            pool.drafters[row, entry] = int(bits)
        pool.length[row], pool.end[row], pool.allow[row] = session.length, session.end, session.allow
        pool.min_end[row] = session.min_end
        pool.stops[row, : len(session.stops)] = ints(session.stops)
        rates = coin_rates(session.spec.synthetic_rates)
        self.rules.level[row], self.rules.num_rates[row] = session.level, len(rates)
        self.rules.rates[row, : len(rates)] = torch.tensor(rates)
        self.parameters[row] = torch.frombuffer(bytearray(session.spec.record), dtype=torch.int32)
        self.at += count

    def arguments(self) -> Any:
        return (self.pool, self.packed, self.choices, self.decided, self.rules, self.parameters, self.walks)

    def walk(self) -> None:
        walk(*self.arguments(), level=_LEVEL)

    def check(self) -> list[Outcome]:
        """Compare what the walk has left with plain walks; those."""
        outcomes = [_plain_walk(session) for session in self.sessions]
        table = torch.arange(self.pool.table.numel(), dtype=torch.int32).view_as(self.pool.table) + 100
        state = [RowState.RUNNING] * _ROWS
        num_tokens = [0] * _ROWS
        walks = self.walks
        for number, (session, outcome) in enumerate(zip(self.sessions, outcomes, strict=True)):
            row, emitted, count = session.row, len(outcome.tokens), len(session.tokens)
            num_tokens[row] = emitted
            assert walks.tokens[row, :emitted].tolist() == outcome.tokens
            assert int(walks.num_emitted[number]) == emitted
            assert Finish(int(walks.finish[number])) is outcome.finish
            counted = [sum(drafters >> kind & 1 for drafters in session.drafters[1:]) for kind in (1, 2, 3)]
            takes_part = session.level <= _LEVEL
            assert int(walks.selected[number]) == takes_part * (counted[0] | counted[1] << 10 | counted[2] << 20)
            accepted = walks.accepted[number, : int(walks.num_accepted[number])].tolist()
            assert [word & (1 << DRAFTERS_SHIFT) - 1 for word in accepted] == outcome.accepted
            assert [word >> DRAFTERS_SHIFT for word in accepted] == [session.drafters[at] for at in outcome.accepted]
            if outcome.finish is not Finish.NONE:
                state[row] = RowState.FINISHED
            elif outcome.is_held:
                state[row] = RowState.HELD
            if emitted:
                kept = outcome.accepted[: emitted - 1]
                order = [0, *kept, *(at for at in range(1, count) if at not in kept)]
                moved = torch.tensor([session.slots[at] for at in order], dtype=torch.int32)
                table[row, session.length - 1 : session.length - 1 + count] = moved
        nobody = slice(len(self.sessions), _PLACES)
        for column in (walks.num_accepted, walks.num_emitted, walks.finish, walks.selected):
            assert column[nobody].tolist() == [0] * (_PLACES - len(self.sessions))
            assert column[_PLACES:].tolist() == [_UNWRITTEN]
        assert walks.num_tokens.tolist() == num_tokens
        assert self.pool.state.tolist() == state
        assert torch.equal(self.pool.table.cpu(), table)
        return outcomes


def _random_round(seed: int, device: torch.device) -> Round:
    chance = random.Random(seed)
    rows = chance.sample(range(_ROWS), chance.randint(1, _PLACES - 2))
    decides = chance.random() < 0.3
    return Round([_random_session(chance, row, decides=decides) for row in rows], device)


def _walk_and_check(seeds: range, device: torch.device) -> Counter[Any]:
    """Walk random rounds; how often what may happen did."""
    seen: Counter[Any] = Counter()
    for seed in seeds:
        round_ = _random_round(seed, device)
        before = [tensor.tolist() for tensor in (round_.pool.length, round_.pool.cached, round_.pool.history)]
        round_.walk()
        outcomes = round_.check()
        after = [tensor.tolist() for tensor in (round_.pool.length, round_.pool.cached, round_.pool.history)]
        assert before == after
        for session, outcome in zip(round_.sessions, outcomes, strict=True):
            is_synthetic = bool(session.spec.synthetic_rates)
            seen[outcome.finish] += 1
            seen["held"] += outcome.is_held
            seen["commits nothing"] += not outcome.tokens
            seen["held at a node"] += outcome.is_held and len(outcome.tokens) == len(outcome.accepted)
            seen["decided"] += session.decided is not None and not is_synthetic
            seen["fault behind a token"] += outcome.finish is Finish.FAULT and len(outcome.tokens) > 0
            at = outcome.accepted[-1] if outcome.accepted else 0
            if is_synthetic and len(outcome.tokens) > len(outcome.accepted):
                seen["neighbour"] += outcome.tokens[-1] != session.choices[at]
                seen["above"] += outcome.tokens[-1] == session.choices[at] + 1
            seen["past the last rate"] += is_synthetic and len(outcome.accepted) > len(session.spec.synthetic_rates)
            seen["moved"] += outcome.accepted[: len(outcome.tokens) - 1] not in ([], [1], [1, 2])
    return seen


def test_random_rounds_are_walked_as_node_by_node() -> None:
    seen = _walk_and_check(range(600), _CPU)
    assert min(seen[finish] for finish in Finish) > 20
    kinds = ("held", "commits nothing", "held at a node", "decided", "fault behind a token", "neighbour", "above")
    assert min(seen[kind] for kind in (*kinds, "past the last rate", "moved")) > 5


def test_the_kernel_leaves_the_same_bits(triton_device: torch.device) -> None:
    seen: Counter[Any] = Counter()
    for seed in range(1000, 1030 if triton_device == _CPU else 1600):
        mine, its = _random_round(seed, _CPU), _random_round(seed, triton_device)
        walk_reference(*mine.arguments(), level=_LEVEL)
        its.walk()
        assert_same_columns(mine.pool, its.pool)
        assert_same_columns(mine.walks, its.walks)
        seen.update(Finish(finish) for finish in mine.walks.finish[:_PLACES].tolist())
        seen["held"] += int((mine.pool.state == RowState.HELD).sum())
        seen["decided"] += mine.decided is not None
        for number, session in enumerate(mine.sessions):
            accepted = int(mine.walks.num_accepted[number])
            seen["accepted"] += accepted > 1
            seen["synthetic"] += accepted > 0 and bool(session.spec.synthetic_rates)
    assert min(seen[kind] for kind in (*Finish, "held", "decided", "accepted", "synthetic")) > 0


def test_rates_are_compared_as_they_were_given() -> None:
    # Neither is a float32 number; a coin may be the float32 number below.
    for rate in (0.7, 0.1, 1 / 3, 1.0, 0.0):
        (rounded,) = coin_rates([rate])
        assert float(np.float32(rounded)) == rounded
        nearest = round(rate * 2**24)
        for coin in (number / 2**24 for number in range(nearest - 2, nearest + 3)):
            assert (coin < rounded) == (coin < rate)
    with pytest.raises(ValueError, match="rates: 33 given, at most 32 needed"):
        coin_rates([0.5] * (MAX_RATES + 1))


@pytest.mark.parametrize("above", [0, 1])
def test_a_coin_has_to_be_below_the_rate(above: int) -> None:
    session = _random_session(random.Random(3), 0, decides=False)
    rate = _coin(SamplingSpec(seed=session.spec.seed), session.length) + above * 2.0**-24
    spec = SamplingSpec(seed=session.spec.seed, synthetic_rates=(rate, 0.0))
    chain = replace(session, tokens=[1, 2], parents=[-1, 0], entries=[ROOT, 0], drafters=[0, 1], choices=[3, 3])
    round_ = Round([replace(chain, spec=spec, stops=[], level=0)], _CPU)
    round_.walk()
    (outcome,) = round_.check()
    assert len(outcome.accepted) == above


def test_bad_arguments_are_named() -> None:
    round_ = _random_round(0, _CPU)
    pool, packed, choices, _, rules, parameters, walks = round_.arguments()
    decided = torch.zeros_like(choices, dtype=torch.int32)

    def refused(message: str, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            walk(*arguments, level=0)

    refused("choices: dtype torch.int32 given", pool, packed, choices.int(), None, rules, parameters, walks)
    refused("decided: shape", pool, packed, choices, decided[1:], rules, parameters, walks)
    refused("decided: dtype", pool, packed, choices, choices, rules, parameters, walks)
    refused("parameters: shape", pool, packed, choices, None, rules, parameters[:, :7], walks)
    refused("choices: device meta given", pool, packed, choices.to("meta"), None, rules, parameters, walks)
    small = Walks.allocate(pool, sessions=_PLACES - 1, most=_MOST)
    refused("sessions of walks: 5 given, at least 6 needed", pool, packed, choices, None, rules, parameters, small)
    with pytest.raises(ValueError, match="most: 65537 given"):
        Walks.allocate(pool, sessions=1, most=65537)
