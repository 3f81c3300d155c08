"""First launch of coupled sampling: every logit is read once, and each tile leaves three numbers behind.

    score   of an unfiltered row, the tile's largest z log2(e) - `race_of_counters`: an estimate of (z + G) log2(e), up
            to a constant, whose error is bounded; of a filtered or greedy row, the tile's largest l
    top     the largest l
    mass    the sum of exp((l - top) / temperature) over the tile, where somebody asks for it

Shapes: T rows, V vocabulary size, C tiles of a row; a program takes PARTS tiles of TILE ids.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.coupled_rows import load_filters, load_key, load_row, row_scale
from outrider.kernels.noise_blocks import race_of_counters

__all__ = ["scan_kernel"]


@jit
def scan_kernel(
    logits_ptr,  # [T, V]
    bias_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    top_k_ptr,  # [T] int
    top_p_ptr,  # [T] float32
    min_p_ptr,  # [T] float32
    seeds_ptr,  # [T] int64
    positions_ptr,  # [T] int
    choice_ptr,  # [T] int
    scores_ptr,  # [T, C] float32
    tops_ptr,  # [T, C] float32
    masses_ptr,  # [T, C] float32
    logits_row_stride,
    logits_stride,
    bias_row_stride,
    bias_stride,
    vocab_size,
    tiles,
    HAS_BIAS: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    WITH_MASS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row and PARTS tiles."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first_id = tl.program_id(1) * (PARTS * TILE)
    logits_row, bias_row = logits_ptr + row * logits_row_stride, bias_ptr + row * bias_row_stride
    source = (logits_row, bias_row, logits_stride, bias_stride, vocab_size)
    logits = load_row(source, first_id + tl.arange(0, PARTS * TILE), HAS_BIAS)
    filters, filtered = load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    # Loaded by all rows, so that no row waits for memory twice.
    seed, position, stream, choice = load_key(row, seeds_ptr, positions_ptr, choice_ptr, HAS_CHOICE)
    scale = row_scale(filters[0])
    tile = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    place = row * tiles + tile
    estimated = (filters[0] > 0) & (filtered == 0)
    if estimated:
        counter = first_id // 4 + tl.arange(0, PARTS * TILE // 4)
        scores = logits * scale - race_of_counters(seed, counter, position, stream, choice)
        tl.store(scores_ptr + place, tl.max(tl.reshape(scores, [PARTS, TILE]), axis=1), mask=tile < tiles)
    if WITH_MASS or estimated == 0:
        by_tile = tl.reshape(logits, [PARTS, TILE])
        tops = tl.max(by_tile, axis=1)
        tl.store(tops_ptr + place, tops, mask=tile < tiles)
        if estimated == 0:
            tl.store(scores_ptr + place, tops, mask=tile < tiles)
        if WITH_MASS or filtered:
            shift = tl.where(tops > float("-inf"), tops, 0.0)
            masses = tl.sum(tl.exp2((by_tile - shift[:, None]) * scale), axis=1)
            tl.store(masses_ptr + place, masses, mask=tile < tiles)
