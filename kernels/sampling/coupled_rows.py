"""Rows of logits inside the kernels of coupled sampling: tiles, the scale of probabilities, integers in float order.

    l       = logits + bias, in float32
    z       = l / max(temperature, 1e-30), rounded as torch divides; l itself for greedy rows
    weight  = exp((l - largest l) / temperature), temperature 1 for greedy rows: a probability but for its normaliser

z decides what is kept and what is chosen. Weights decide how much of the mass that is, and are summed as multiples of
2^-40: whole numbers, whose sum depends on no order, so that the same tokens have the same mass however they were found.

A row's `source` is (logits_ptr, bias_ptr, logits_stride, bias_stride, V), pointers at the row's first element. Its
`filters` are (temperature, top_k, top_p, min_p), top_k 0 where it is off. Its `key` is (seed, position, stream,
choice).

Shapes: V vocabulary size, C tiles of a row.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.noise import STREAM_CHOICE

__all__ = [
    "load_filters",
    "load_key",
    "load_row",
    "load_row_where",
    "ordered",
    "row_mass",
    "row_scale",
    "scaled",
    "unordered",
    "weights",
]

_STREAM = tl.constexpr(STREAM_CHOICE)
_LOG2_E = tl.constexpr(1.4426950408889634)
# How many units a weight of 1 has; a million of them stay far below 2^63.
_UNITS = tl.constexpr(2.0**40)


@jit
def load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
    """The filters of a row, and whether any of them is at work."""
    temperature = tl.load(temperature_ptr + row)
    # Everything from V on is off; a larger int64 must not wrap around.
    top_k = tl.minimum(tl.maximum(tl.load(top_k_ptr + row).to(tl.int64), 0), vocab_size).to(tl.int32)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return (temperature, top_k, top_p, min_p), filtered


@jit
def load_key(row, seeds_ptr, positions_ptr, choice_ptr, HAS_CHOICE: tl.constexpr):
    """The key of a row's noise."""
    choice = tl.full([], 0, tl.int64)
    if HAS_CHOICE:
        choice = tl.load(choice_ptr + row).to(tl.int64)
    return tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.int64), tl.full([], _STREAM, tl.int64), choice


@jit
def load_row(source, ids, HAS_BIAS: tl.constexpr):
    """l of a block of ids, -inf beyond V."""
    return load_row_where(source, ids, ids < source[4], HAS_BIAS)


@jit
def load_row_where(source, ids, inside, HAS_BIAS: tl.constexpr):
    """l of a block of ids where `inside` holds, -inf elsewhere; it holds nowhere beyond V."""
    logits_ptr, bias_ptr, logits_stride, bias_stride, _ = source
    ids = ids.to(tl.int64)
    logits = tl.load(logits_ptr + ids * logits_stride, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + ids * bias_stride, mask=inside, other=0.0).to(tl.float32)
    return logits


@jit
def scaled(logits, temperature):
    """z of a block or of a scalar."""
    if temperature > 0:
        # The clamp keeps z finite for temperatures so small that they are greedy anyway.
        logits = tl.div_rn(logits, tl.full(logits.shape, 0.0, tl.float32) + tl.maximum(temperature, 1e-30))
    return logits


@jit
def row_scale(temperature):
    """log2(e) / temperature: differences of logits times this are base-2 logarithms of ratios of probabilities."""
    return tl.where(temperature > 0, _LOG2_E / tl.maximum(temperature, 1e-30), _LOG2_E)


@jit
def weights(logits, largest, scale):
    """The whole weights of a block, int64; 0 for -inf."""
    return tl.where(logits > float("-inf"), tl.exp2((logits - largest) * scale) * _UNITS, 0.0).to(tl.int64)


@jit
def row_mass(tops, masses, largest, scale):
    """The whole weight of a row, int64, from the largest l of each of its tiles and the tile's mass relative to it."""
    share = tl.where(tops > float("-inf"), masses * tl.exp2((tops - largest) * scale), 0.0)
    return tl.sum((share * _UNITS).to(tl.int64))


@jit
def ordered(value):
    """int64 in the order of the float32 values; adding 0 makes -0 and 0 one value."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def unordered(value):
    """The float32 of an int of `ordered`."""
    bits = value.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
