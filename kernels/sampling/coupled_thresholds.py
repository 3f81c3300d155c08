"""Thresholds of top-k, top-p and min-p inside kernels: the smallest z that is kept.

The threshold of top-k or top-p is the largest z that occurs with stat({z' >= z}) >= target, where stat counts or weighs
and target is top_k, or top_p times the mass of what top-k has kept. Ties with it stay. min-p's is the largest z plus
log(min_p). If the largest logit is infinite, infinities stay, and only they.

What is looked through, the `members`, is (from_list, count, listed_ptr, weights_ptr, ids_ptr): a list of z, weights and
ids, or the whole row. A list has everything from `low` on, so it can tell a threshold above `low` and no other.

Shapes: T rows, V vocabulary size.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.sampling.coupled_rows import (
    load_filters,
    load_row,
    ordered,
    row_scale,
    scaled,
    unordered,
    weights,
)

__all__ = ["mass_from", "members_at", "rank_thresholds", "search_thresholds", "threshold_kernel"]

_HIGHEST = tl.constexpr(0x7FFFFFFF)
# Below the ordered integer of -inf, and so of everything that compares.
_BELOW_ALL = tl.constexpr(-0x7F800002)
# Others that a block is ranked against at a time; cuts of a pass of the search.
_OTHERS = tl.constexpr(32)
_CUTS = tl.constexpr(16)
# Members of a pass of the search that are held against the cuts at a time.
_SEARCHED = tl.constexpr(512)


@jit
def rank_thresholds(filters, count, listing, z, low, largest, mass, FEW: tl.constexpr):
    """The threshold of a list whose z are the block `z` [FEW], the weight kept, and whether the list could tell."""
    temperature, top_k, top_p, min_p = filters
    listed_ptr, weights_ptr = listing[0], listing[1]
    place = tl.arange(0, FEW)
    weight = tl.load(weights_ptr + place, mask=place < count, other=0)
    counts = tl.zeros([FEW], tl.int32)
    masses = tl.zeros([FEW], tl.int64)
    for begin in range(0, count, _OTHERS):
        turn = begin + tl.arange(0, _OTHERS)
        others = tl.load(listed_ptr + turn, mask=turn < count, other=float("-inf"))
        weights_of_others = tl.load(weights_ptr + turn, mask=turn < count, other=0)
        # Others along the first axis: every thread adds up what it compares.
        reaches = others[:, None] >= z[None, :]
        counts += tl.sum(reaches.to(tl.int32), axis=0)
        masses += tl.sum(tl.where(reaches, weights_of_others[:, None], 0), axis=0)
    present = z > float("-inf")
    threshold = tl.full([], float("-inf"), tl.float32)
    known = largest >= float("-inf")
    if top_k > 0:
        threshold = tl.max(tl.where(present & (counts >= top_k), z, float("-inf")))
        known = threshold > float("-inf")
        mass = tl.sum(tl.where(z >= threshold, weight, 0))
    if top_p < 1:
        threshold = tl.max(tl.where(present & (masses >= _target(mass, top_p)), z, float("-inf")))
    if min_p > 0:
        threshold = tl.maximum(threshold, scaled(largest, temperature) + tl.log(min_p))
    if largest == float("inf"):
        threshold = largest
    # A list with an open end is the whole row, all of which is kept if no threshold is reached.
    known = (known & (threshold > scaled(low, temperature))) | (low == float("-inf"))
    return threshold, tl.sum(tl.where(z >= threshold, weight, 0)), known


@jit
def search_thresholds(source, filters, members, low, largest, mass, sure, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The threshold of a row, and whether its members could tell; `sure` is the weight of what is not counted."""
    temperature, top_k, top_p, min_p = filters
    threshold = tl.full([], float("-inf"), tl.float32)
    known = largest >= float("-inf")
    if largest == float("inf"):
        threshold = largest
    else:
        # Everything counted lies between these.
        lowest = tl.where(low > float("-inf"), ordered(scaled(low, temperature)) - 1, _BELOW_ALL)
        highest = ordered(scaled(largest, temperature)) + 1
        if top_k > 0:
            found = _search(
                source, temperature, members, lowest, highest, largest, tl.full([], 0, tl.int64), top_k.to(tl.int64),
                False, HAS_BIAS, min(BLOCK, _SEARCHED),
            )  # fmt: skip
            threshold = tl.where(found > lowest, unordered(found), float("-inf"))
            # Where fewer are allowed than top_k all are kept; a list with an open end shows that, as a whole row does.
            known = (found > lowest) | (low == float("-inf"))
            lowest = found
            if top_p < 1:
                mass = mass_from(source, temperature, members, threshold, largest, HAS_BIAS, BLOCK)
        if top_p < 1:
            target = _target(mass, top_p)
            known = known & (sure < target)
            if known:
                found = _search(
                    source, temperature, members, lowest, highest, largest, sure, target,
                    True, HAS_BIAS, min(BLOCK, _SEARCHED),
                )  # fmt: skip
                threshold = tl.where(found > lowest, unordered(found), threshold)
        if min_p > 0:
            threshold = tl.maximum(threshold, scaled(largest, temperature) + tl.log(min_p))
    return threshold, known & ((threshold > scaled(low, temperature)) | (low == float("-inf")))


@jit
def _target(mass, top_p):
    """The weight that top-p wants, int64; the largest token is always kept, also for top_p = 0."""
    wanted = tl.ceil(mass.to(tl.float64) * tl.maximum(top_p, 0.0).to(tl.float64)).to(tl.int64)
    return tl.maximum(wanted, 1)


@jit
def members_at(source, temperature, members, begin, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """z (-inf past the end) and ids of a block of members."""
    from_list, count, listed_ptr, _, ids_ptr = members
    place = begin + tl.arange(0, BLOCK)
    if from_list:
        z = tl.load(listed_ptr + place, mask=place < count, other=float("-inf"))
        ids = tl.load(ids_ptr + place, mask=place < count, other=_HIGHEST)
    else:
        z = scaled(load_row(source, place, HAS_BIAS), temperature)
        ids = place
    return z, ids


@jit
def _weighed_at(source, temperature, members, begin, largest, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """z (-inf past the end) and weights of a block of members."""
    from_list, count, listed_ptr, weights_ptr, _ = members
    place = begin + tl.arange(0, BLOCK)
    if from_list:
        z = tl.load(listed_ptr + place, mask=place < count, other=float("-inf"))
        weight = tl.load(weights_ptr + place, mask=place < count, other=0)
    else:
        logits = load_row(source, place, HAS_BIAS)
        z = scaled(logits, temperature)
        weight = weights(logits, largest, row_scale(temperature))
    return z, weight


@jit
def mass_from(source, temperature, members, threshold, largest, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The whole weight of the members whose z reaches `threshold`."""
    mass = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, members[1], BLOCK):
        z, weight = _weighed_at(source, temperature, members, begin, largest, HAS_BIAS, BLOCK)
        mass += tl.where(z >= threshold, weight, 0)
    return tl.sum(mass)


@jit
def _search(
    source,
    temperature,
    members,
    low,  # int64: ordered value whose stat reaches the target, or less than all that are counted
    high,  # int64: ordered value, above all that occur
    largest,
    certain,  # int64: stat of what is not counted, less than the target
    target,  # int64: stat to be reached
    BY_MASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest ordered value t above `low` with stat({z >= t}) >= target, which occurs; `low` if there is none."""
    cut = tl.arange(0, _CUTS)
    # Invariant: stat({z >= high}) < target, and stat({z >= low}) >= target unless low is the one given.
    while high - low > 1:
        step = (high - low + _CUTS) // (_CUTS + 1)
        cuts = tl.minimum(low + (cut + 1) * step, high)
        least = unordered(cuts)
        stats = tl.zeros([BLOCK, _CUTS], tl.int64)
        for begin in range(0, members[1], BLOCK):
            z, stat = _weighed_at(source, temperature, members, begin, largest, HAS_BIAS, BLOCK)
            if not BY_MASS:
                stat = (z > float("-inf")).to(tl.int64)
            stats += tl.where(z[:, None] >= least[None, :], stat[:, None], 0)
        reached = tl.sum((certain + tl.sum(stats, axis=0) >= target).to(tl.int64))
        high = tl.minimum(low + (reached + 1) * step, high)
        low = low + reached * step
    return low


@jit
def threshold_kernel(
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
    """The smallest z that a row's filters keep, from the row alone, one program a row; -inf without filters."""
    row = tl.program_id(0).to(tl.int64)
    filters, filtered = load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    low = tl.full([], float("-inf"), tl.float32)
    threshold = low
    if filtered:
        logits_row, bias_row = logits_ptr + row * logits_row_stride, bias_ptr + row * bias_row_stride
        source = (logits_row, bias_row, logits_stride, bias_stride, vocab_size)
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, vocab_size, BLOCK):
            tops = tl.maximum(tops, load_row(source, begin + tl.arange(0, BLOCK), HAS_BIAS))
        largest = tl.max(tops)
        # There is no list; pointers to none have the types of those to one.
        no_weights, no_ids = threshold_ptr.to(tl.pointer_type(tl.int64)), threshold_ptr.to(tl.pointer_type(tl.int32))
        members = (filtered == 0, tl.full([], 0, tl.int32) + vocab_size, threshold_ptr, no_weights, no_ids)
        mass = mass_from(source, filters[0], members, low, largest, HAS_BIAS, BLOCK)
        nothing = tl.full([], 0, tl.int64)
        threshold = search_thresholds(source, filters, members, low, largest, mass, nothing, HAS_BIAS, BLOCK)[0]
    tl.store(threshold_ptr + row, threshold)
