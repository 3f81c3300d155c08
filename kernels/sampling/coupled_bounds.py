"""Bounds of a row from what the scan left behind, and the list of logits that lie within them.

Three bounds, two in l and the last an estimated score:

    low     nothing below it is kept
    high    everything from it on is kept
    floor   of what is kept for certain, the k best score at least this

What is to be looked at is {v : low <= l[v] and (l[v] < high or score[v] >= floor)}. A low that is not a number says
that there is no telling, and that the row is to be gone through as a whole.

The largest of every tile is known, so a bound that enough of these reach is reached by enough of the row:

- Unfiltered: low = high = -inf, floor a bound that the largest scores of k tiles reach, less the error of the estimate.
- Greedy: low a bound that the largest l of k tiles reach, high = inf.
- top-k: low a bound that the largest l of top_k tiles reach, high = inf.
- top-p: low a bound that the largest l of tiles reach whose weights alone make up top_p of the mass, high = inf.
- Where no bound is reached by so many or so much, and for min-p alone, a sample of SAMPLE evenly spread logits tells
  how much of the row lies below a bound, give or take six standard deviations; high = inf unless low leaves more than
  half a list. Then the row is flat enough for the sample to tell high as well, and floor: a mass m gives
  Poisson(m exp(-s)) scores above s, so s can be set for some to be there.

A sample may mislead. Exact counts and masses find that out, and time is all that is lost.

A `listing` is pointers to what is on the list, its z, weights, ids, and to the tiles in line. Weights are those of
filtered rows, and 0 from `high` on, as they are in the sum. What many threads need of a list goes through memory: the
compiler would otherwise have each of them divide and exponentiate for itself.

Shapes: V vocabulary size, C tiles of a row, LIST the places of a row's list.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import math

from outrider.kernels.backend import jit, tl
from outrider.kernels.sampling.coupled_rows import load_row, load_row_where, row_scale, scaled, weights
from outrider.kernels.sampling.noise_blocks import RACE_ABOVE, RACE_BELOW, RACE_SHIFT, race_of_counters

__all__ = ["list_row", "row_bounds", "score_floor"]

_SLACK = tl.constexpr(RACE_ABOVE + RACE_BELOW)
_SHIFT = tl.constexpr(RACE_SHIFT)
_UNIT = tl.constexpr(2.0**-40)
# Beyond these the bounds' own rounding could matter; such rows are gone through as a whole.
_LARGEST_LOGIT = tl.constexpr(1e6)
_LARGEST_TEMPERATURE = tl.constexpr(1e30)
_LARGEST_SCORE = tl.constexpr(1e30)
# Elements of the sample that lie side by side: one sector of memory.
_CHUNK = tl.constexpr(8)
# Bounds are sought in the 40 e-folds of probability below the row's largest, by halving.
_DEPTH = tl.constexpr(40 * math.log2(math.e))
# Bounds of a pass over the tiles, which leaves a seventeenth of the range; how narrow the range becomes, in halvings of
# probability, and how often at most.
_CUTS = tl.constexpr(16)
_NARROW = tl.constexpr(0.125)
_PASSES = tl.constexpr(8)
# Tiles so far below the largest are as good as none.
_FAR = tl.constexpr(1e9)
_E_FOLD = tl.constexpr(math.log2(math.e))
_HALVINGS = tl.constexpr(14)


@jit
def row_bounds(
    source,
    filters,
    filtered,
    tile_scores,
    largest,
    mass,
    HAS_BIAS: tl.constexpr,
    K: tl.constexpr,
    LIST: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """low, high and floor of a row from the scan's `tile_scores`, of which `largest` is the largest."""
    temperature, top_k, top_p, _ = filters
    nowhere = tl.full([], float("nan"), tl.float32)
    low = tl.full([], float("-inf"), tl.float32)
    high = tl.full([], float("inf"), tl.float32)
    floor = low
    if filtered:
        # A row that fits the list is listed as it is, and one of -inf has nothing to list.
        if (source[4] > LIST) & (largest != float("-inf")):
            if (tl.abs(largest) < _LARGEST_LOGIT) & (temperature < _LARGEST_TEMPERATURE):
                scale = row_scale(temperature)
                shares = tl.where(top_k > 0, 1.0, tl.exp2((tile_scores - largest) * scale))
                wanted = tl.where(top_k > 0, top_k.to(tl.float32), _mass_wanted(top_p, mass))
                low, found = _bound_of_tiles(tile_scores, shares, wanted, largest, scale)
                low = _below(low)
                if found == 0:
                    low, high, floor = _sampled_bounds(source, filters, largest, mass, HAS_BIAS, K, LIST, SAMPLE)
            else:
                low = nowhere
    else:
        shares = tl.full(tile_scores.shape, 1.0, tl.float32)
        kth, found = _bound_of_tiles(
            tile_scores, shares, tl.full([], K, tl.float32), largest, tl.full([], 1.0, tl.float32)
        )
        kth = tl.where(found, kth, float("-inf"))
        if temperature > 0:
            floor, usable = score_floor(largest, kth)
            low = tl.where(usable, low, nowhere)
            high = tl.full([], float("-inf"), tl.float32)
        else:
            low = _below(kth)
    return low, high, floor


@jit
def _mass_wanted(top_p, mass):
    """The mass that top-p keeps and rounding, relative to the largest weight; inf if top-p is off."""
    return tl.where(top_p < 1, tl.maximum(top_p, 0.0) * (mass.to(tl.float32) * _UNIT) * 1.00001, float("inf"))


@jit
def _bound_of_tiles(values, shares, wanted, largest, scale):
    """A bound that `wanted` of the shares reach with their values, as high as may be, and whether there is one.

    Right but for rounding. A pass holds all values against some bounds between two, and goes on between two of those.
    """
    low = tl.maximum(tl.min(tl.where(values > float("-inf"), values, float("inf"))), largest - _FAR)
    high = largest
    found = tl.sum(tl.where(values >= low, shares, 0.0)) >= wanted
    cut = tl.arange(0, _CUTS)
    passes = tl.full([], 0, tl.int32)
    while found & ((passes < 2) | ((high - low) * scale > _NARROW)) & (passes < _PASSES):
        step = (high - low) / (_CUTS + 1)
        cuts = low + (cut + 1).to(tl.float32) * step
        reaching = tl.sum(tl.where(values[:, None] >= cuts[None, :], shares[:, None], 0.0), axis=0)
        reached = tl.sum((reaching >= wanted).to(tl.int32))
        low, high = (
            low + reached.to(tl.float32) * step,
            tl.where(reached < _CUTS, low + (reached + 1).to(tl.float32) * step, high),
        )
        passes += 1
    return low, found


@jit
def score_floor(largest, kth):
    """The least estimated score of the k best of an unfiltered row, and whether the estimates are fit for it.

    Given the largest score of the row's tiles and a bound that k of them reach.
    """
    size = tl.maximum(tl.abs(largest), tl.where(kth > float("-inf"), tl.abs(kth), 0.0))
    # The estimate's error, and what rounding does to z log2(e), which is within 40 of the score.
    return kth - _SLACK - (size + 40) * 1.9073486328125e-06, size < _LARGEST_SCORE


@jit
def _below(logit):
    """A bound so far below `logit` that no l under it has the same z."""
    return logit - tl.abs(logit) * 2.384185791015625e-07 - 1e-14


@jit
def _sampled_bounds(
    source,
    filters,
    largest,
    mass,
    HAS_BIAS: tl.constexpr,
    K: tl.constexpr,
    LIST: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """low, high and floor of a filtered row, as its sample shows them."""
    temperature, top_k, top_p, min_p = filters
    vocab_size = source[4]
    place = tl.arange(0, SAMPLE)
    chunk = (place // _CHUNK).to(tl.int64) * (vocab_size // _CHUNK) // (SAMPLE // _CHUNK)
    logits = load_row(source, chunk * _CHUNK + place % _CHUNK, HAS_BIAS)
    scale = row_scale(temperature)
    # Every element of the sample stands for `share` of the row; masses are relative to the largest logit's.
    share = vocab_size * (1.0 / SAMPLE)
    masses = tl.exp2((logits - largest) * scale) * share
    high = tl.full([], float("-inf"), tl.float32)
    low = high
    if top_k > 0:
        low = _low_of_count(logits, largest, scale, top_k.to(tl.float32) / share)
        high = tl.full([], float("inf"), tl.float32)
    elif top_p < 1:
        dropped = (1 - tl.maximum(top_p, 0.0)) * (mass.to(tl.float32) * _UNIT)
        low, high = _around_mass(logits, masses, largest, scale, share, dropped)
    if (top_k == 0) & (min_p > 0):
        edge = largest + tl.log2(min_p) / scale
        margin = (tl.abs(largest) + tl.abs(edge)) * 9.5367431640625e-07
        # Where min-p cuts above top-p's range it alone decides.
        low = tl.where(edge - margin >= high, edge - margin, low)
        high = tl.maximum(high, edge + margin)
    above_low = tl.sum((logits >= low).to(tl.float32)) * share
    high = tl.where(above_low <= LIST // 2, float("inf"), high)
    # That fewer than K of 4 K + 64 expected scores are there does not happen.
    sure = tl.sum(tl.where(logits >= high, masses, 0.0))
    floor = largest * scale + tl.log2(tl.maximum(sure, 1e-30) / (4 * K + 64)) - _SHIFT
    return _below(low), high, floor


@jit
def _low_of_count(logits, largest, scale, wanted):
    """A bound that `wanted` elements of a sample of the same law reach, or more, for all that chance may do."""
    low, high = largest - _DEPTH / scale, largest
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        count = tl.sum((logits >= middle).to(tl.float32))
        enough = count - 6 * tl.sqrt(count) - 12 >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@jit
def _around_mass(logits, masses, largest, scale, share, wanted):
    """A bound with less than the mass `wanted` below it and one with more, for all that chance may do.

    The second is inf where none is seen. The mass below t is measured with a variance of at most itself times `share`
    times the weight at t.
    """
    low, high = largest - _DEPTH / scale, largest
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        below, deviation = _mass_below(logits, masses, largest, scale, share, middle)
        little = below + deviation <= wanted
        low, high = tl.where(little, middle, low), tl.where(little, high, middle)
    # A range wider than an e-fold would be too long for a list anyway.
    lower, upper = low, low + _E_FOLD / scale
    below, deviation = _mass_below(logits, masses, largest, scale, share, upper)
    seen = below - deviation > wanted
    for _ in range(_HALVINGS // 2):
        middle = (lower + upper) * 0.5
        below, deviation = _mass_below(logits, masses, largest, scale, share, middle)
        much = below - deviation > wanted
        lower, upper = tl.where(much, lower, middle), tl.where(much, middle, upper)
    return low, tl.where(seen, upper, float("inf"))


@jit
def _mass_below(logits, masses, largest, scale, share, bound):
    """The mass of the sample below `bound`, and six standard deviations of it with a few single weights."""
    below = tl.sum(tl.where(logits < bound, masses, 0.0))
    single = tl.exp2((bound - largest) * scale) * share
    return below, 6 * tl.sqrt(below * single) + 12 * single


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
    """Count the logits within the bounds, list the first LIST of them, and sum the weight of what is sure.

    `tile_scores` [TILES] are the scan's, of `tiles` tiles. Those that reach the bounds are put in line first, then
    taken several at a time, and tokens go on the list in ascending order. Above `high`, where everything is kept and
    only the best are listed, the weight of all is added up.
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
