"""Third launch of coupled sampling: list what the bounds leave of each row.

A row's programs share its tiles, skip those that the scan found out of reach, and put the logits and ids that they find
within the bounds on the row's list, in any order. Above `high`, where everything is kept and only the best are listed,
they also add up the weight of all.

Shapes: T rows, V vocabulary size, C tiles of a row, LIST the places of a row's list.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.coupled_rows import load_key, load_row, row_scale, weights
from outrider.kernels.noise_blocks import race_of_block

__all__ = ["list_kernel"]


@jit
def list_kernel(
    logits_ptr,  # [T, V]
    bias_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    seeds_ptr,  # [T] int64
    positions_ptr,  # [T] int
    choice_ptr,  # [T] int
    scores_ptr,  # [T, C] float32
    bounds_ptr,  # [T, 4] float32: low, high, floor and the largest l
    count_ptr,  # [T] int32: how many logits are listed; more than LIST where the list is too short
    sure_mass_ptr,  # [T] int64: the weight of what lies above `high`
    listed_ptr,  # [T, LIST] float32
    listed_ids_ptr,  # [T, LIST] int32
    logits_row_stride,
    logits_stride,
    bias_row_stride,
    bias_stride,
    vocab_size,
    tiles,
    HAS_BIAS: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row and turn: its tiles, up to 64, are those whose number leaves its own when divided by turns."""
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(bounds_ptr + row * 4), tl.load(bounds_ptr + row * 4 + 1)
    floor, largest = tl.load(bounds_ptr + row * 4 + 2), tl.load(bounds_ptr + row * 4 + 3)
    turns = tl.arange(0, 64)
    tile = turns * tl.num_programs(1) + tl.program_id(1)
    reached = tl.load(scores_ptr + row * tiles + tile, mask=tile < tiles, other=float("nan"))
    reached = reached >= tl.where(high == float("-inf"), floor, low)
    waiting = tl.sum(tl.where(reached, tl.full([64], 1, tl.int64) << turns.to(tl.int64), 0))
    if waiting == 0:
        return
    logits_row, bias_row = logits_ptr + row * logits_row_stride, bias_ptr + row * bias_row_stride
    source = (logits_row, bias_row, logits_stride, bias_stride, vocab_size)
    key = load_key(row, seeds_ptr, positions_ptr, choice_ptr, HAS_CHOICE)
    bounds = (low, high, floor, largest, row_scale(tl.load(temperature_ptr + row)))
    listing = (listed_ptr + row * LIST, listed_ids_ptr + row * LIST, count_ptr + row)
    sure = tl.full([], 0, tl.int64)
    turn = 0
    while waiting != 0:
        if (waiting & 1) != 0:
            first_id = (turn * tl.num_programs(1) + tl.program_id(1)) * TILE
            sure += _list_tile(source, key, bounds, listing, first_id, HAS_BIAS, LIST, TILE)
        waiting = (waiting >> 1) & 0x7FFFFFFFFFFFFFFF
        turn += 1
    if sure != 0:
        tl.atomic_add(sure_mass_ptr + row, sure, sem="relaxed")


@jit
def _list_tile(
    source,
    key,
    bounds,
    listing,
    first_id,
    HAS_BIAS: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lists what one tile has within the bounds; returns the whole weight of what it has above `high`."""
    low, high, floor, largest, scale = bounds
    ids = first_id + tl.arange(0, TILE)
    logits = load_row(source, ids, HAS_BIAS)
    wanted = (logits >= low) & (logits > float("-inf"))
    sure = tl.full([], 0, tl.int64)
    if high < float("inf"):
        seed, position, stream, choice = key
        scores = logits * scale - race_of_block(seed, first_id, position, stream, choice, TILE)
        wanted = wanted & ((logits < high) | (scores >= floor))
        if high > float("-inf"):
            sure = tl.sum(tl.where(logits >= high, weights(logits, largest, scale), 0))
    listed_ptr, listed_ids_ptr, count_ptr = listing
    count = tl.sum(wanted.to(tl.int32))
    if count > 0:
        place = tl.atomic_add(count_ptr, count, sem="relaxed") + tl.cumsum(wanted.to(tl.int32)) - 1
        wanted = wanted & (place < LIST)
        tl.store(listed_ptr + place, logits, mask=wanted)
        tl.store(listed_ids_ptr + place, ids, mask=wanted)
    return sure
