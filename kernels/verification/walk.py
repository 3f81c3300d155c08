"""The walk of a round: from the target's choice at every verified row to committed tokens, decided on the device.

From a session's root the walk follows the target's choices down the verified rows:

    token = the choice at the row        child = the row below it with that token

and emits each token. It ends behind a row without such a child, at a stop token in force, at the session's limit, where
its client has to read first, or, without emitting, at a row where nothing could be chosen. A row's child is found
otherwise in two cases: `decided`, where a sampling operator has chosen between the children, and the synthetic rule:

    coin(position) = (philox word of lane 0, id 0, stream 2, for the index of the token to be chosen, >> 8) * 2^-24
    child          = the first row below the row, if the coin is below the rate of its depth

There the token behind the last accepted child is the choice, unless that is the token of the child that a coin has
rejected: then the largest id below it that is no stop token, or the next id where there is none.

The walk leaves `length`, `cached`, `history` and the tree to `re_root`, which takes its outputs as they are. It does
re-point the KV slots of the session's rows in `Pool.table`: the root's, those of accepted rows that are cached from now
on, in the order of their tokens, then all others. Keys and values do not move.

Shapes: S rows of the pool, N sessions of the step, L verified rows, M most rows of a session.
"""

# compile-time parameters of kernels are upper case; a kernel is one function
# ruff: noqa: N803, PLR0912, PLR0915

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from outrider.kernels.argument_checks import check_at_least, check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.compiled import compiled
from outrider.kernels.early_launch import early_options
from outrider.kernels.noise import STREAM_COINS
from outrider.kernels.pool.columns import MAX_STOPS, Columns, Pool, PoolArrays, RowState, arrays_type
from outrider.kernels.pool.entries import is_stop
from outrider.kernels.pool.pack import PADDING, ROOT, Packed, PackedArrays
from outrider.kernels.sampling.noise_blocks import philox_words
from outrider.kernels.sampling.rows import PARAMETERS

__all__ = [
    "COUNTED_BITS",
    "COUNTED_KINDS",
    "DRAFTERS_SHIFT",
    "MAX_RATES",
    "MOST_COUNTED",
    "UNDECIDED",
    "Finish",
    "WalkRules",
    "Walks",
    "coin_rates",
    "walk",
    "walk_reference",
]

MAX_RATES = 32
"""Rates of the synthetic rule that the device knows."""
UNDECIDED = -2
"""In `decided`: the row's child is the one with the token chosen there."""
DRAFTERS_SHIFT = 16
"""Bits of `Walks.accepted` below those of the drafters."""
COUNTED_KINDS, COUNTED_BITS = 3, 10
"""Kinds of drafter, from 1, of which `Walks.selected` counts nodes, and its bits for each."""
MOST_COUNTED = (1 << COUNTED_BITS) - 1

# Words of a session's sampling parameters.
_SEED_LOW, _SEED_HIGH, _CHOICE_INDEX = 0, 1, 6
_WORD = 0xFFFFFFFF
_COIN = np.float32(2**-24)


class Finish(enum.IntEnum):
    """End of a session, if it has ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    FAULT = 3
    """Nothing could be chosen: the row's best score was not finite."""


_ROOT, _PADDING, _UNDECIDED = tl.constexpr(ROOT), tl.constexpr(PADDING), tl.constexpr(UNDECIDED)
_SHIFT, _STREAM = tl.constexpr(DRAFTERS_SHIFT), tl.constexpr(STREAM_COINS)
_NONE, _STOP = tl.constexpr(int(Finish.NONE)), tl.constexpr(int(Finish.STOP))
_LENGTH, _FAULT = tl.constexpr(int(Finish.LENGTH)), tl.constexpr(int(Finish.FAULT))
_HELD_STATE, _FINISHED_STATE = tl.constexpr(int(RowState.HELD)), tl.constexpr(int(RowState.FINISHED))
_SEED_LOW_WORD, _SEED_HIGH_WORD = tl.constexpr(_SEED_LOW), tl.constexpr(_SEED_HIGH)
_KINDS, _BITS, _MOST_COUNTED = tl.constexpr(COUNTED_KINDS), tl.constexpr(COUNTED_BITS), tl.constexpr(MOST_COUNTED)
_CHOICE_INDEX_WORD, _WORDS = tl.constexpr(_CHOICE_INDEX), tl.constexpr(PARAMETERS)


@dataclass(frozen=True, kw_only=True, eq=False)
class WalkRules(Columns):
    """Rules of the sessions that the pool does not hold. Build one with `allocate`.

    Attributes:
        level: [S] int32: the session takes part in rounds of this level and above.
        rates: [S, 32] float32: rates of the synthetic rule by depth, from 0, as `coin_rates` returns them.
        num_rates: [S] int32: how many of them; depths past the last use the last. 0: another rule.
    """

    level: torch.Tensor
    rates: torch.Tensor
    num_rates: torch.Tensor

    @classmethod
    def allocate(cls, sessions: int, device: torch.device | str = "cpu") -> WalkRules:
        """Return the rules of S = `sessions` rows, each at level 0 and not synthetic."""
        return cls(
            level=torch.zeros(sessions, dtype=torch.int32, device=device),
            rates=torch.zeros(sessions, MAX_RATES, dtype=torch.float32, device=device),
            num_rates=torch.zeros(sessions, dtype=torch.int32, device=device),
        )


WalkRulesArrays = arrays_type(WalkRules)


def coin_rates(rates: Sequence[float]) -> list[float]:
    """Return float32 numbers that every coin is below or not, as it is of the given rates.

    Args:
        rates: 1 to 32 numbers from 0 to 1.

    Raises:
        ValueError: too many of them.
    """
    if len(rates) > MAX_RATES:
        raise ValueError(f"rates: {len(rates)} given, at most {MAX_RATES} needed")
    # Coins are multiples of 2^-24.
    return [math.ceil(rate * 2**24) / 2**24 for rate in rates]


@dataclass(frozen=True, kw_only=True, eq=False)
class Walks(Columns):
    """The outcome of a round. Build one with `allocate`.

    By row of the pool, as `re_root` takes them:

    Attributes:
        tokens: [S, M] int32, emitted tokens, valid up to `num_tokens`.
        num_tokens: [S] int32; 0 for rows that are not in the round.
        tree_ends: [S] int32, what `re_root` writes: a `TreeEnd` of each row.

    By number of the session in the step, written for all places of the bucket:
        accepted: [N, M] int32, valid up to `num_accepted`: of the j-th accepted node the offset of its row from the
            session's root row, and above 16 bits its 8 of `Pool.drafters`.
        num_accepted: [N] int32: `num_emitted` where the walk ended at an accepted node, else one less.
        num_emitted: [N] int32, `num_tokens` of the session's row.
        finish: [N] int32, a `Finish`.
        selected: [N] int32, how many of the session's rows kinds of drafter had proposed: 10 bits each for the kinds 1
            to 3, lowest first, 1023 at most.
    """

    KERNELS_ALONE: ClassVar = ("tree_ends",)
    tokens: torch.Tensor
    num_tokens: torch.Tensor
    accepted: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    finish: torch.Tensor
    selected: torch.Tensor
    tree_ends: torch.Tensor

    @classmethod
    def allocate(cls, pool: Pool, *, sessions: int, most: int) -> Walks:
        """Return room for the walks of a pool's rounds.

        Args:
            pool: whose rounds.
            sessions: N, the sessions of the largest bucket.
            most: M, most rows of a session in any bucket.

        Raises:
            ValueError: a size below 1, or a session of more rows than offsets have room for.
        """
        check_at_least("sessions", sessions, 1)
        check_at_least("most", most, 1)
        if most > 1 << DRAFTERS_SHIFT:
            raise ValueError(f"most: {most} given, at most {1 << DRAFTERS_SHIFT} needed")

        def column(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=pool.device)

        return cls(
            tokens=column(pool.sessions, most),
            num_tokens=column(pool.sessions),
            accepted=column(sessions, most),
            num_accepted=column(sessions),
            num_emitted=column(sessions),
            finish=column(sessions),
            selected=column(sessions),
            tree_ends=column(pool.sessions),
        )


WalksArrays = arrays_type(Walks)


def walk(
    pool: Pool,
    packed: Packed,
    choices: torch.Tensor,
    decided: torch.Tensor | None,
    rules: WalkRules,
    parameters: torch.Tensor,
    walks: Walks,
    *,
    level: int,
) -> None:
    """Walk down the verified rows of every session of the step.

    Args:
        pool: a target's. `state` and `table` are changed, the rest is read.
        packed: the step, as `pack` wrote it, verified rows first. A session whose first row is not its root (a prefill
            chunk) has no walk.
        choices: [L] int64, the token chosen at each row of the step; -1: nothing could be chosen.
        decided: [L] int32, the row of the child that the walk goes on to, -1 if it ends there, or UNDECIDED, as all
            rows of a synthetic session are. Without it all rows are undecided.
        rules: read.
        parameters: [S, 8] int32, see `outrider.kernels.sampling.rows.PARAMETERS`.
        walks: written.
        level: of the round. Sessions of a higher one commit nothing.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_shape("choices", choices, ("L",))
    check_dtype("choices", choices, (torch.int64,))
    check_shape("parameters", parameters, (pool.sessions, PARAMETERS))
    check_dtype("parameters", parameters, (torch.int32,))
    placed = {"packed": packed.tokens, "choices": choices, "rules": rules.level, "parameters": parameters}
    if decided is not None:
        check_shape("decided", decided, (choices.shape[0],))
        check_dtype("decided", decided, (torch.int32,))
        placed["decided"] = decided
    for name, tensor in placed.items():
        check_place(name, tensor, pool.device, "pool")
    check_shape("walks.tokens", walks.tokens, (pool.sessions, "M"))
    check_at_least("sessions of walks", walks.finish.shape[0], packed.pool_rows.shape[0])
    if uses_triton(choices):
        _launch(pool, packed, choices, decided, rules, parameters, walks, level)
    else:
        walk_reference(pool, packed, choices, decided, rules, parameters, walks, level=level)


_NONE_DECIDED = np.empty(0, np.int32)


def walk_reference(
    pool: Pool,
    packed: Packed,
    choices: torch.Tensor,
    decided: torch.Tensor | None,
    rules: WalkRules,
    parameters: torch.Tensor,
    walks: Walks,
    *,
    level: int,
) -> None:
    """`walk` on a CPU, one session after the other."""
    children = _NONE_DECIDED if decided is None else decided.numpy()
    columns = (choices.numpy(), children, parameters.numpy())
    _walk(pool.arrays, packed.arrays, columns, rules.arrays, walks.arrays, level)


@compiled
def _walk(pool_arrays: Any, packed_arrays: Any, columns: Any, rules_arrays: Any, walks_arrays: Any, level: int) -> None:
    pool, packed = PoolArrays(*pool_arrays), PackedArrays(*packed_arrays)
    rules, walks = WalkRulesArrays(*rules_arrays), WalksArrays(*walks_arrays)
    choices, decided, parameters = columns
    tokens, parents, entries = packed.tokens, packed.parents, packed.entries
    walks.num_tokens[:] = 0
    # The accepted rows of a session.
    path = np.empty(walks.tokens.shape[1], np.int64)
    for session in range(len(packed.pool_rows)):
        row, first, last = packed.pool_rows[session], packed.query_start[session], packed.query_start[session + 1]
        walks.num_accepted[session] = walks.num_emitted[session] = walks.finish[session] = 0
        walks.selected[session] = 0
        if row < 0 or first == last or entries[first] != ROOT or rules.level[row] > level:
            continue
        walks.selected[session] = _count_kinds(pool.drafters[row], entries[first + 1 : last])
        length, num_rates = pool.length[row], rules.num_rates[row]
        at, accepted, emitted = first, 0, 0
        while at >= 0:
            token = choices[at]
            if len(decided) > 0 and decided[at] != UNDECIDED:
                child = decided[at]
                if child >= 0:
                    token = tokens[child]
            elif num_rates > 0:
                child = _first_child(parents, at, last)
                if child >= 0:
                    coin = _coin(parameters[row], length + emitted)
                    if coin < rules.rates[row, min(emitted, num_rates - 1)]:
                        token = tokens[child]
                    else:
                        if token == tokens[child]:
                            token = _neighbour(pool.stops[row], token)
                        child = -1
            else:
                child = _chosen_child(parents, tokens, at, last, token)
            if token < 0:
                walks.finish[session] = Finish.FAULT
                break
            walks.tokens[row, emitted] = token
            emitted += 1
            if child >= 0:
                drafters = np.int32(pool.drafters[row, entries[child]]) & 0xFF
                walks.accepted[session, accepted] = child - first | drafters << DRAFTERS_SHIFT
                path[accepted] = child
                accepted += 1
            at = child
            if is_stop(pool.stops[row], pool.min_end[row], token, length + emitted - 1):
                walks.finish[session] = Finish.STOP
                break
            if length + emitted >= pool.end[row]:
                walks.finish[session] = Finish.LENGTH
                break
            if length + emitted >= pool.allow[row]:
                pool.state[row] = RowState.HELD
                break
        if walks.finish[session] != Finish.NONE:
            pool.state[row] = RowState.FINISHED
        walks.num_tokens[row] = walks.num_emitted[session] = emitted
        walks.num_accepted[session] = accepted
        if emitted > 0:
            _repoint(
                pool.table[row, length - 1 :], packed.slots[first:last], path[: min(accepted, emitted - 1)] - first
            )


@compiled
def _count_kinds(drafters: Any, entries: Any) -> int:
    found = 0
    for kind in range(1, COUNTED_KINDS + 1):
        count = 0
        for entry in entries:
            count += (drafters[entry] >> kind) & 1
        found |= min(count, MOST_COUNTED) << (COUNTED_BITS * (kind - 1))
    return found


@compiled
def _first_child(parents: Any, at: int, last: int) -> int:
    for child in range(at + 1, last):
        if parents[child] == at:
            return child
    return -1


@compiled
def _chosen_child(parents: Any, tokens: Any, at: int, last: int, token: int) -> int:
    for child in range(at + 1, last):
        if parents[child] == at and tokens[child] == token:
            return child
    return -1


@compiled
def _neighbour(stops: Any, token: int) -> int:
    """Return the largest id below a token that is no stop token, or the next one where there is none."""
    for other in range(token - 1, -1, -1):
        if not is_stop(stops, 0, other, 0):
            return other
    return token + 1


@compiled
def _coin(words: Any, position: int) -> Any:
    """Return the coin of a token's index, in [0, 1).

    Philox4x32-10, of which the first word is used. A product may wrap around: its 64 bits are right all the same.
    """
    key_a, key_b = int(words[_SEED_LOW]) & _WORD, int(words[_SEED_HIGH]) & _WORD
    a, b, c, d = 0, int(position) & _WORD, STREAM_COINS, int(words[_CHOICE_INDEX]) & _WORD
    for _ in range(10):
        product_a, product_b = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((product_b >> 32) & _WORD) ^ b ^ key_a, product_b & _WORD
        c, d = ((product_a >> 32) & _WORD) ^ d ^ key_b, product_a & _WORD
        key_a, key_b = (key_a + 0x9E3779B9) & _WORD, (key_b + 0xBB67AE85) & _WORD
    return np.float32(a >> 8) * _COIN


@compiled
def _repoint(table: Any, slots: Any, kept: Any) -> None:
    """Write the slots of a session's rows: the root's, those of `kept` rows, the others'."""
    table[0] = slots[0]
    for number in range(len(kept)):
        table[1 + number] = slots[kept[number]]
    place, number = 1 + len(kept), 0
    for offset in range(1, len(slots)):
        # A path goes down the rows.
        if number < len(kept) and kept[number] == offset:
            number += 1
        else:
            table[place] = slots[offset]
            place += 1


def _launch(
    pool: Pool,
    packed: Packed,
    choices: torch.Tensor,
    decided: torch.Tensor | None,
    rules: WalkRules,
    parameters: torch.Tensor,
    walks: Walks,
    level: int,
) -> None:
    sessions, most = packed.pool_rows.shape[0], walks.tokens.shape[1]
    _walk_kernel[(sessions + pool.sessions,)](
        packed.tokens,
        packed.slots,
        packed.entries,
        packed.parents,
        packed.pool_rows,
        packed.query_start,
        choices.contiguous(),
        choices if decided is None else decided.contiguous(),
        rules.level,
        rules.rates,
        rules.num_rates,
        parameters.contiguous(),
        pool.drafters,
        pool.length,
        pool.state,
        pool.end,
        pool.allow,
        pool.table,
        pool.stops,
        pool.min_end,
        walks.tokens,
        walks.num_tokens,
        walks.accepted,
        walks.num_accepted,
        walks.num_emitted,
        walks.finish,
        walks.selected,
        sessions,
        most,
        level,
        pool.table.shape[1],
        C=pool.capacity,
        RATES=MAX_RATES,
        STOPS=MAX_STOPS,
        BLOCK=max(triton.next_power_of_2(most), 16),
        BLOCK_N=triton.next_power_of_2(sessions),
        HAS_DECIDED=decided is not None,
        num_warps=1,
        **early_options(pool.device),
    )


@jit(do_not_specialize=["sessions", "most", "level", "table_width"])
def _walk_kernel(
    packed_tokens_ptr,  # [R] int32
    slots_ptr,  # [R] int32
    entries_ptr,  # [R] int32
    parents_ptr,  # [R] int32
    pool_rows_ptr,  # [N] int32
    query_start_ptr,  # [N + 1] int32
    choices_ptr,  # [L] int64
    decided_ptr,  # [L] int32
    level_ptr,  # [S] int32
    rates_ptr,  # [S, RATES] float32
    num_rates_ptr,  # [S] int32
    parameters_ptr,  # [S, 8] int32
    drafters_ptr,  # [S, C] int8
    length_ptr,  # [S] int32
    state_ptr,  # [S] int8
    end_ptr,  # [S] int32
    allow_ptr,  # [S] int32
    table_ptr,  # [S, table_width] int32
    stops_ptr,  # [S, STOPS] int32
    min_end_ptr,  # [S] int32
    tokens_ptr,  # [S, M] int32
    num_tokens_ptr,  # [S] int32
    accepted_ptr,  # [N, M] int32
    num_accepted_ptr,  # [N] int32
    num_emitted_ptr,  # [N] int32
    finish_ptr,  # [N] int32
    selected_ptr,  # [N] int32
    sessions,
    most,
    level,
    table_width,
    C: tl.constexpr,
    RATES: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_DECIDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a session, which writes `num_tokens` of its row; then one a row, for rows without a walk."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    if program >= sessions:
        _clear_without_walk(
            program - sessions, pool_rows_ptr, query_start_ptr, entries_ptr, num_tokens_ptr, sessions, BLOCK_N
        )
    else:
        pool_row, first = tl.load(pool_rows_ptr + program), tl.load(query_start_ptr + program)
        count = tl.load(query_start_ptr + program + 1) - first
        index = tl.arange(0, BLOCK)
        is_row = index < count
        kind = tl.load(entries_ptr + first, mask=count > 0, other=_PADDING)
        has_walk = (pool_row >= 0) & (kind == _ROOT)
        row = tl.maximum(pool_row, 0)
        accepted, emitted, finish, selected = 0, 0, _NONE + 0, 0
        if has_walk & (tl.load(level_ptr + row) <= level):
            token = tl.load(packed_tokens_ptr + first + index, mask=is_row, other=-1)
            slot = tl.load(slots_ptr + first + index, mask=is_row)
            entry = tl.load(entries_ptr + first + index, mask=is_row, other=-1)
            above = tl.load(parents_ptr + first + index, mask=is_row, other=-1) - first
            choice = tl.load(choices_ptr + first + index, mask=is_row, other=-1).to(tl.int32)
            if HAS_DECIDED:
                decided = tl.load(decided_ptr + first + index, mask=is_row, other=-1)
            length, end = tl.load(length_ptr + row), tl.load(end_ptr + row)
            allow, min_end = tl.load(allow_ptr + row), tl.load(min_end_ptr + row)
            stops = tl.load(stops_ptr + row * STOPS + tl.arange(0, STOPS))
            num_rates = tl.load(num_rates_ptr + row)
            is_child = is_row & (above >= 0)
            follows = is_child & (token == tl.gather(choice, tl.maximum(above, 0), 0))
            drafters = tl.load(drafters_ptr + row * C + entry, mask=is_child, other=0).to(tl.int32) & 0xFF
            for drafter in tl.static_range(1, _KINDS + 1):
                nodes = tl.minimum(tl.sum((drafters >> drafter) & 1), _MOST_COUNTED)
                selected |= nodes << (_BITS * (drafter - 1))
            # Of the synthetic rule, by depth.
            is_accepted = tl.zeros((BLOCK,), tl.int32)
            if num_rates > 0:
                words = parameters_ptr + row * _WORDS
                low = tl.load(words + _SEED_LOW_WORD).to(tl.int64) & 0xFFFFFFFF
                seed = low | (tl.load(words + _SEED_HIGH_WORD).to(tl.int64) << 32)
                stream = tl.full((), _STREAM, tl.int64)
                coin, _, _, _ = philox_words(
                    seed, tl.zeros_like(index), length + index, stream, tl.load(words + _CHOICE_INDEX_WORD)
                )
                coin = (coin >> 8).to(tl.float32) * 5.9604644775390625e-08
                rate = tl.load(rates_ptr + row * RATES + tl.minimum(index, num_rates - 1))
                is_accepted = (coin < rate).to(tl.int32)

            # The place of each accepted row on the path, -1 for other rows.
            place = tl.full((BLOCK,), -1, tl.int32)
            at, is_held = 0, 0
            is_walking = 1
            while is_walking > 0:
                emits = tl.sum(tl.where(index == at, choice, 0))
                child = tl.max(tl.where(follows & (above == at), index, -1))
                if num_rates > 0:
                    child = tl.min(tl.where(is_child & (above == at), index, BLOCK))
                    drafted = tl.sum(tl.where(index == child, token, 0))
                    if child == BLOCK:
                        child = -1
                    elif tl.sum(tl.where(index == emitted, is_accepted, 0)) > 0:
                        emits = drafted
                    else:
                        child = -1
                        if (emits == drafted) & (emits >= 0):
                            other = emits - 1
                            while tl.sum((stops == other).to(tl.int32)) * (other >= 0) > 0:
                                other -= 1
                            emits = tl.where(other >= 0, other, emits + 1)
                if HAS_DECIDED:
                    taken = tl.sum(tl.where(index == at, decided, 0))
                    if taken != _UNDECIDED:
                        child = tl.where(taken >= 0, taken - first, -1)
                        emits = tl.where(child >= 0, tl.sum(tl.where(index == child, token, 0)), emits)
                if emits < 0:
                    finish = _FAULT + 0
                    is_walking = 0
                else:
                    tl.store(tokens_ptr + row * most + emitted, emits)
                    emitted += 1
                    if child >= 0:
                        place = tl.where(index == child, accepted, place)
                        accepted += 1
                    reached = length + emitted
                    if (tl.sum((stops == emits).to(tl.int32)) > 0) & (reached > min_end):
                        finish = _STOP + 0
                    elif reached >= end:
                        finish = _LENGTH + 0
                    elif reached >= allow:
                        is_held = 1
                    at = child
                    is_walking = tl.where((child >= 0) & (finish == _NONE) & (is_held == 0), 1, 0)
            if finish != _NONE:
                tl.store(state_ptr + row, tl.full((), _FINISHED_STATE, tl.int8))
            elif is_held > 0:
                tl.store(state_ptr + row, tl.full((), _HELD_STATE, tl.int8))
            tl.store(accepted_ptr + program * most + place, index | (drafters << _SHIFT), mask=place >= 0)
            if emitted > 0:
                kept = tl.minimum(accepted, emitted - 1)
                is_kept = (place >= 0) & (place < kept)
                is_other = is_row & (index > 0) & (is_kept == 0)
                others = kept + tl.cumsum(is_other.to(tl.int32), 0)
                moved = tl.where(index == 0, 0, tl.where(is_kept, 1 + place, others))
                tl.store(table_ptr + row.to(tl.int64) * table_width + length - 1 + moved, slot, mask=is_row)
        if has_walk:
            tl.store(num_tokens_ptr + row, emitted)
        tl.store(num_accepted_ptr + program, accepted)
        tl.store(num_emitted_ptr + program, emitted)
        tl.store(finish_ptr + program, finish)
        tl.store(selected_ptr + program, selected)


@jit
def _clear_without_walk(
    row, pool_rows_ptr, query_start_ptr, entries_ptr, num_tokens_ptr, sessions, BLOCK_N: tl.constexpr
):
    """Write that a row of the pool has no tokens, unless a session of the step has a walk and writes that row."""
    session = tl.arange(0, BLOCK_N)
    is_there = session < sessions
    first = tl.load(query_start_ptr + session, mask=is_there, other=0)
    last = tl.load(query_start_ptr + session + 1, mask=is_there, other=0)
    is_rows = is_there & (first < last) & (tl.load(pool_rows_ptr + session, mask=is_there, other=-1) == row)
    kind = tl.load(entries_ptr + first, mask=is_rows, other=_PADDING)
    if tl.sum((kind == _ROOT).to(tl.int32)) == 0:
        tl.store(num_tokens_ptr + row, tl.zeros((), tl.int32))
