"""The noise of `outrider.kernels.noise` inside Triton kernels: its bits, its value G, and a cheap estimate of it.

    E  = -log(1 - w)    G = -log E         `gumbel_of_word`, two exact logarithms
    E2 = -log2(1 - w)   log2 E2            `race_of_word`, from two logarithms of the hardware's function unit

A kernel that looks for the largest z + G estimates it for every token and takes exact logarithms for the few that the
estimate leaves. In units of log 2 the score is (z + G) log2(e) = z log2(e) - log2 E2 + `RACE_SHIFT`, and

    -`RACE_ABOVE` <= estimate of log2 E2 - log2 E2 <= `RACE_BELOW`    for every one of the 2^32 words

(a test on the GPU goes through them all). The hardware's log2 is off by up to 2^-22 near 1, which is everything where
w is small. So 1 - w is taken 2^-21 too large, which keeps the estimate of E2 below the truth, and w log2(e), which is
below the truth as well and close to it where w is small, stands in where it is larger. What this costs is the end where
w nears 1 and E2 its largest value 24; words there win only where one token has nearly all the probability.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from outrider.kernels.backend import INTERPRETED, jit, tl

__all__ = [
    "RACE_ABOVE",
    "RACE_BELOW",
    "RACE_SHIFT",
    "gumbel_of_ids",
    "gumbel_of_word",
    "philox_words",
    "race_of_counters",
    "race_of_word",
    "word_of_ids",
]

# log2(log2(e)), as G log2(e) = -log2(E) = -log2(E2) + log2(log2(e)).
RACE_SHIFT = 0.5287663729448977
RACE_ABOVE = 2**-14
RACE_BELOW = 2**-2

# The hardware's instructions are not there under the interpreter; the bounds hold for its logarithm, too.
_HARDWARE = tl.constexpr(not INTERPRETED)


@jit
def philox_words(seed, counter, position, stream, choice):
    """The four uint32 words of each counter; `counter` is a block of ids >> 2, the rest are scalars or blocks."""
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), position.to(tl.uint32)
    c2, c3 = stream.to(tl.uint32), choice.to(tl.uint32)
    for _ in tl.static_range(10):
        high_a, low_a = _product(c0, 0xD2511F53)
        high_b, low_b = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ (c1 ^ key0), low_b, high_a ^ (c3 ^ key1), low_a
        key0 = (key0 + 0x9E3779B9).to(tl.uint32)
        key1 = (key1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@jit
def _product(word, FACTOR: tl.constexpr):
    """The high and the low half of `word` * FACTOR, by one wide product: Triton itself takes two products for it."""
    if _HARDWARE:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .u64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p; }",
            "=r,=r,r,r",
            [word, tl.full([], FACTOR, tl.uint32)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        product = word.to(tl.uint64) * FACTOR
        low, high = product.to(tl.uint32), (product >> 32).to(tl.uint32)
    return high, low


@jit
def gumbel_of_word(word):
    """G of a block of uint32 words, as in `outrider.kernels.noise.gumbel_from_uint32`."""
    w = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    exponential = tl.where(w < 0.00048828125, w + w * w / 2 + w * w * w / 3, -tl.log(1 - w))
    return -tl.log(exponential)


@jit
def word_of_ids(seed, ids, position, stream, choice):
    """The uint32 word of each id of a block."""
    x0, x1, x2, x3 = philox_words(seed, ids >> 2, position, stream, choice)
    lane = ids & 3
    return tl.where(lane == 0, x0, tl.where(lane == 1, x1, tl.where(lane == 2, x2, x3)))


@jit
def gumbel_of_ids(seed, ids, position, stream, choice):
    """G of a block of ids."""
    return gumbel_of_word(word_of_ids(seed, ids, position, stream, choice))


@jit
def race_of_counters(seed, counter, position, stream, choice):
    """The estimate of log2 E2 for the four ids of each counter: [.., 4 N] for counters [.., N]."""
    x0, x1, x2, x3 = philox_words(seed, counter, position, stream, choice)
    return race_of_word(tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3)))


@jit
def race_of_word(word):
    """The estimate of log2 E2 of a block of uint32 words."""
    x = word.to(tl.float32)
    # 1 - w + 2^-21 and, of opposite sign, w log2(e): constants with 2^-32 in them, so that each is one instruction.
    log2_rest = _log2(x * -2.3283064365386963e-10 + 1.000000476837158203125)
    return _log2_of_negated(tl.minimum(log2_rest, x * -3.3590363e-10 - 1.6795181e-10))


@jit
def _log2(value):
    if _HARDWARE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(value)


@jit
def _log2_of_negated(value):
    if _HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 n; neg.ftz.f32 n, $1; lg2.approx.ftz.f32 $0, n; }",
            "=f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.log2(-value)
