"""The list of a row: logits and ids of what its bounds leave, out of the tiles that reach them.

The tiles that reach them are listed first, then taken several at a time, and tokens go on the list in ascending order.
Above `high`, where everything is kept and only the best are listed, the weight of all is added up.

A `listing` is pointers to what is on the list, its z, weights, ids, and to the tiles in line. Weights are those of
filtered rows, and 0 from `high` on, as they are in the sum. What many threads need of a list goes through memory: the
compiler would otherwise have each of them divide and exponentiate for itself.

Shapes: V vocabulary size, C tiles of a row, LIST the places of a row's list.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.coupled_rows import load_row_where, row_scale, scaled, weights
from outrider.kernels.noise_blocks import race_of_counters

__all__ = ["list_row"]


@jit
def list_row(
    source,
    temperature,
    filtered,
    key,
    tile_scores,
    tiles,
    bounds,
    largest,
    listing,
    HAS_BIAS: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """How many logits are within the bounds, the first LIST of which it lists, and the weight of what is sure.

    `tile_scores` [TILES] are the scan's, of `tiles` tiles.
    """
    low, high, floor = bounds
    listed_ptr, weights_ptr, ids_ptr, order_ptr = listing
    seed, position, stream, choice = key
    scale = row_scale(temperature)
    tile = tl.arange(0, TILES)
    reached = (tile_scores >= tl.where(high == float("-inf"), floor, low)) & (tile < tiles)
    tl.store(order_ptr + tl.cumsum(reached.to(tl.int32)) - 1, tile, mask=reached)
    visits = tl.sum(reached.to(tl.int32))
    count = tl.full([], 0, tl.int32)
    sure = tl.full([], 0, tl.int64)
    # Others of the program read what some have written.
    tl.debug_barrier()
    for begin in range(0, visits, PARTS):
        turn = begin + tl.arange(0, PARTS)
        mine = tl.load(order_ptr + turn, mask=turn < visits, other=0)
        ids = mine[:, None] * TILE + tl.arange(0, TILE)[None, :]
        logits = load_row_where(source, ids, (ids < source[4]) & (turn < visits)[:, None], HAS_BIAS)
        wanted = (logits >= low) & (logits > float("-inf"))
        if high < float("inf"):
            counter = mine[:, None] * (TILE // 4) + tl.arange(0, TILE // 4)[None, :]
            race = race_of_counters(seed, counter, position, stream, choice)
            wanted = wanted & ((logits < high) | (logits * scale - race >= floor))
            if high > float("-inf"):
                sure += tl.sum(tl.sum(tl.where(logits >= high, weights(logits, largest, scale), 0), axis=1))
        counts = tl.sum(wanted.to(tl.int32), axis=1)
        place = (count + tl.cumsum(counts) - counts - 1)[:, None] + tl.cumsum(wanted.to(tl.int32), axis=1)
        wanted = wanted & (place < LIST)
        tl.store(listed_ptr + place, logits, mask=wanted)
        tl.store(ids_ptr + place, ids, mask=wanted)
        count += tl.sum(counts)
    tl.debug_barrier()
    for begin in range(0, tl.minimum(count, LIST), BLOCK):
        turn = begin + tl.arange(0, BLOCK)
        listed = turn < tl.minimum(count, LIST)
        logits = tl.load(listed_ptr + turn, mask=listed, other=float("-inf"))
        # z goes where the logits were, which all must have read.
        tl.debug_barrier()
        tl.store(listed_ptr + turn, scaled(logits, temperature), mask=listed)
        if filtered:
            weight = tl.where(logits < high, weights(logits, largest, scale), 0)
            tl.store(weights_ptr + turn, weight, mask=listed)
    tl.debug_barrier()
    return count, sure
