"""Triton side of `outrider.kernels.tree_attention`, whose formulas and conventions hold here.

Two launches. A tile is BLOCK_M packed rows of one session, a packed row a query row and a head of its group, so that
all rows of a tile read the same keys. A unit is a tile and a split of its keys; units are numbered session by session.

    attend_kernel    one program a unit and key head: an online softmax over the unit's keys. Keys that every row of the
                     tile sees by its prefix need no mask and no bounds; the tail does. With one split the result goes
                     to `out`, otherwise to a buffer of partial results, normalised, with log2 of its mass beside it.
                     With PATHS, what follows the prefix is gone through once for every row of the tile, in the order of
                     its own path: blocks that a row does not see leave its sums as they are, bit by bit.
    merge_kernel     tiles of several splits: the mean of the partial results, weighted by their masses, in fixed order.

How many splits a session gets is decided on the device (`_plan`), from the lengths of all sessions: every session gets
the share of the units that it has of the work. The grid depends on bounds only, so that a graph can replay it for any
lengths; programs without a unit leave at once. The split points depend on the lengths of the batch, never on where a
session stands in it.
"""

# compile-time parameters of kernels are upper case; a kernel is one function
# ruff: noqa: D103, N803, PLR0912, PLR0915

from __future__ import annotations

from outrider.kernels.backend import jit, tl

__all__ = ["UNSPECIALISED", "attend_kernel", "merge_kernel"]

# Sizes of a batch, of which no kernel should be compiled anew while a server runs.
UNSPECIALISED = (
    "sessions",
    "rows",
    "num_slots",
    "max_key_len",
    "words",
    "units_wanted",
    "split_keys",
    "least_keys",
    "early_keys",
)
_UNSPECIALISED_OF_MERGE = (
    "sessions",
    "rows",
    "max_key_len",
    "units_wanted",
    "split_keys",
    "least_keys",
    "units",
    "chunks",
)

# Keys looked at together for their positions; a multiple of every block of keys.
_SCAN_KEYS = tl.constexpr(512)


@jit
def _plan(query_start_ptr, key_len_ptr, sessions, rows, max_key_len, units_wanted, split_keys, least_keys,
          GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Rows, keys, tiles and splits of every session, and the number of the first unit after it, each [BLOCK_S].

    Session number `sessions` stands for the rows of no session: one tile, whatever their count.
    """
    session = tl.arange(0, BLOCK_S)
    begin = tl.load(query_start_ptr + session, mask=session <= sessions, other=rows)
    end = tl.load(query_start_ptr + session + 1, mask=session < sessions, other=rows)
    keys = tl.load(key_len_ptr + session, mask=session < sessions, other=0)
    # Clamped before anything is computed from them: no content may lead out of the rows.
    begin = tl.minimum(tl.maximum(begin, 0), rows)
    end = tl.maximum(tl.minimum(end, rows), 0)
    tiles = tl.maximum((end - begin) * GROUP + (BLOCK_M - 1), 0) // BLOCK_M
    tiles = tl.where(session == sessions, tl.minimum(tiles, 1), tiles)
    keys = tl.maximum(tl.minimum(keys, max_key_len), 0)
    if split_keys > 0:
        splits = (keys + split_keys - 1) // split_keys
    else:
        work = tl.sum(tiles.to(tl.int64) * keys).to(tl.float32)
        # A little more than the quotient, for a share that is a whole number must not be rounded below it.
        splits = (keys * (units_wanted / tl.maximum(work, 1.0)) + 1e-3).to(tl.int32)
        splits = tl.minimum(splits, (keys + least_keys - 1) // least_keys)
    splits = tl.maximum(splits, 1)
    return begin, end, keys, tiles, splits, tl.cumsum(tiles * splits, 0)


@jit
def _of(mine, values):
    """The one value that `mine` marks."""
    return tl.sum(tl.where(mine, values, 0))


@jit
def _tree_bits(tree_mask_ptr, row, row_ok, offset, words):
    """Bits `offset` to `offset` + 63 of the rows' tree masks, [M] uint64; zero outside the words."""
    place = offset >> 6
    low = tl.load(tree_mask_ptr + row * words + place, mask=row_ok & (place >= 0) & (place < words), other=0)
    high = tl.load(tree_mask_ptr + row * words + place + 1, mask=row_ok & (place >= -1) & (place + 1 < words), other=0)
    shift = (offset & 63).to(tl.uint64)
    # Two shifts, for a shift by all 64 bits is none.
    return (low.to(tl.uint64, bitcast=True) >> shift) | ((high.to(tl.uint64, bitcast=True) << 1) << (63 - shift))


@jit
def _visible(tree_mask_ptr, row, row_ok, prefix_len, begin, tree_start, words, BLOCK_N: tl.constexpr):
    """Return which keys `begin` to `begin` + BLOCK_N the rows see, [M, N] bool."""
    lane = tl.arange(0, BLOCK_N)
    bits = _tree_bits(tree_mask_ptr, row, row_ok, begin - tree_start, words)
    half = tl.where((lane & 32)[None, :] != 0, (bits >> 32).to(tl.uint32)[:, None], bits.to(tl.uint32)[:, None])
    for more in tl.static_range(64, BLOCK_N, 64):
        bits = _tree_bits(tree_mask_ptr, row, row_ok, begin + more - tree_start, words)
        later = tl.where((lane & 32)[None, :] != 0, (bits >> 32).to(tl.uint32)[:, None], bits.to(tl.uint32)[:, None])
        half = tl.where((lane >= more)[None, :], later, half)
    bit = (half >> (lane & 31)[None, :].to(tl.uint32)) & 1
    index = (begin + lane)[None, :]
    return (index < prefix_len[:, None]) | (bit != 0)


@jit
def _first_in_window(table_ptr, table_stride, slot_positions_ptr, first, last, num_slots, reach):
    """The first key from `first` on, in steps of _SCAN_KEYS, whose positions may lie beyond `reach`."""
    outside = True
    while outside & (first < last):
        index = first + tl.arange(0, _SCAN_KEYS)
        slot = tl.load(table_ptr + index * table_stride, mask=index < last, other=-1)
        kept = (slot >= 0) & (slot < num_slots)
        position = tl.load(slot_positions_ptr + slot, mask=kept, other=-(2**31))
        outside = tl.max(position) <= reach
        if outside:
            first += _SCAN_KEYS
    return first


@jit
def _capped(scores, cap_scale, HAS_SOFTCAP: tl.constexpr):
    """tanh of the scores where there is a cap; `cap_scale` is 2 log2(e) scale / softcap."""
    if HAS_SOFTCAP:
        scores = 1 - 2 / (tl.exp2(scores * cap_scale) + 1)
    return scores


@jit
def _soften(scores, score_scale, best, mass, mixed):
    """One step of the online softmax: the new best and mass, the rescaled mixture, and the block's weights."""
    new_best = tl.maximum(best, tl.max(scores, axis=1) * score_scale)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores * score_scale - shift[:, None])
    rescale = tl.exp2(best - shift)
    return new_best, mass * rescale + tl.sum(weights, axis=1), mixed * rescale[:, None], weights


@jit(do_not_specialize=UNSPECIALISED)
def attend_kernel(
    query_ptr,  # [T, H, D]
    key_ptr,  # [num_slots, Hkv, D]
    value_ptr,  # [num_slots, Hkv, D]
    out_ptr,  # [T, H, D]
    partial_ptr,  # [units, Hkv, BLOCK_M, D] float32
    log_mass_ptr,  # [units, Hkv, BLOCK_M] float32: log2 of the sum of exp of the scores
    slot_table_ptr,  # [S, max_len] int32
    query_start_ptr,  # [S + 1] int32
    tree_start_ptr,  # [S] int32
    prefix_len_ptr,  # [T] int32
    key_len_ptr,  # [S] int32
    tree_mask_ptr,  # [T, W] int64
    positions_ptr,  # [T] int32
    slot_positions_ptr,  # [num_slots] int32
    paths_ptr,  # [T, 64 W] int32
    query_row_stride,
    query_head_stride,
    query_stride,
    key_slot_stride,
    key_head_stride,
    key_stride,
    value_slot_stride,
    value_head_stride,
    value_stride,
    table_row_stride,
    table_stride,
    sessions,
    rows,
    num_slots,
    max_key_len,
    words,
    units_wanted,
    split_keys,
    least_keys,
    early_keys,
    score_scale,
    cap_scale,
    value_scale,
    window,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PATHS: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    head_kv = tl.program_id(0) % HEADS_KV
    unit = tl.program_id(0) // HEADS_KV
    begins, row_ends, keys, tiles, splits, ends = _plan(
        query_start_ptr,
        key_len_ptr,
        sessions,
        rows,
        max_key_len,
        units_wanted,
        split_keys,
        least_keys,
        GROUP,
        BLOCK_M,
        BLOCK_S,
    )
    sessions_of = tl.arange(0, BLOCK_S)
    tree_starts = tl.load(tree_start_ptr + sessions_of, mask=sessions_of < sessions, other=0)
    session = tl.sum((ends <= unit).to(tl.int32))
    if session > sessions:
        # Someone must wait, even where nobody has work: the launches after this one count on it.
        if EARLY and tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()
        return
    mine = sessions_of == session
    row_begin, row_end, key_len = _of(mine, begins), _of(mine, row_ends), _of(mine, keys)
    tree_start, tile_count, splits = _of(mine, tree_starts), _of(mine, tiles), _of(mine, splits)
    local = unit - _of(mine, ends) + tile_count * splits
    # The last tiles come first: in a prefill they have the most keys.
    split, tile = local // tile_count, tile_count - 1 - local % tile_count
    dim = tl.arange(0, BLOCK_D)
    dim_ok = dim < HEAD_DIM
    if session == sessions:
        # Rows of no session.
        if EARLY:
            tl.extra.cuda.gdc_wait()
        for first in range(row_begin * GROUP, rows * GROUP, BLOCK_M):
            packed = first + tl.arange(0, BLOCK_M)
            target = ((packed // GROUP).to(tl.int64) * HEADS_KV + head_kv) * GROUP + packed % GROUP
            tl.store(
                out_ptr + target[:, None] * HEAD_DIM + dim[None, :],
                tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty),
                mask=(packed < rows * GROUP)[:, None] & dim_ok[None, :],
            )
        return
    # The split's keys, in whole blocks; the first slots are asked for before anything else.
    step = split_keys
    if split_keys <= 0:
        step = ((key_len + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    # Else at the program's end: over many keys the next launch may only take places away.
    if EARLY and step <= early_keys:
        tl.extra.cuda.gdc_launch_dependents()
    first = split * step
    last = tl.minimum(key_len, first + step)
    lane = tl.arange(0, BLOCK_N)
    table_ptr = slot_table_ptr + session.to(tl.int64) * table_row_stride
    slot = tl.load(table_ptr + tl.minimum(first + lane, last - 1) * table_stride, mask=first + 0 * lane < last, other=0)
    # Tile rows are (query row, head of the group): all that share one key head.
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (row_begin + packed // GROUP).to(tl.int64)
    head = head_kv * GROUP + packed % GROUP
    row_ok = row < row_end
    prefix_len = tl.load(prefix_len_ptr + row, mask=row_ok, other=0)
    # The last key that some row of the tile may see: beyond it lie, in a prefill, the keys of later rows.
    word = tl.arange(0, BLOCK_W)
    bits = tl.load(
        tree_mask_ptr + row[:, None] * words + word[None, :], mask=row_ok[:, None] & (word < words)[None, :], other=0
    )
    seen = tl.max(tl.where(bits != 0, tree_start + 64 * (word + 1)[None, :], prefix_len[:, None]))
    # Never below 0, nor is what comes next: lengths out of range would wrap around in the differences below.
    last = tl.minimum(last, tl.maximum(tl.maximum(seen, tl.max(prefix_len)), 0))
    # Blocks of keys before this are in the prefix of every row.
    shared = tl.minimum(tl.maximum(tl.min(tl.where(row_ok, prefix_len, key_len)), 0), last)
    shared = first + tl.maximum(shared - first, 0) // BLOCK_N * BLOCK_N
    # From here on a tile with trees reads each row's keys by themselves.
    common = last
    if PATHS:
        common = tl.where(tl.max((bits != 0).to(tl.int32)) > 0, shared, last)
    position = prefix_len
    if HAS_WINDOW:
        position = tl.load(positions_ptr + row, mask=row_ok, other=2**31 - 1)
        first = _first_in_window(table_ptr, table_stride, slot_positions_ptr, first, last, num_slots,
                                 tl.min(position) - window)  # fmt: skip
        if PATHS:
            # In the table a path's keys stand behind those of other branches, perhaps so far that none was seen here.
            first = tl.minimum(first, common)
        slot = tl.load(
            table_ptr + tl.minimum(first + lane, last - 1) * table_stride, mask=first + 0 * lane < last, other=0
        )
        shared = first
    # All so far is of the step and the same for every layer; queries, keys and values come from the launch before.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    query = tl.load(
        query_ptr + row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :] * query_stride,
        mask=row_ok[:, None] & dim_ok[None, :],
        other=0.0,
    )
    # In 64 bits, for a cache may have its heads outermost.
    key_ptr += head_kv.to(tl.int64) * key_head_stride
    value_ptr += head_kv.to(tl.int64) * value_head_stride
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # A slot out of range is noticed here and dealt with afterwards: this loop stays free of masks.
    stray = tl.zeros([BLOCK_N], tl.int32)
    for begin in tl.range(first, shared, BLOCK_N, num_stages=STAGES):
        place = tl.minimum(slot.to(tl.uint32, bitcast=True), num_slots - 1).to(tl.int32, bitcast=True)
        stray = tl.where(place != slot, 1, stray)
        # The next block's slots, so that its keys and values can be fetched ahead; past the end, the last key's again.
        slot = tl.load(table_ptr + tl.minimum(begin + BLOCK_N + lane, last - 1) * table_stride)
        if WIDE:
            place = place.to(tl.int64)
        key = tl.load(
            key_ptr + (place[:, None] * key_slot_stride + dim[None, :] * key_stride), mask=dim_ok[None, :], other=0.0
        )
        value = tl.load(
            value_ptr + (place[:, None] * value_slot_stride + dim[None, :] * value_stride),
            mask=dim_ok[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        scores = _capped(scores, cap_scale, HAS_SOFTCAP)
        best, mass, mixed, weights = _soften(scores, score_scale, best, mass, mixed)
        mixed = tl.dot(weights.to(query.dtype), value.to(query.dtype), mixed, input_precision="ieee")
    if tl.max(stray) > 0:
        # All over again, in the loop that looks at every slot.
        shared = first
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in tl.range(shared, common, BLOCK_N, num_stages=TAIL_STAGES):
        slot = tl.load(table_ptr + (begin + lane) * table_stride, mask=begin + lane < last, other=-1)
        slot_ok = (slot >= 0) & (slot < num_slots)
        place = slot.to(tl.int64) if WIDE else slot
        kept = slot_ok[:, None] & dim_ok[None, :]
        key = tl.load(key_ptr + (place[:, None] * key_slot_stride + dim[None, :] * key_stride), mask=kept, other=0.0)
        value = tl.load(
            value_ptr + (place[:, None] * value_slot_stride + dim[None, :] * value_stride), mask=kept, other=0.0
        )
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        scores = _capped(scores, cap_scale, HAS_SOFTCAP)
        sees = _visible(tree_mask_ptr, row, row_ok, prefix_len, begin, tree_start, words, BLOCK_N)
        scores = tl.where(sees, scores, float("-inf"))
        # Added, in float32: masks of one bit do not survive the compiler's changes of layout.
        scores += tl.where(slot_ok, 0.0, float("-inf"))[None, :]
        if HAS_WINDOW:
            key_position = tl.load(slot_positions_ptr + slot, mask=slot_ok, other=0)
            scores = tl.where(position[:, None] - key_position[None, :] < window, scores, float("-inf"))
        best, mass, mixed, weights = _soften(scores, score_scale, best, mass, mixed)
        mixed = tl.dot(weights.to(query.dtype), value.to(query.dtype), mixed, input_precision="ieee")
    if PATHS:
        first_row = row_begin + tile * BLOCK_M // GROUP
        end_row = tl.minimum(row_begin + ((tile + 1) * BLOCK_M + GROUP - 1) // GROUP, row_end)
        if common >= last:
            end_row = first_row
        for number in range(first_row, end_row):
            own_prefix = tl.load(prefix_len_ptr + number)
            path_ptr = paths_ptr + number * (64 * words)
            for begin in tl.range(common, last, BLOCK_N, num_stages=1):
                index = begin + lane
                node = index - own_prefix
                slot = tl.load(table_ptr + index * table_stride, mask=(index < last) & (node < 0), other=-1)
                on_path = (index < last) & (node >= 0) & (node < 64 * words)
                slot = tl.where(node < 0, slot, tl.load(path_ptr + node, mask=on_path, other=-1))
                slot_ok = (slot >= 0) & (slot < num_slots)
                place = slot.to(tl.int64) if WIDE else slot
                kept = slot_ok[:, None] & dim_ok[None, :]
                key = tl.load(
                    key_ptr + (place[:, None] * key_slot_stride + dim[None, :] * key_stride), mask=kept, other=0.0
                )
                value = tl.load(
                    value_ptr + (place[:, None] * value_slot_stride + dim[None, :] * value_stride), mask=kept, other=0.0
                )
                scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
                scores = _capped(scores, cap_scale, HAS_SOFTCAP)
                scores = tl.where((row == number)[:, None], scores, float("-inf"))
                scores += tl.where(slot_ok, 0.0, float("-inf"))[None, :]
                if HAS_WINDOW:
                    key_position = tl.load(slot_positions_ptr + slot, mask=slot_ok, other=0)
                    scores = tl.where(position[:, None] - key_position[None, :] < window, scores, float("-inf"))
                best, mass, mixed, weights = _soften(scores, score_scale, best, mass, mixed)
                mixed = tl.dot(weights.to(query.dtype), value.to(query.dtype), mixed, input_precision="ieee")
    mixed = mixed * (value_scale / tl.where(mass > 0, mass, 1.0))[:, None]
    if HAS_PARTIAL and splits > 1:
        target = (unit.to(tl.int64) * HEADS_KV + head_kv) * BLOCK_M + tl.arange(0, BLOCK_M)
        log_mass = tl.where(mass > 0, tl.log2(tl.where(mass > 0, mass, 1.0)) + best, float("-inf"))
        tl.store(log_mass_ptr + target, log_mass, mask=row_ok)
        kept = row_ok[:, None] & dim_ok[None, :]
        tl.store(partial_ptr + target[:, None] * HEAD_DIM + dim[None, :], mixed, mask=kept)
    else:
        target = row * (HEADS_KV * GROUP) + head
        tl.store(
            out_ptr + target[:, None] * HEAD_DIM + dim[None, :],
            mixed.to(out_ptr.dtype.element_ty),
            mask=row_ok[:, None] & dim_ok[None, :],
        )


@jit
def _part(partial_ptr, log_mass_ptr, source, stride, split, split_count, row_ok, dim, HEAD_DIM: tl.constexpr):
    """Log mass [R] and partial result [R, D] of a split; nothing where there is no such split or row."""
    at = source + split * stride
    here = row_ok & (split < split_count)
    log_mass = tl.load(log_mass_ptr + at, mask=here, other=float("-inf"))
    place = at[:, None] * HEAD_DIM + dim[None, :]
    return log_mass, tl.load(partial_ptr + place, mask=here[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@jit(do_not_specialize=_UNSPECIALISED_OF_MERGE)
def merge_kernel(
    partial_ptr,  # [units, Hkv, BLOCK_M, D] float32
    log_mass_ptr,  # [units, Hkv, BLOCK_M] float32
    out_ptr,  # [T, H, D]
    query_start_ptr,  # [S + 1] int32
    key_len_ptr,  # [S] int32
    sessions,
    rows,
    max_key_len,
    units_wanted,
    split_keys,
    least_keys,
    units,
    chunks,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # One program for BLOCK_R rows of a tile and key head; no tile has more than `chunks` times as many.
    chunk = tl.program_id(0) % chunks
    head_kv = tl.program_id(0) // chunks % HEADS_KV
    tile = tl.program_id(0) // chunks // HEADS_KV
    begins, row_ends, _keys, tiles, splits, ends = _plan(
        query_start_ptr,
        key_len_ptr,
        sessions,
        rows,
        max_key_len,
        units_wanted,
        split_keys,
        least_keys,
        GROUP,
        BLOCK_M,
        BLOCK_S,
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tile_ends = tl.cumsum(tiles, 0)
    session = tl.sum((tile_ends <= tile).to(tl.int32))
    if session >= sessions:
        return
    mine = tl.arange(0, BLOCK_S) == session
    tile_count, split_count = _of(mine, tiles), _of(mine, splits)
    if split_count == 1:
        return
    tile = tile - _of(mine, tile_ends) + tile_count
    first_unit = _of(mine, ends) - tile_count * split_count + tile_count - 1 - tile
    # Sessions that overlap have more units than there are: what was not computed is not read.
    split_count = tl.minimum(split_count, (units - first_unit + tile_count - 1) // tile_count)
    place = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    packed = tile * BLOCK_M + place
    row = _of(mine, begins) + packed // GROUP
    row_ok = row < _of(mine, row_ends)
    stride = tile_count.to(tl.int64) * HEADS_KV * BLOCK_M
    source = (first_unit.to(tl.int64) * HEADS_KV + head_kv) * BLOCK_M + place
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    mixed = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    # Eight splits at a time, all asked for before the first is used; as an online softmax, for no row needs another's.
    for begin in range(0, split_count, 8):
        mass_0, part_0 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 0, split_count, row_ok, dim, HEAD_DIM)
        mass_1, part_1 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 1, split_count, row_ok, dim, HEAD_DIM)
        mass_2, part_2 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 2, split_count, row_ok, dim, HEAD_DIM)
        mass_3, part_3 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 3, split_count, row_ok, dim, HEAD_DIM)
        mass_4, part_4 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 4, split_count, row_ok, dim, HEAD_DIM)
        mass_5, part_5 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 5, split_count, row_ok, dim, HEAD_DIM)
        mass_6, part_6 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 6, split_count, row_ok, dim, HEAD_DIM)
        mass_7, part_7 = _part(partial_ptr, log_mass_ptr, source, stride, begin + 7, split_count, row_ok, dim, HEAD_DIM)
        best_0 = tl.maximum(tl.maximum(mass_0, mass_1), tl.maximum(mass_2, mass_3))
        best_1 = tl.maximum(tl.maximum(mass_4, mass_5), tl.maximum(mass_6, mass_7))
        new_best = tl.maximum(best, tl.maximum(best_0, best_1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        before, mass_0, mass_1 = tl.exp2(best - shift), tl.exp2(mass_0 - shift), tl.exp2(mass_1 - shift)
        mass_2, mass_3, mass_4 = tl.exp2(mass_2 - shift), tl.exp2(mass_3 - shift), tl.exp2(mass_4 - shift)
        mass_5, mass_6, mass_7 = tl.exp2(mass_5 - shift), tl.exp2(mass_6 - shift), tl.exp2(mass_7 - shift)
        total = total * before + (((mass_0 + mass_1) + (mass_2 + mass_3)) + ((mass_4 + mass_5) + (mass_6 + mass_7)))
        mixed = mixed * before[:, None] + part_0 * mass_0[:, None]
        mixed += part_1 * mass_1[:, None] + part_2 * mass_2[:, None] + part_3 * mass_3[:, None]
        mixed += part_4 * mass_4[:, None] + part_5 * mass_5[:, None]
        mixed += part_6 * mass_6[:, None] + part_7 * mass_7[:, None]
        best = new_best
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = row.to(tl.int64) * (HEADS_KV * GROUP) + head_kv * GROUP + packed % GROUP
    tl.store(
        out_ptr + target[:, None] * HEAD_DIM + dim[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & (dim < HEAD_DIM)[None, :],
    )
