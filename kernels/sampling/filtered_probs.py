"""The distributions that sampling chooses from, as whole rows: softmax at a temperature over what the filters keep.

    z = logits / temperature
    p = exp(z) / sum of exp(z) over {v : z[v] >= thr}, and 0 outside

with thr the largest of the thresholds of top-k, top-p and min-p, by the conventions of
`outrider.kernels.coupled_sampling`: its choices are exact samples of these rows. Rules that compare probabilities need
whole rows; one that only chooses does not.

Shapes: T rows, V vocabulary size, C blocks of a row.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import math

import numpy as np
import torch

from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.coupled_sampling import row_threshold
from outrider.kernels.sampling.row_arguments import check_sampling

__all__ = ["filtered_probs", "filtered_probs_reference"]


def filtered_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The filtered, renormalised distribution of each row.

    Args:
        logits: [T, V] float32, bfloat16 or float16; -inf for tokens that may not be chosen.
        temperature: [T] float32, above 0 (0 counts as 1e-30, which leaves the largest logit alone).
        top_k: [T] int32 or int64; 0 or -1 is off.
        top_p: [T] float32; 1 is off.
        min_p: [T] float32; 0 is off.

    Returns:
        [T, V] float32; a row of which nothing may be chosen is 0 throughout.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_sampling(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    run = _launch if uses_triton(logits) else filtered_probs_reference
    return run(logits, temperature, top_k, top_p, min_p)


def filtered_probs_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`filtered_probs` in plain torch; only rows with a filter are sorted."""
    scaled = logits.float() / temperature.clamp(min=1e-30)[:, None]
    for row in ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().flatten().tolist():
        threshold = row_threshold(np.sort(scaled[row].numpy()), int(top_k[row]), float(top_p[row]), float(min_p[row]))
        scaled[row].masked_fill_(scaled[row] < threshold, -math.inf)
    return scaled.softmax(dim=-1).masked_fill_((scaled == -math.inf).all(dim=-1)[:, None], 0.0)


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    from outrider.kernels.sampling.coupled_thresholds import threshold_kernel

    count, vocab_size = logits.shape
    probs = torch.empty(count, vocab_size, dtype=torch.float32, device=logits.device)
    if count == 0:
        return probs
    temperature = temperature.clamp(min=1e-30)
    threshold = torch.empty(count, dtype=torch.float32, device=logits.device)
    search_block = min(8192, max(triton.next_power_of_2(vocab_size), 16))
    threshold_kernel[(count,)](
        logits,
        logits,
        temperature,
        top_k.contiguous(),
        top_p.contiguous(),
        min_p.contiguous(),
        threshold,
        *logits.stride(),
        *logits.stride(),
        vocab_size,
        HAS_BIAS=False,
        BLOCK=search_block,
        num_warps=8 if search_block >= 2048 else 4,
    )
    block = min(4096, max(triton.next_power_of_2(vocab_size), 16))
    blocks = triton.cdiv(vocab_size, block)
    largest, mass = torch.empty(2, count, blocks, dtype=torch.float32, device=logits.device)
    source = (logits, temperature, threshold, largest, mass)
    _mass_kernel[(count, blocks)](*source, *logits.stride(), vocab_size, BLOCK=block)
    _probs_kernel[(count, blocks)](
        *source,
        probs,
        *logits.stride(),
        vocab_size,
        blocks,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(blocks),
    )
    return probs


@jit
def _kept_block(logits_ptr, temperature_ptr, threshold_ptr, row, ids, logits_row_stride, logits_stride, vocab_size):
    """z of a block of ids, -inf where the filters drop it and beyond V."""
    places = logits_ptr + row * logits_row_stride + ids * logits_stride
    scaled = tl.load(places, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    # Rounded as torch divides, so that a z at the threshold falls on the same side.
    scaled = tl.div_rn(scaled, tl.full(scaled.shape, 0.0, tl.float32) + tl.load(temperature_ptr + row))
    return tl.where(scaled >= tl.load(threshold_ptr + row), scaled, float("-inf"))


@jit
def _mass_kernel(
    logits_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    threshold_ptr,  # [T] float32
    largest_ptr,  # [T, C] float32
    mass_ptr,  # [T, C] float32, relative to the block's largest z
    logits_row_stride,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = _kept_block(
        logits_ptr, temperature_ptr, threshold_ptr, row, ids, logits_row_stride, logits_stride, vocab_size
    )
    largest = tl.max(scaled)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest_ptr + place, largest)
    tl.store(mass_ptr + place, tl.sum(tl.exp(scaled - shift)))


@jit
def _probs_kernel(
    logits_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    threshold_ptr,  # [T] float32
    largest_ptr,  # [T, C] float32
    mass_ptr,  # [T, C] float32
    probs_ptr,  # [T, V] float32
    logits_row_stride,
    logits_stride,
    vocab_size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    largest = tl.load(largest_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    mass = tl.load(mass_ptr + row * blocks + block, mask=block < blocks, other=0.0)
    shift = tl.max(largest)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    total = tl.sum(mass * tl.exp(largest - shift))
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = _kept_block(
        logits_ptr, temperature_ptr, threshold_ptr, row, ids, logits_row_stride, logits_stride, vocab_size
    )
    probs = tl.exp(scaled - shift) / tl.where(total > 0, total, 1.0)
    tl.store(probs_ptr + row * vocab_size + ids, probs, mask=ids < vocab_size)
