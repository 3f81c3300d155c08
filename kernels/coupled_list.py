"""The list of a row: logits and ids of what its bounds leave, out of the tiles that reach them.

Tiles are taken several at a time, in ascending order, and tokens go on the list in that order. Above `high`, where
everything is kept and only the best are listed, the weight of all is added up.

Shapes: V vocabulary size, C tiles of a row, LIST the places of a row's list.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.coupled_rows import load_row_where, row_scale, weights
from outrider.kernels.noise_blocks import race_of_counters

__all__ = ["list_row"]


@jit
def list_row(
    source,
    temperature,
    key,
    stats,
    bounds,
    largest,
    listing,
    HAS_BIAS: tl.constexpr,
    LIST: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """How many logits are within the bounds, the first LIST of which it lists, and the weight of what is sure."""
    low, high, floor = bounds
    listed_ptr, listed_ids_ptr = listing
    seed, position, stream, choice = key
    scale = row_scale(temperature)
    tile = tl.arange(0, TILES)
    scores = tl.load(stats[0] + tile, mask=tile < stats[3], other=float("nan"))
    reached = scores >= tl.where(high == float("-inf"), floor, low)
    order = tl.cumsum(reached.to(tl.int32)) - 1
    count = tl.full([], 0, tl.int32)
    sure = tl.full([], 0, tl.int64)
    for begin in range(0, tl.sum(reached.to(tl.int32)), PARTS):
        # The next tiles in line, -1 past the last.
        turn = begin + tl.arange(0, PARTS)
        mine = reached[None, :] & (order[None, :] == turn[:, None])
        tiles = tl.sum(tl.where(mine, tile[None, :] + 1, 0), axis=1) - 1
        ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        logits = load_row_where(source, ids, (ids < source[4]) & (tiles >= 0)[:, None], HAS_BIAS)
        wanted = (logits >= low) & (logits > float("-inf"))
        if high < float("inf"):
            counter = tl.maximum(tiles, 0)[:, None] * (TILE // 4) + tl.arange(0, TILE // 4)[None, :]
            race = race_of_counters(seed, counter, position, stream, choice)
            wanted = wanted & ((logits < high) | (logits * scale - race >= floor))
            if high > float("-inf"):
                sure += tl.sum(tl.sum(tl.where(logits >= high, weights(logits, largest, scale), 0), axis=1))
        counts = tl.sum(wanted.to(tl.int32), axis=1)
        place = (count + tl.cumsum(counts) - counts)[:, None] + tl.cumsum(wanted.to(tl.int32), axis=1) - 1
        wanted = wanted & (place < LIST)
        tl.store(listed_ptr + place, logits, mask=wanted)
        tl.store(listed_ids_ptr + place, ids, mask=wanted)
        count += tl.sum(counts)
    # Others of the program read what some have written.
    tl.debug_barrier()
    return count, sure
