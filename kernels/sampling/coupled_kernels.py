"""Triton side of `outrider.kernels.coupled_sampling`, whose formulas and conventions hold here.

Two launches, neither of which writes anything of size V:

    _scan_kernel    reads every logit once. Of a row without filters it estimates z + G, with logarithms that take one
                    instruction each and an error that is bounded, and keeps the largest of every tile; of a filtered
                    row it keeps the largest logit and the mass of every tile.
    choose_kernel   one program a row. It looks again at the tiles that may matter, lists what may matter of them, and
                    is exact about that: thresholds from counts and masses that are whole numbers, and the best of what
                    reaches them, with exact logarithms.

Nothing that is estimated, sampled or guessed can change the outcome, only the time it takes: the list is checked to be
complete, and the whole row is gone through where it is not.

Shapes: T rows, V vocabulary size, C tiles of a row, k tokens of a row.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.early_launch import early_options, launches_early
from outrider.kernels.sampling.coupled_choose import choose_kernel
from outrider.kernels.sampling.coupled_rows import load_filters, load_key, load_row, row_scale
from outrider.kernels.sampling.noise_blocks import race_of_counters
from outrider.kernels.sampling.row_arguments import SamplingRows

__all__ = ["launch_choice", "launch_topk"]

# Places of a row's list, fewer where a batch has very many rows; the outcome does not depend on it.
_LIST = 16384
_LISTS = 1 << 23
# Logits of a list that are held in registers and ranked against each other.
_FEW = 256
# Elements of a row's sample.
_SAMPLE = 4096
# Ids of a tile, which a warp loads at once; and tiles of a row, two for every thread of a program.
_TILE = 128
_TILES = 1024
# Ids that a program of the first launch scans, and that one of the second lists at a time.
_SCANNED = 2048
_LISTED = 4096


def launch_choice(rows: SamplingRows) -> torch.Tensor:
    """The choice of each row, [T] int64."""
    return _launch(rows, 1, with_mass=False).tokens.squeeze(1)


def launch_topk(rows: SamplingRows, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T, k] int64, log q [T, k] and scores [T, k] float32; -1 and -inf where tokens run out."""
    chosen = _launch(rows, k, with_mass=True)
    return chosen.tokens, chosen.log_q, chosen.scores


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Chosen:
    """Outputs of the launches: tokens [T, k]; log q and scores [T, k] where masses were asked for."""

    tokens: torch.Tensor
    log_q: torch.Tensor
    scores: torch.Tensor


def _launch(rows: SamplingRows, k: int, *, with_mass: bool) -> _Chosen:
    logits = rows.logits
    count, vocab_size = logits.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    log_q = empty(count, k if with_mass else 0)
    chosen = _Chosen(
        tokens=empty(count, k, dtype=torch.int64),
        log_q=log_q,
        scores=torch.empty_like(log_q),
    )
    if count == 0:
        return chosen
    whole = max(triton.next_power_of_2(vocab_size), 16)
    tile = min(whole, max(_TILE, triton.next_power_of_2(triton.cdiv(vocab_size, _TILES))))
    tiles = triton.cdiv(vocab_size, tile)
    places = min(whole, _LIST, max(1024, _LISTS // triton.next_power_of_2(count)))
    bias = logits if rows.logit_bias is None else rows.logit_bias
    filters = [column.contiguous() for column in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)]
    choice_index = rows.positions if rows.choice_index is None else rows.choice_index
    noise = [column.contiguous() for column in (rows.seeds, rows.positions, choice_index)]
    strides = (*logits.stride(), *bias.stride(), vocab_size, tiles)
    stats = empty(3, count, tiles).unbind()
    listing = (
        empty(count, places),
        empty(count, places, dtype=torch.int64),
        empty(count, places, dtype=torch.int32),
        empty(count, tiles, dtype=torch.int32),
    )
    has_bias = {"HAS_BIAS": rows.logit_bias is not None}
    has_choice = {"HAS_CHOICE": rows.choice_index is not None}
    # The second launch takes its places under the end of the first, and waits for it there.
    early = launches_early(logits.device)
    parts = min(max(_SCANNED // tile, 1), triton.next_power_of_2(tiles))
    _scan_kernel[(count, triton.cdiv(tiles, parts))](
        logits, bias, *filters, *noise, *stats, *strides,
        **has_bias, **has_choice, WITH_MASS=with_mass, PARTS=parts, TILE=tile, EARLY=early, num_warps=4,
    )  # fmt: skip
    parts = min(max(_LISTED // tile, 1), triton.next_power_of_2(tiles))
    choose_kernel[(count,)](
        logits, bias, *filters, *noise, *stats, *listing, chosen.tokens, chosen.log_q, chosen.scores, *strides,
        **has_bias, **has_choice, WITH_MASS=with_mass,
        K=k, BLOCK_K=triton.next_power_of_2(k), LIST=places, FEW=min(places, _FEW), SAMPLE=_SAMPLE,
        BLOCK=min(places, 1024), PARTS=parts, TILE=tile, TILES=max(triton.next_power_of_2(tiles), 16),
        num_warps=16, **early_options(logits.device),
    )  # fmt: skip
    return chosen


@jit
def _scan_kernel(
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
    """Scan each tile for what it leaves behind, one program a row and PARTS tiles of TILE ids.

    score   of an unfiltered row, the tile's largest z log2(e) - `race_of_counters`: an estimate of (z + G) log2(e), up
            to a constant, whose error is bounded; of a filtered or greedy row, the tile's largest l
    top     the largest l
    mass    the sum of exp((l - top) / temperature) over the tile, where somebody asks for it
    """
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
