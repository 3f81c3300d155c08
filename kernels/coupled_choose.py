"""Last launch of coupled sampling: one program a row chooses among what is listed.

    threshold   the largest of those of top-k, top-p and min-p. For the first two it is the largest t that occurs with
                stat({z >= t}) >= target, where stat is a count or a mass, found by bisection over z's bits, ordered as
                integers; every pass moves both bounds onto values that occur, so it ends as soon as they meet
    choices     the k best exact z + G of what reaches the threshold, the smallest id first

A list is good for both if everything that reaches the threshold stands on it, or is known for certain and has been
weighed, or cannot be among the k best. Where that fails, or the list is too long for its place, the same two are done
once more over the whole row: counts and masses are whole numbers, so the outcome is the same bit for bit.

Shapes: T rows, V vocabulary size, C tiles of a row, k tokens of a row, LIST the places of a row's list.
"""

# compile-time parameters of kernels are upper case; operators and kernels take positional columns
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.coupled_rows import (
    load_filters,
    load_key,
    load_row,
    ordered,
    row_mass,
    row_scale,
    scaled,
    unordered,
    weights,
)
from outrider.kernels.noise_blocks import RACE_ABOVE, RACE_SHIFT, gumbel_of_ids

__all__ = ["choose_kernel", "threshold_kernel"]

_ABOVE = tl.constexpr(RACE_ABOVE)
_SHIFT = tl.constexpr(RACE_SHIFT)
_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(2.0**-40)
_HIGHEST = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-0x80000000)


@jit
def choose_kernel(
    logits_ptr,  # [T, V]
    bias_ptr,  # [T, V]
    temperature_ptr,  # [T] float32
    top_k_ptr,  # [T] int
    top_p_ptr,  # [T] float32
    min_p_ptr,  # [T] float32
    seeds_ptr,  # [T] int64
    positions_ptr,  # [T] int
    choice_ptr,  # [T] int
    tops_ptr,  # [T, C] float32
    masses_ptr,  # [T, C] float32
    bounds_ptr,  # [T, 4] float32: low, high, floor and the largest l
    count_ptr,  # [T] int32
    sure_mass_ptr,  # [T] int64
    listed_ptr,  # [T, LIST] float32: logits, later scores
    listed_ids_ptr,  # [T, LIST] int32
    thresholds_ptr,  # [T] float32
    tokens_ptr,  # [T, K] int64
    log_q_ptr,  # [T, K] float32
    scores_ptr,  # [T, K] float32
    logits_row_stride,
    logits_stride,
    bias_row_stride,
    bias_stride,
    vocab_size,
    tiles,
    HAS_BIAS: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    WITH_MASS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIST: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The threshold and the k best of a row, from its list if that will do, otherwise from the whole row."""
    row = tl.program_id(0).to(tl.int64)
    logits_row, bias_row = logits_ptr + row * logits_row_stride, bias_ptr + row * bias_row_stride
    source = (logits_row, bias_row, logits_stride, bias_stride, vocab_size)
    filters, filtered = load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    key = load_key(row, seeds_ptr, positions_ptr, choice_ptr, HAS_CHOICE)
    low, high = tl.load(bounds_ptr + row * 4), tl.load(bounds_ptr + row * 4 + 1)
    floor, largest = tl.load(bounds_ptr + row * 4 + 2), tl.load(bounds_ptr + row * 4 + 3)
    listed = tl.load(count_ptr + row)
    sure = tl.load(sure_mass_ptr + row)
    mass = tl.full([], 0, tl.int64)
    if WITH_MASS or filtered:
        scale = row_scale(filters[0])
        mass = row_mass(tops_ptr + row * tiles, masses_ptr + row * tiles, largest, scale, tiles, TILES)
    threshold, kept = tl.full([], float("-inf"), tl.float32), mass
    tokens = tl.full([BLOCK_K], 0, tl.int32)
    scores = tl.full([BLOCK_K], float("-inf"), tl.float32)
    from_list = listed <= LIST
    choosing = True
    while choosing:
        if from_list == 0:
            low, high = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
            sure = tl.full([], 0, tl.int64)
        count = tl.where(from_list, listed, vocab_size)
        members = (from_list, count, listed_ptr + row * LIST, listed_ids_ptr + row * LIST, high)
        known = listed >= 0
        if filtered:
            threshold, kept, known = _threshold(
                source, filters, members, low, largest, mass, sure, HAS_BIAS, WITH_MASS, BLOCK
            )
        tokens, scores, least = _best(source, filters[0], key, members, threshold, HAS_BIAS, K, BLOCK_K, BLOCK)
        # What is certain to be kept was listed for its estimated score: the k-th best must be out of its reach.
        if filtered & (high < float("inf")):
            score = least * _LOG2_E - _SHIFT
            known = known & (score - tl.abs(score) * 1.9073486328125e-06 > floor + _ABOVE)
        choosing = from_list & (known == 0)
        from_list = from_list & (from_list == 0)
    tl.store(thresholds_ptr + row, threshold)
    rank = tl.arange(0, BLOCK_K)
    absent = scores == float("-inf")
    if WITH_MASS:
        logits = load_row(source, tl.where(absent, 0, tokens), HAS_BIAS)
        most, log_mass = scaled(largest, filters[0]), tl.log(kept.to(tl.float32) * _UNIT)
        log_q = scaled(logits, filters[0]) - most - log_mass
        scores = scores - most - log_mass
        tl.store(log_q_ptr + row * K + rank, tl.where(absent, float("-inf"), log_q), mask=rank < K)
        tl.store(scores_ptr + row * K + rank, tl.where(absent, float("-inf"), scores), mask=rank < K)
    # Where nothing may be chosen a choice is token 0, as for an argmax of a row of -inf.
    tokens = tl.where(absent, -1 if WITH_MASS else 0, tokens)
    tl.store(tokens_ptr + row * K + rank, tokens.to(tl.int64), mask=rank < K)


@jit
def _members(source, members, begin, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """l (-inf past the end) and ids of a block of what is to be chosen from: a list, or the whole row."""
    from_list, count, listed_ptr, listed_ids_ptr = members[0], members[1], members[2], members[3]
    place = begin + tl.arange(0, BLOCK)
    if from_list:
        logits = tl.load(listed_ptr + place, mask=place < count, other=float("-inf"))
        ids = tl.load(listed_ids_ptr + place, mask=place < count, other=_HIGHEST).to(tl.int32)
    else:
        logits = load_row(source, place, HAS_BIAS)
        ids = place
    return logits, ids


@jit
def _threshold(
    source,
    filters,
    members,
    low,
    largest,
    mass,
    sure,
    HAS_BIAS: tl.constexpr,
    WITH_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest z that the filters keep, the weight of what they keep, and whether the members could tell.

    Members from `high` on are left out of counts and masses: their weight is part of `sure`.
    """
    temperature, top_k, top_p, min_p = filters
    from_list = members[0]
    threshold = tl.full([], float("-inf"), tl.float32)
    known = largest >= float("-inf")
    nothing = tl.full([], 0, tl.int64)
    if largest == float("inf"):
        # Infinities stay, and only they.
        threshold = largest
    else:
        lowest = tl.full([], _LOWEST - 1, tl.int64)
        highest = ordered(scaled(largest, temperature)) + 1
        if top_k > 0:
            lowest = _search(
                source, temperature, members, lowest, highest, largest, nothing, top_k.to(tl.int64),
                False, HAS_BIAS, BLOCK,
            )  # fmt: skip
            # Where fewer are allowed than top_k all are kept; a list with an open end shows that, as a whole row does.
            known = (lowest >= _LOWEST) | (low == float("-inf"))
            threshold = _value_or_less(lowest)
            if top_p < 1:
                mass = _mass_from(source, temperature, members, threshold, largest, HAS_BIAS, BLOCK)
        if top_p < 1:
            # The largest token is always kept, also for top_p = 0.
            target = tl.ceil(mass.to(tl.float64) * tl.maximum(top_p, 0.0).to(tl.float64)).to(tl.int64)
            target = tl.maximum(target, 1)
            known = known & (sure < target)
            if known:
                lowest = _search(
                    source, temperature, members, lowest, highest, largest, sure, target, True, HAS_BIAS, BLOCK
                )
                threshold = _value_or_less(lowest)
        if min_p > 0:
            threshold = tl.maximum(threshold, scaled(largest, temperature) + tl.log(min_p))
    # Below `low` the list is silent; a whole row always tells.
    known = (known & ((low == float("-inf")) | (threshold > scaled(low, temperature)))) | (from_list == 0)
    kept = nothing
    if WITH_MASS:
        kept = sure + _mass_from(source, temperature, members, threshold, largest, HAS_BIAS, BLOCK)
    return threshold, kept, known


@jit
def _value_or_less(place):
    """The float32 of an int of `ordered`, -inf for one below all of them."""
    return tl.where(place < _LOWEST, float("-inf"), unordered(place))


@jit
def _mass_from(source, temperature, members, threshold, largest, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The whole weight of the members below `high` whose z reaches `threshold`."""
    count, high = members[1], members[4]
    mass = tl.zeros([BLOCK], tl.int64)
    scale = row_scale(temperature)
    for begin in range(0, count, BLOCK):
        logits = _members(source, members, begin, HAS_BIAS, BLOCK)[0]
        counted = (logits < high) & (scaled(logits, temperature) >= threshold)
        mass += tl.where(counted, weights(logits, largest, scale), 0)
    return tl.sum(mass)


@jit
def _search(
    source,
    temperature,
    members,
    low,  # int64: ordered value whose stat reaches the target, or less than all of them where that is not known
    high,  # int64: ordered value, above all that occur
    largest,
    certain,  # int64: stat of what is not among the members
    target,  # int64: stat to be reached
    BY_MASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest ordered value t that occurs and has stat({z >= t}) >= target; `low` where none has."""
    count, certain_from = members[1], members[4]
    scale = row_scale(temperature)
    # Invariant: stat({z >= low}) >= target > stat({z >= high}), and low occurs, but for a low that is not known.
    while high - low > 1:
        middle = tl.where(low < _LOWEST, _LOWEST, low + (high - low) // 2)
        stat = tl.zeros([BLOCK], tl.int64)
        above = tl.full([BLOCK], _HIGHEST, tl.int64)
        below = tl.full([BLOCK], _LOWEST, tl.int64)
        for begin in range(0, count, BLOCK):
            logits = _members(source, members, begin, HAS_BIAS, BLOCK)[0]
            present = (logits > float("-inf")) & (logits < certain_from)
            place = ordered(scaled(logits, temperature))
            reaches = present & (place >= middle)
            if BY_MASS:
                stat += tl.where(reaches, weights(logits, largest, scale), 0)
            else:
                stat += reaches.to(tl.int64)
            above = tl.minimum(above, tl.where(reaches, place, _HIGHEST))
            below = tl.maximum(below, tl.where(present & (place < middle), place, _LOWEST))
        if certain + tl.sum(stat) >= target:
            low = tl.min(above)
        else:
            high = tl.where(low < _LOWEST, low + 1, tl.max(below) + 1)
    return low


@jit
def _best(
    source,
    temperature,
    key,
    members,
    threshold,
    HAS_BIAS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The K members of highest score among those whose z reaches `threshold`: tokens and scores [BLOCK_K], best first.

    Also the last of the scores; -inf where members run out.
    """
    from_list, count, listed_ptr = members[0], members[1], members[2]
    rank = tl.arange(0, BLOCK_K)
    tokens = tl.full([BLOCK_K], 0, tl.int32)
    scores = tl.full([BLOCK_K], float("-inf"), tl.float32)
    last_score = tl.full([], float("inf"), tl.float32)
    last_token = tl.full([], -1, tl.int32)
    for place in range(0, K):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        token = tl.full([BLOCK], _HIGHEST, tl.int32)
        for begin in range(0, count, BLOCK):
            logits, ids = _members(source, members, begin, HAS_BIAS, BLOCK)
            score = logits
            if (place == 0) | (from_list == 0):
                score = _scores(temperature, key, threshold, logits, ids)
                if (K > 1) & from_list:
                    # From now on the list holds scores.
                    tl.store(listed_ptr + begin + tl.arange(0, BLOCK), score, mask=ids < _HIGHEST)
            left = (score < last_score) | ((score == last_score) & (ids > last_token))
            better = left & ((score > best) | ((score == best) & (ids < token)))
            best = tl.where(better, score, best)
            token = tl.where(better, ids, token)
        if (K > 1) & (place == 0):
            tl.debug_barrier()
        last_score = tl.max(best)
        last_token = tl.min(tl.where(best == last_score, token, _HIGHEST))
        tokens = tl.where(rank == place, last_token, tokens)
        scores = tl.where(rank == place, last_score, scores)
    return tokens, scores, last_score


@jit
def _scores(temperature, key, threshold, logits, ids):
    """The exact z + G of what reaches the threshold, -inf elsewhere; of greedy rows the logits."""
    scores = logits
    if temperature > 0:
        seed, position, stream, choice = key
        scores = scaled(logits, temperature)
        gumbel = gumbel_of_ids(seed, ids, position, stream, choice)
        scores = tl.where((scores >= threshold) & (logits > float("-inf")), scores + gumbel, float("-inf"))
    return scores


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
    low, high = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
    threshold = low
    if filtered:
        logits_row, bias_row = logits_ptr + row * logits_row_stride, bias_ptr + row * bias_row_stride
        source = (logits_row, bias_row, logits_stride, bias_stride, vocab_size)
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, vocab_size, BLOCK):
            tops = tl.maximum(tops, load_row(source, begin + tl.arange(0, BLOCK), HAS_BIAS))
        largest = tl.max(tops)
        members = (filtered == 0, tl.full([], 0, tl.int32) + vocab_size, threshold_ptr, top_k_ptr, high)
        mass = _mass_from(source, filters[0], members, low, largest, HAS_BIAS, BLOCK)
        threshold = _threshold(
            source, filters, members, low, largest, mass, tl.full([], 0, tl.int64), HAS_BIAS, False, BLOCK
        )[0]
    tl.store(threshold_ptr + row, threshold)
