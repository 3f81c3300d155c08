"""The launches of `outrider.kernels.tree_attention`: which kernels run, how the work is cut, how large the buffers are.

Everything here is known to the host without looking at the device: shapes, dtypes and the bounds that a batch names. So
a launch is the same for any content of the batch, and a graph can replay it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from outrider.kernels.attention.batch import TreeAttentionBatch
from outrider.kernels.attention.kernels import attend_kernel, merge_kernel
from outrider.kernels.backend import triton
from outrider.kernels.early_launch import early_options

__all__ = ["AttentionCall", "AttentionNumbers", "launch"]

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNumbers:
    """The numbers of one call: factor and bound of the scores, window, and the factors of stored keys and values."""

    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    key_scale: float = 1.0
    value_scale: float = 1.0

    def of_scores(self) -> tuple[float, float]:
        """Factor of the (capped) scores, and of the scores under the cap's tanh, in base 2."""
        scale = self.scale * self.key_scale
        if self.softcap > 0:
            return self.softcap * _LOG2_E, 2 * _LOG2_E * scale / self.softcap
        # Never zero: a hidden key's -inf times the factor must stay -inf.
        return max(scale, 1e-30) * _LOG2_E, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """The checked arguments of one call."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: TreeAttentionBatch
    numbers: AttentionNumbers

    @property
    def heads_kv(self) -> int:
        """Hkv."""
        return self.key_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // self.key_cache.shape[1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the query and both caches."""
        return (*self.query.stride(), *self.key_cache.stride(), *self.value_cache.stride())

    def lists(self) -> tuple[torch.Tensor, ...]:
        """The batch's tensors in the kernels' order."""
        batch = self.batch
        lists = (batch.query_start, batch.tree_start, batch.prefix_len, batch.key_len, batch.tree_mask)
        return (batch.slot_table, *(tensor.contiguous() for tensor in lists))

    def sizes(self, grid: Grid) -> tuple[int, ...]:
        """Return the size arguments of both passes over the keys."""
        batch = self.batch
        return (
            batch.key_len.shape[0],
            self.query.shape[0],
            self.key_cache.shape[0],
            batch.max_key_len,
            batch.tree_mask.shape[1],
            grid.units_wanted,
            grid.split_keys,
            grid.least_keys,
            grid.early_keys,
        )

    def is_wide(self) -> bool:
        """Return True if offsets into the caches need 64 bits."""
        return any(
            sum(size * abs(stride) for size, stride in zip(cache.shape, cache.stride(), strict=True)) >= 2**31
            for cache in (self.key_cache, self.value_cache)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tile sizes of a launch.

    Attributes:
        rows: packed rows of a tile.
        keys: keys of a block.
        stages: blocks of keys in flight, the one at work included.
        resident: programs that fit on a multiprocessor.
        warps: warps of a program (of one group that multiplies, where the kernel is specialised).
        groups: groups of warps that multiply, where the kernel is specialised; 0 where it is not.
    """

    rows: int
    keys: int
    stages: int
    resident: int
    warps: int = 4
    groups: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Units and splits of a launch.

    Attributes:
        tiles: upper bound of the tiles of all sessions.
        units: upper bound of the units, that of the rows without a session included.
        units_wanted: units to share out among the sessions.
        split_keys: keys of a split, or 0 where the sessions share `units_wanted`.
        splits: upper bound of the splits of a session.
        least_keys: where sessions share, no split is made for fewer.
        early_keys: the next launch may take its places from the beginning where a split has no more.
    """

    tiles: int
    units: int
    units_wanted: int
    split_keys: int
    splits: int
    least_keys: int = 128
    early_keys: int = 1 << 30


# Below this many keys a split costs more in the merge than it gains in parallel work; sessions of several small tiles
# have more to merge.
_LEAST_KEYS, _LEAST_KEYS_TILED = 128, 256


# Keys of a split of a single tile up to which the next launch may take its places from the beginning: 16 rows of four
# heads and 8,000 keys take 21 us instead of 24 where the merge waits. Everywhere else it is the other way round.
_EARLY_KEYS = 192


# Packed rows of all sessions, or on average of each that the batch has room for, up to which tiles of 64 rows are the
# faster ones on Hopper: two of them run at a time where one of 128 rows does. The last is the longest session for that.
_FEW_ROWS, _FEW_ON_AVERAGE, _LONG_KEYS = 320, 64, 65536


def choose_tiles(call: AttentionCall) -> Tiles:
    """Return the tiles that measured fastest on an H200 for this shape."""
    packed_rows = call.batch.max_query_len * call.group
    if call.query.element_size() > 2:
        # Products in float32 keep their rows in registers. Heads of 128 spill 8 KB a thread from 64 rows, for which the
        # driver sets 2 GB aside, and 0.3 KB from 16.
        most_rows = 64 if call.query.shape[2] <= 64 else 16
        rows = min(max(triton.next_power_of_2(packed_rows), 16), most_rows)
        return Tiles(rows=rows, keys=32, stages=2, resident=2)
    if _can_specialise(call):
        # Small tiles leave room for the next product's first weights and waste fewer rows: 65 rows of four heads and
        # 1,000 keys take 15 us instead of 23. Over very long prefixes it counts how often the keys are read.
        all_rows = call.query.shape[0] * call.group
        few_rows = max(_FEW_ROWS, _FEW_ON_AVERAGE * call.batch.key_len.shape[0])
        if packed_rows <= 64 or (all_rows <= few_rows and call.batch.max_key_len <= _LONG_KEYS):
            return Tiles(rows=64, keys=64, stages=3, resident=2, groups=1)
        return Tiles(rows=128, keys=64, stages=6, resident=1, groups=2)
    if call.query.shape[2] > 128:
        return Tiles(rows=64, keys=32, stages=3, resident=1)
    return Tiles(rows=64, keys=64, stages=3, resident=2)


def _can_specialise(call: AttentionCall) -> bool:
    """Return True if the Hopper kernel takes these arguments; the plain kernel takes all."""
    plain = call.numbers.softcap > 0 or call.numbers.sliding_window > 0
    # Of results that do not depend on the batch.
    fixed = call.batch.split_keys is not None or call.batch.paths is not None
    if plain or fixed or not runs_specialised(call.query.device):
        return False
    # Sixteen bytes are copied at a time.
    aligned = all(
        tensor.stride(2) == 1
        and tensor.stride(0) % 16 == 0
        and tensor.stride(1) % 16 == 0
        and tensor.data_ptr() % 16 == 0
        for tensor in (call.query, call.key_cache, call.value_cache)
    )
    return aligned and call.query.shape[2] in (64, 128) and call.key_cache.dtype == call.query.dtype


def plan_grid(call: AttentionCall, tiles: Tiles) -> Grid:
    """Bounds of the tiles, units and splits, which hold for any content of the batch.

    Sessions share `units_wanted` units by their work, rounded down, but get one unit a tile at least: there are never
    more units than tiles and wanted units together.
    """
    batch, heads_kv = call.batch, call.heads_kv
    sessions = batch.key_len.shape[0]
    most = min(
        call.query.shape[0] * call.group // tiles.rows + sessions,
        sessions * triton.cdiv(max(batch.max_query_len, 1) * call.group, tiles.rows),
    )
    if batch.split_keys is not None:
        split_keys = triton.cdiv(batch.split_keys, tiles.keys) * tiles.keys
        splits = max(triton.cdiv(batch.max_key_len, split_keys), 1)
        return Grid(tiles=most, units=most * splits + 1, units_wanted=0, split_keys=split_keys, splits=splits)
    is_tiled = tiles.groups == 1 and batch.max_query_len * call.group > tiles.rows
    least = _LEAST_KEYS_TILED if is_tiled else _LEAST_KEYS
    places = multiprocessors(batch.key_len.device) * tiles.resident
    # A second wave of small tiles never paid: 41 us instead of 37 for 65 rows of four heads and 8,000 keys.
    most_even = places // (most * heads_kv) if is_tiled else 2 * places // (most * heads_kv) + 1
    even = _even_splits(most * heads_kv, places, batch.max_key_len, most_even)
    if even == 1 and 4 * most * heads_kv >= 3 * places and batch.max_key_len <= _SHORT_KEYS:
        return Grid(tiles=most, units=most + 1, units_wanted=0, split_keys=0, splits=1)
    wanted = most * even
    if most * heads_kv < places:
        # Few tiles: what rounding to whole splits leaves over goes to the longest sessions.
        wanted = max(wanted, places // heads_kv)
    units = max(most, wanted) if sessions == 1 else most + wanted
    splits = max(min(wanted, triton.cdiv(batch.max_key_len, least)), 1)
    grid = Grid(tiles=most, units=units + 1, units_wanted=wanted, split_keys=0, splits=splits, least_keys=least)
    return replace(grid, early_keys=_EARLY_KEYS) if most == 1 else grid


# Where tiles fill the device by themselves and no session is longer than this, the merge's launch costs more than
# splits of the longest sessions could gain.
_SHORT_KEYS = 4096

# What a unit costs beside its keys (start, tail, merge), in keys.
_UNIT_OVERHEAD_KEYS = 256


@functools.lru_cache(maxsize=4096)
def _even_splits(programs: int, places: int, keys: int, most: int) -> int:
    """Splits of every tile, up to `most`, that end soonest, if all tiles had `keys` keys and ran in whole waves."""
    most = max(min(most, keys // _LEAST_KEYS), 1)
    return min(range(1, most + 1), key=lambda n: -(-programs * n // places) * (keys / n + _UNIT_OVERHEAD_KEYS))


def launch(call: AttentionCall) -> torch.Tensor:
    """One pass over the keys in splits, then their merge."""
    query = call.query
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0 or call.batch.key_len.shape[0] == 0 or call.key_cache.shape[0] == 0:
        return out.zero_()
    if call.numbers.scale * call.numbers.key_scale < 0 and call.numbers.softcap <= 0:
        # The kernels take the largest score before they scale it.
        call = replace(call, query=-query, numbers=replace(call.numbers, scale=-call.numbers.scale))
    tiles = choose_tiles(call)
    grid = plan_grid(call, tiles)
    partial, log_mass = out, out
    if grid.splits > 1:
        places = grid.units * call.heads_kv * tiles.rows
        partial = torch.empty(places, query.shape[2], dtype=torch.float32, device=query.device)
        log_mass = torch.empty(places, dtype=torch.float32, device=query.device)
    attend = _attend_specialised if tiles.groups else _attend
    attend(call, (out, partial, log_mass), tiles, grid)
    if grid.splits > 1:
        _merge(call, (partial, log_mass, out), tiles, grid)
    return out


def _shape(call: AttentionCall) -> dict[str, int]:
    """Return the compile-time sizes of every kernel."""
    return {
        "HEADS_KV": call.heads_kv,
        "GROUP": call.group,
        "HEAD_DIM": call.query.shape[2],
        "BLOCK_S": triton.next_power_of_2(call.batch.key_len.shape[0] + 1),
    }


def _pass(call: AttentionCall, tiles: Tiles, grid: Grid) -> dict[str, int]:
    """Return the compile-time and launch options of both passes over the keys."""
    return {
        **_shape(call),
        "HAS_PARTIAL": grid.splits > 1,
        "WIDE": call.is_wide(),
        "BLOCK_N": tiles.keys,
        "BLOCK_W": max(triton.next_power_of_2(call.batch.tree_mask.shape[1]), 1),
        "STAGES": tiles.stages,
        **early_options(call.query.device),
    }


def _attend(call: AttentionCall, outputs: tuple[torch.Tensor, ...], tiles: Tiles, grid: Grid) -> None:
    batch, numbers = call.batch, call.numbers
    windowed = numbers.sliding_window > 0 and batch.positions is not None and batch.slot_positions is not None
    attend_kernel[(grid.units * call.heads_kv,)](
        call.query,
        call.key_cache,
        call.value_cache,
        *outputs,
        *call.lists(),
        batch.positions.contiguous() if windowed and batch.positions is not None else batch.prefix_len,
        batch.slot_positions.contiguous() if windowed and batch.slot_positions is not None else batch.prefix_len,
        batch.prefix_len if batch.paths is None else batch.paths.contiguous(),
        *call.strides,
        *batch.slot_table.stride(),
        *call.sizes(grid),
        *numbers.of_scores(),
        numbers.value_scale,
        numbers.sliding_window,
        **_pass(call, tiles, grid),
        HAS_SOFTCAP=numbers.softcap > 0,
        HAS_WINDOW=windowed,
        PATHS=batch.paths is not None,
        # With a window every block is looked at key by key; without one, the last few.
        TAIL_STAGES=tiles.stages if windowed and call.query.element_size() == 2 else 1,
        BLOCK_M=tiles.rows,
        BLOCK_D=_block_d(call),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


# Registers of a thread that gathers, by the groups that multiply beside it.
_GATHER_REGISTERS = {1: 64, 2: 40}
# Registers of a thread of the second group; the first gets the rest, which is as many.
_GROUP_REGISTERS = 232


def _attend_specialised(call: AttentionCall, outputs: tuple[torch.Tensor, ...], tiles: Tiles, grid: Grid) -> None:
    from outrider.kernels.attention.hopper import attend_hopper_kernel

    strides = call.strides
    attend_hopper_kernel[(grid.units * call.heads_kv,)](
        call.query,
        call.key_cache,
        call.value_cache,
        *outputs,
        *call.lists(),
        *(strides[place] for place in (0, 1, 3, 4, 6, 7)),
        *call.batch.slot_table.stride(),
        *call.sizes(grid),
        call.numbers.of_scores()[0],
        call.numbers.value_scale,
        **_pass(call, tiles, grid),
        GROUPS=tiles.groups,
        ROWS=tiles.rows // tiles.groups,
        GATHER_WARPS=4,
        GATHER_REGISTERS=_GATHER_REGISTERS[tiles.groups],
        GROUP_REGISTERS=_GROUP_REGISTERS,
        num_warps=tiles.warps,
        # Two programs of eight warps on a multiprocessor leave 128 registers a thread.
        **({"maxnreg": 128} if tiles.resident == 2 else {}),
    )


def _merge(call: AttentionCall, buffers: tuple[torch.Tensor, ...], tiles: Tiles, grid: Grid) -> None:
    batch = call.batch
    # Few rows a program where there are few tiles; rows that no tile has get no program.
    rows_used = min(tiles.rows, max(batch.max_query_len, 1) * call.group)
    all_rows = grid.tiles * call.heads_kv * rows_used
    rows_each = triton.next_power_of_2(all_rows // (4 * multiprocessors(call.query.device)) + 1)
    rows_each = min(rows_each, 16, triton.next_power_of_2(rows_used))
    chunks = triton.cdiv(rows_used, rows_each)
    merge_kernel[(grid.tiles * call.heads_kv * chunks,)](
        *buffers,
        batch.query_start.contiguous(),
        batch.key_len.contiguous(),
        batch.key_len.shape[0],
        call.query.shape[0],
        batch.max_key_len,
        grid.units_wanted,
        grid.split_keys,
        grid.least_keys,
        grid.units,
        chunks,
        **_shape(call),
        BLOCK_M=tiles.rows,
        BLOCK_D=_block_d(call),
        BLOCK_R=rows_each,
        num_warps=4,
        **early_options(call.query.device),
    )


def _block_d(call: AttentionCall) -> int:
    return max(triton.next_power_of_2(call.query.shape[2]), 16)


@functools.cache
def runs_specialised(device: torch.device) -> bool:
    """Return True if the Hopper kernel can be built and run."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from outrider.kernels.attention.hopper import HAS_GLUON

    return HAS_GLUON


@functools.cache
def multiprocessors(device: torch.device) -> int:
    # Triton's interpreter works on CPU tensors; splits are then left to `split_keys` and to one processor.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
