"""Triton side of `outrider.kernels.coupled_sampling`, whose formulas and conventions hold here.

Three launches, none of which writes anything of size V:

    _threshold_kernel   one program a row: the smallest z that top-k, top-p and min-p keep. A row without filters leaves
                        at once. A filter's threshold is the largest t with stat({z >= t}) >= target, where stat is a
                        count (top-k) or a mass (top-p). It is found by bisection over z's bits, ordered as integers;
                        every pass moves both bounds onto values that occur, so it ends as soon as they meet.
    _partial_kernel     one program a row and block of V: the block's k best z + G, and its mass if asked for.
    _merge_kernel       one program a row: the k best of the blocks' candidates, the smallest id first.

Shapes: T rows, V vocabulary size, C blocks of a row, k tokens of a row.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.noise import STREAM_CHOICE, gumbel_of_block
from outrider.kernels.sampling_rows import SamplingRows

__all__ = ["launch_choice", "launch_topk"]

_STREAM = tl.constexpr(STREAM_CHOICE)


def launch_choice(rows: SamplingRows) -> torch.Tensor:
    """The choice of each row, [T] int64."""
    return _launch(rows, 1, with_mass=False)[0].squeeze(1)


def launch_topk(rows: SamplingRows, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T, k] int64, log q [T, k] and scores [T, k] float32; -1 and -inf where tokens run out."""
    return _launch(rows, k, with_mass=True)


def _launch(rows: SamplingRows, k: int, *, with_mass: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = rows.logits
    count, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(count, k, dtype=torch.int64, device=device)
    log_q = torch.empty(count, k if with_mass else 0, dtype=torch.float32, device=device)
    scores = torch.empty_like(log_q)
    if count == 0:
        return tokens, log_q, scores
    block = min(max(triton.next_power_of_2(vocab_size), 16), 4096)
    blocks = triton.cdiv(vocab_size, block)
    bias = logits if rows.logit_bias is None else rows.logit_bias
    source = (logits, bias, rows.temperature.contiguous())
    strides = (*logits.stride(), *bias.stride(), vocab_size)
    threshold = torch.empty(count, dtype=torch.float32, device=device)
    search_block = min(block * 2, max(triton.next_power_of_2(vocab_size), 16))
    _threshold_kernel[(count,)](
        *source,
        rows.top_k.contiguous(),
        rows.top_p.contiguous(),
        rows.min_p.contiguous(),
        threshold,
        *strides,
        HAS_BIAS=rows.logit_bias is not None,
        BLOCK=search_block,
        num_warps=8 if search_block >= 2048 else 4,
    )
    block_k = triton.next_power_of_2(k)
    partial = torch.empty(3, count, blocks, block_k, dtype=torch.float32, device=device)
    partial_ids = torch.empty(count, blocks, block_k, dtype=torch.int32, device=device)
    partial_mass = torch.empty(2, count, blocks, dtype=torch.float32, device=device)
    choice_index = rows.positions if rows.choice_index is None else rows.choice_index
    _partial_kernel[(count, blocks)](
        *source,
        threshold,
        rows.seeds.contiguous(),
        rows.positions.contiguous(),
        choice_index.contiguous(),
        partial[0],
        partial[1],
        partial_ids,
        partial_mass[0],
        partial_mass[1],
        *strides,
        HAS_BIAS=rows.logit_bias is not None,
        HAS_CHOICE=rows.choice_index is not None,
        WITH_MASS=with_mass,
        K=k,
        BLOCK_K=block_k,
        BLOCK=block,
        num_warps=4,
    )
    _merge_kernel[(count,)](
        partial[0],
        partial[1],
        partial_ids,
        partial_mass[0],
        partial_mass[1],
        tokens,
        log_q,
        scores,
        vocab_size,
        blocks,
        WITH_MASS=with_mass,
        K=k,
        BLOCK_K=block_k,
        BLOCK=triton.next_power_of_2(blocks),
        num_warps=4,
    )
    return tokens, log_q, scores


@jit
def _scaled_block(
    logits_ptr,
    bias_ptr,
    ids,
    temperature,
    logits_stride,
    bias_stride,
    vocab_size,
    HAS_BIAS: tl.constexpr,
):
    """z of a block of ids, -inf beyond V; the biased logits themselves at temperature 0."""
    inside = ids < vocab_size
    scaled = tl.load(logits_ptr + ids * logits_stride, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        scaled += tl.load(bias_ptr + ids * bias_stride, mask=inside, other=0.0).to(tl.float32)
    if temperature > 0:
        # The clamp keeps z finite for temperatures so small that they are greedy anyway.
        scaled = tl.div_rn(scaled, tl.full(scaled.shape, 0.0, tl.float32) + tl.maximum(temperature, 1e-30))
    return scaled


@jit
def _ordered(value):
    """int32 in the order of the float32 values; adding 0 makes -0 and 0 one value."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(ordered):
    """The float32 of an ordered int."""
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _search(
    logits_ptr,
    bias_ptr,
    temperature,
    logits_stride,
    bias_stride,
    vocab_size,
    lowest,  # int64: ordered value; elements below it count nothing
    largest,  # float32: the row's largest z
    target,  # float32: stat to be reached, at most that of all elements from `lowest`
    BY_MASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest ordered value t that occurs and has stat({z >= t}) >= target, int64."""
    # Invariant: stat({z >= low}) >= target > stat({z >= high}), and low occurs.
    low = lowest
    high = _ordered(largest).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        stat = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int64)
        below = tl.full([BLOCK], -0x80000000, tl.int64)
        for begin in range(0, vocab_size, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            scaled = _scaled_block(
                logits_ptr, bias_ptr, ids, temperature, logits_stride, bias_stride, vocab_size, HAS_BIAS
            )
            ordered = _ordered(scaled).to(tl.int64)
            kept = (ids < vocab_size) & (ordered >= middle)
            if BY_MASS:
                stat += tl.where(kept, tl.exp(scaled - largest), 0.0)
            else:
                stat += kept.to(tl.float32)
            above = tl.minimum(above, tl.where(kept, ordered, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where((ids < vocab_size) & (ordered < middle), ordered, -0x80000000))
        if tl.sum(stat) >= target:
            low = tl.min(above)
        else:
            high = tl.max(below) + 1
    return low


@jit
def _threshold_kernel(
    logits_ptr,  # [T, V]
    bias_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    top_k_ptr,  # [T] int
    top_p_ptr,  # [T] float32
    min_p_ptr,  # [T] float32
    threshold_ptr,  # [T] float32
    logits_row_stride,
    logits_stride,
    bias_row_stride,
    bias_stride,
    vocab_size,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    # Everything from V on is off; a larger int64 must not wrap around.
    top_k = tl.minimum(tl.maximum(tl.load(top_k_ptr + row).to(tl.int64), 0), vocab_size).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limited = (top_k > 0) & (top_k < vocab_size)
    tl.store(threshold_ptr + row, float("-inf"))
    if (temperature <= 0) | ((limited == 0) & (top_p >= 1) & (min_p <= 0)):
        return
    logits_ptr += row * logits_row_stride
    bias_ptr += row * bias_row_stride
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        scaled = _scaled_block(logits_ptr, bias_ptr, ids, temperature, logits_stride, bias_stride, vocab_size, HAS_BIAS)
        most = tl.maximum(most, scaled)
        least = tl.minimum(least, tl.where(ids < vocab_size, scaled, float("inf")))
    largest = tl.max(most)
    if largest == float("-inf"):
        return
    if largest == float("inf"):
        tl.store(threshold_ptr + row, largest)
        return
    kept = _ordered(tl.min(least)).to(tl.int64)
    threshold = tl.full([], float("-inf"), tl.float32)
    if limited:
        kept = _search(
            logits_ptr, bias_ptr, temperature, logits_stride, bias_stride, vocab_size,
            kept, largest, top_k.to(tl.float32), False, HAS_BIAS, BLOCK,
        )  # fmt: skip
        threshold = _value(kept)
    if top_p < 1:
        mass = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, vocab_size, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            scaled = _scaled_block(
                logits_ptr, bias_ptr, ids, temperature, logits_stride, bias_stride, vocab_size, HAS_BIAS
            )
            mass += tl.where((ids < vocab_size) & (_ordered(scaled) >= kept), tl.exp(scaled - largest), 0.0)
        # The largest token is always kept, also for top_p = 0; its weight is 1.
        target = tl.maximum(tl.sum(mass) * top_p, 1e-30)
        kept = _search(
            logits_ptr, bias_ptr, temperature, logits_stride, bias_stride, vocab_size,
            kept, largest, target, True, HAS_BIAS, BLOCK,
        )  # fmt: skip
        threshold = _value(kept)
    if min_p > 0:
        threshold = tl.maximum(threshold, largest + tl.log(min_p))
    tl.store(threshold_ptr + row, threshold)


@jit
def _partial_kernel(
    logits_ptr,  # [T, V]
    bias_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    threshold_ptr,  # [T] float32
    seeds_ptr,  # [T] int64
    positions_ptr,  # [T] int
    choice_ptr,  # [T] int
    scores_ptr,  # [T, C, BLOCK_K] float32
    scaled_ptr,  # [T, C, BLOCK_K] float32
    ids_ptr,  # [T, C, BLOCK_K] int32
    largest_ptr,  # [T, C] float32
    mass_ptr,  # [T, C] float32
    logits_row_stride,
    logits_stride,
    bias_row_stride,
    bias_stride,
    vocab_size,
    HAS_BIAS: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    WITH_MASS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_id = tl.program_id(1) * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    temperature = tl.load(temperature_ptr + row)
    scaled = _scaled_block(
        logits_ptr + row * logits_row_stride,
        bias_ptr + row * bias_row_stride,
        ids,
        temperature,
        logits_stride,
        bias_stride,
        vocab_size,
        HAS_BIAS,
    )
    scores = scaled
    if temperature > 0:
        scaled = tl.where(scaled >= tl.load(threshold_ptr + row), scaled, float("-inf"))
        choice = tl.full([], 0, tl.int64)
        if HAS_CHOICE:
            choice = tl.load(choice_ptr + row).to(tl.int64)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.int64)
        scores = scaled + gumbel_of_block(seed, first_id, position, tl.full([], _STREAM, tl.int64), choice, BLOCK)
    target = row * tl.num_programs(1) + tl.program_id(1)
    for place in range(0, BLOCK_K):
        best = tl.max(scores)
        # Never out of range, whatever the logits hold (no score equals a NaN).
        token = tl.minimum(tl.min(tl.where((scores == best) & inside, ids, 0x7FFFFFFF)), vocab_size - 1)
        tl.store(scores_ptr + target * BLOCK_K + place, tl.where(place < K, best, float("-inf")))
        tl.store(scaled_ptr + target * BLOCK_K + place, tl.max(tl.where(ids == token, scaled, float("-inf"))))
        tl.store(ids_ptr + target * BLOCK_K + place, token)
        scores = tl.where(ids == token, float("-inf"), scores)
    if WITH_MASS:
        largest = tl.max(scaled)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(largest_ptr + target, largest)
        tl.store(mass_ptr + target, tl.sum(tl.exp(scaled - shift)))


@jit
def _merge_kernel(
    partial_scores_ptr,  # [T, C, BLOCK_K] float32
    partial_scaled_ptr,  # [T, C, BLOCK_K] float32
    partial_ids_ptr,  # [T, C, BLOCK_K] int32
    largest_ptr,  # [T, C] float32
    mass_ptr,  # [T, C] float32
    tokens_ptr,  # [T, K] int64
    log_q_ptr,  # [T, K] float32
    scores_ptr,  # [T, K] float32
    vocab_size,
    blocks,
    WITH_MASS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK * BLOCK_K)
    present = candidate < blocks * BLOCK_K
    source = row * blocks * BLOCK_K + candidate
    scores = tl.load(partial_scores_ptr + source, mask=present, other=float("-inf"))
    scaled = tl.load(partial_scaled_ptr + source, mask=present, other=float("-inf"))
    ids = tl.load(partial_ids_ptr + source, mask=present, other=0x7FFFFFFF)
    log_mass = tl.full([], 0.0, tl.float32)
    if WITH_MASS:
        block = tl.arange(0, BLOCK)
        largest = tl.load(largest_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
        mass = tl.load(mass_ptr + row * blocks + block, mask=block < blocks, other=0.0)
        most = tl.max(largest)
        shift = tl.where(most == float("-inf"), 0.0, most)
        log_mass = tl.log(tl.sum(mass * tl.exp(largest - shift))) + shift
    for place in range(0, K):
        best = tl.max(scores)
        token = tl.minimum(tl.min(tl.where(scores == best, ids, 0x7FFFFFFF)), vocab_size - 1)
        absent = best == float("-inf")
        if WITH_MASS:
            of_token = tl.max(tl.where((ids == token) & (scores == best), scaled, float("-inf")))
            tl.store(log_q_ptr + row * K + place, tl.where(absent, float("-inf"), of_token - log_mass))
            tl.store(scores_ptr + row * K + place, tl.where(absent, float("-inf"), best - log_mass))
            tl.store(tokens_ptr + row * K + place, tl.where(absent, -1, token).to(tl.int64))
        else:
            tl.store(tokens_ptr + row * K + place, token.to(tl.int64))
        scores = tl.where(ids == token, float("-inf"), scores)
