"""Second launch of coupled sampling: one program a row chooses among what the scan leaves of it.

    threshold   the smallest z that top-k, top-p and min-p keep, by `outrider.kernels.sampling.coupled_thresholds`
    choices     the k best exact z + G of what reaches the threshold, the smallest id first

- The one best of an unfiltered row is in one of the few tiles whose estimated score comes near the largest.
- Otherwise what lies within the row's bounds is listed. A list of up to FEW logits is held in registers and its logits
  are ranked against each other; a longer one is searched for the thresholds, and gone through for each of the k.
- A list will do if everything that reaches the threshold stands on it, or is known for certain and has been weighed, or
  cannot be among the k best. Where that fails, or the list is too long for its place, the whole row is gone through
  instead: counts and masses are whole numbers, so the outcome is the same bit for bit.

Shapes: T rows, V vocabulary size, C tiles of a row, k tokens of a row, LIST the places of a row's list.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from outrider.kernels.backend import jit, tl
from outrider.kernels.sampling.coupled_bounds import list_row, row_bounds, score_floor
from outrider.kernels.sampling.coupled_rows import load_filters, load_key, load_row, row_mass, row_scale, scaled
from outrider.kernels.sampling.coupled_thresholds import mass_from, members_at, rank_thresholds, search_thresholds
from outrider.kernels.sampling.noise_blocks import RACE_ABOVE, RACE_SHIFT, gumbel_of_ids

__all__ = ["choose_kernel"]

_ABOVE = tl.constexpr(RACE_ABOVE)
_SHIFT = tl.constexpr(RACE_SHIFT)
_LOG2_E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(2.0**-40)
_HIGHEST = tl.constexpr(0x7FFFFFFF)


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
    tile_scores_ptr,  # [T, C] float32
    tops_ptr,  # [T, C] float32
    masses_ptr,  # [T, C] float32
    listed_ptr,  # [T, LIST] float32: logits, then z, at last scores
    weights_ptr,  # [T, LIST] int64
    ids_ptr,  # [T, LIST] int32
    order_ptr,  # [T, C] int32
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
    FEW: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row: the k best, and their log q and scores where masses are asked for."""
    row = tl.program_id(0).to(tl.int64)
    logits_row, bias_row = logits_ptr + row * logits_row_stride, bias_ptr + row * bias_row_stride
    source = (logits_row, bias_row, logits_stride, bias_stride, vocab_size)
    filters, filtered = load_filters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    key = load_key(row, seeds_ptr, positions_ptr, choice_ptr, HAS_CHOICE)
    if EARLY:
        # What is read up to here was there before the scan.
        tl.extra.cuda.gdc_wait()
    tile = tl.arange(0, TILES)
    stat = row * tiles + tile
    tile_scores = tl.load(tile_scores_ptr + stat, mask=tile < tiles, other=float("-inf"))
    # Asked for at once, so that no row waits for memory twice.
    masses = tl.load(masses_ptr + stat, mask=(tile < tiles) & (WITH_MASS | filtered), other=0.0)
    # Of filtered and greedy rows these scores are logits.
    best_score = tl.max(tile_scores)
    largest = best_score
    kept = tl.full([], 0, tl.int64)
    if WITH_MASS or filtered:
        tops = tile_scores
        if WITH_MASS:
            tops = tl.load(tops_ptr + stat, mask=tile < tiles, other=float("-inf"))
            largest = tl.max(tops)
        kept = row_mass(tops, masses, largest, row_scale(filters[0]))
    if (K == 1) & (filtered == 0):
        tokens, scores = _best_of_tiles(
            source, filters[0], key, tile_scores, best_score, HAS_BIAS, BLOCK_K, TILE, TILES
        )
    else:
        bounds = row_bounds(source, filters, filtered, tile_scores, best_score, kept, HAS_BIAS, K, LIST, SAMPLE)
        place = row * LIST
        listing = (listed_ptr + place, weights_ptr + place, ids_ptr + place, order_ptr + row * tiles)
        listed, sure = list_row(
            source, filters[0], filtered, key, tile_scores, tiles, bounds, largest, listing,
            HAS_BIAS, LIST, BLOCK, PARTS, TILE, TILES,
        )  # fmt: skip
        tokens, scores, kept = _best_of_list(
            source, filters, filtered, key, bounds, largest, listing, listed, kept, sure,
            HAS_BIAS, WITH_MASS, K, BLOCK_K, LIST, FEW, BLOCK,
        )  # fmt: skip
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
def _best_of_tiles(
    source,
    temperature,
    key,
    tile_scores,
    largest,
    HAS_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The best token of an unfiltered row and its score, each [BLOCK_K] = [1], from its tiles' scores [TILES]."""
    tile = tl.arange(0, TILES)
    if temperature > 0:
        floor, usable = score_floor(largest, largest)
        reached = tile_scores >= tl.where(usable, floor, float("-inf"))
    else:
        # A greedy row's scores are exact, so that the first tile that has the largest is enough.
        reached = tile == tl.min(tl.where(tile_scores == largest, tile, TILES))
    best = tl.full([TILE], float("-inf"), tl.float32)
    token = tl.full([TILE], _HIGHEST, tl.int32)
    visited = tl.min(tl.where(reached, tile, TILES))
    while visited < TILES:
        ids = visited * TILE + tl.arange(0, TILE)
        z = scaled(load_row(source, ids, HAS_BIAS), temperature)
        score = _scores(temperature, key, float("-inf"), z, ids)
        # Tiles come in ascending order: of equal scores the first is of the smallest id.
        token = tl.where(score > best, ids, token)
        best = tl.maximum(best, score)
        visited = tl.min(tl.where(reached & (tile > visited), tile, TILES))
    top = tl.max(best)
    winner = tl.min(tl.where(best == top, token, _HIGHEST))
    return tl.zeros([BLOCK_K], tl.int32) + winner, tl.zeros([BLOCK_K], tl.float32) + top


@jit
def _best_of_list(
    source,
    filters,
    filtered,
    key,
    bounds,
    largest,
    listing,
    listed,
    mass,
    sure,
    HAS_BIAS: tl.constexpr,
    WITH_MASS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIST: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The k best of a row, tokens and scores [BLOCK_K], and the weight kept: from its list if that will do."""
    low, high, floor = bounds
    listed_ptr, weights_ptr, ids_ptr, _ = listing
    kept = mass
    threshold = tl.full([], float("-inf"), tl.float32)
    tokens = tl.full([BLOCK_K], 0, tl.int32)
    scores = tl.full([BLOCK_K], float("-inf"), tl.float32)
    from_list = (listed <= LIST) & (low >= float("-inf"))
    choosing = listed >= 0
    if from_list & (listed <= FEW) & ((high == float("inf")) | (filtered == 0)):
        place = tl.arange(0, FEW)
        z = tl.load(listed_ptr + place, mask=place < listed, other=float("-inf"))
        ids = tl.load(ids_ptr + place, mask=place < listed, other=_HIGHEST)
        choosing = listed < 0
        if filtered:
            threshold, kept, known = rank_thresholds(filters, listed, listing, z, low, largest, mass, FEW)
            choosing = known == 0
            from_list = from_list & known
        tokens, scores = _best_of_block(_scores(filters[0], key, threshold, z, ids), ids, K, BLOCK_K)
    while choosing:
        if from_list == 0:
            low, high = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
            sure = tl.full([], 0, tl.int64)
        members = (from_list, tl.where(from_list, listed, source[4]), listed_ptr, weights_ptr, ids_ptr)
        known = listed >= 0
        if filtered:
            threshold, known = search_thresholds(source, filters, members, low, largest, mass, sure, HAS_BIAS, BLOCK)
            if WITH_MASS:
                kept = sure + mass_from(source, filters[0], members, threshold, largest, HAS_BIAS, BLOCK)
        tokens, scores, least = _best_of_many(source, filters[0], key, members, threshold, HAS_BIAS, K, BLOCK_K, BLOCK)
        # What is certain to be kept was listed for its estimated score: the k-th best must be out of its reach.
        if filtered & (high < float("inf")):
            score = least * _LOG2_E - _SHIFT
            known = known & (score - tl.abs(score) * 1.9073486328125e-06 > floor + _ABOVE)
        choosing = from_list & (known == 0)
        from_list = from_list & (from_list == 0)
    return tokens, scores, kept


@jit
def _scores(temperature, key, threshold, z, ids):
    """The exact z + G of what reaches the threshold, -inf elsewhere; of greedy rows z, which is l."""
    scores = z
    if temperature > 0:
        seed, position, stream, choice = key
        gumbel = gumbel_of_ids(seed, ids, position, stream, choice)
        scores = tl.where((z >= threshold) & (z > float("-inf")), z + gumbel, float("-inf"))
    return scores


@jit
def _best_of_block(scores, ids, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The K best of a block, tokens and scores [BLOCK_K], best first; -inf where they run out."""
    rank = tl.arange(0, BLOCK_K)
    tokens = tl.full([BLOCK_K], 0, tl.int32)
    best = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for place in range(0, K):
        top, winner = tl.reduce((scores, ids), 0, _better)
        tokens = tl.where(rank == place, winner, tokens)
        best = tl.where(rank == place, top, best)
        scores = tl.where(ids == winner, float("-inf"), scores)
    return tokens, best


@jit
def _better(score, token, other, other_token):
    """The larger of two scores with its token, of equal ones the smaller token."""
    first = (score > other) | ((score == other) & (token < other_token))
    return tl.where(first, score, other), tl.where(first, token, other_token)


@jit
def _best_of_many(
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
            score, ids = members_at(source, temperature, members, begin, HAS_BIAS, BLOCK)
            if (place == 0) | (from_list == 0):
                score = _scores(temperature, key, threshold, score, ids)
                if (K > 1) & from_list:
                    # From now on the list holds scores; all must have read what it held.
                    tl.debug_barrier()
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
