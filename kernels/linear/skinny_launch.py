"""The launches of `outrider.kernels.linear.skinny`: which kernel runs, in which tiles, and how K is split.

All of it follows from sizes, dtypes and the device, so that a graph can replay it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from outrider.kernels.backend import INTERPRETED, triton
from outrider.kernels.early_launch import early_options
from outrider.kernels.linear.scaled_weight import ScaledWeight, is_interleaved
from outrider.kernels.linear.skinny_kernels import skinny_linear_kernel

__all__ = ["PlainWeight", "ProductCall", "can_stream", "can_widen", "launch", "row_blocks"]

PlainWeight = torch.Tensor | ScaledWeight

# Numbers of K in a block of a weight: 128 bytes, the widest that the matrix units' layout of shared memory takes.
_BLOCK_K, _SCALED_BLOCK_K = 64, 128
# Programs that share a multiprocessor; its last ones share it with the next product's first.
_RESIDENT = 2
_RING_BYTES = 112 * 1024
_MOST_STAGES = 16
# Rows of a block: the matrix units' smallest, and what leaves registers to spare.
_LEAST_ROWS, _MOST_ROWS = 8, 64
# More parts cost those who add them more than they gain here.
_MOST_SPLITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductCall:
    """The checked arguments of one call; `activation` None: not gated."""

    rows: torch.Tensor
    weight: PlainWeight
    fixed: bool
    activation: str | None = None
    may_split: bool = False

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (1 if self.activation is None else 2)

    @property
    def numbers(self) -> torch.Tensor:
        """The weight's, [N, K]: whole where it has no factors."""
        return self.weight.values if isinstance(self.weight, ScaledWeight) else self.weight

    def make_out(self, splits: int) -> torch.Tensor:
        """[splits, T, N], float32 where there are several."""
        dtype = self.rows.dtype if splits == 1 else torch.float32
        return torch.empty(splits, self.rows.shape[0], self.columns, dtype=dtype, device=self.rows.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tile sizes of a launch for Hopper.

    Attributes:
        rows, more: rows of the batch that a unit takes, in two blocks; the second may have none.
        columns: of the result a unit writes.
        splits: ranges of K.
        stages: blocks of the ring.
        registers: of a thread; few, so that the kernels between two products find room beside both.
    """

    rows: int
    more: int
    columns: int
    splits: int
    stages: int
    registers: int


def launch(call: ProductCall) -> torch.Tensor:
    """[P, T, N]."""
    if call.rows.shape[0] == 0 or call.columns == 0:
        return call.make_out(1)
    if call.rows.shape[1] == 0:
        return call.make_out(1).zero_()
    return _launch_stream(call, choose_tiles(call)) if can_stream(call) else _launch_any(call)


def can_stream(call: ProductCall) -> bool:
    """Return True if the Hopper kernel takes these arguments; the plain kernel takes all."""
    if not _has_stream(call.rows.device) or call.rows.element_size() != 2:
        return False
    if isinstance(call.weight, ScaledWeight) and not is_interleaved(call.weight.shape[1]):
        return False
    # Copies start at multiples of sixteen bytes.
    return all(
        tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
        for tensor in (call.rows, call.numbers)
    )


def can_widen(call: ProductCall) -> bool:
    """Return True if the plain kernel widens an 8-bit weight that cannot stream; torch would write it out first."""
    return isinstance(call.weight, ScaledWeight) and call.rows.element_size() == 2 and _converts(call.rows.device)


def choose_tiles(call: ProductCall) -> Tiles:
    """Return the tiles that measured fastest on an H200.

    Where the call is `fixed`, the number of rows decides only how many of them are multiplied at once, which changes no
    sum.
    """
    places = _RESIDENT * _multiprocessors(call.rows.device)
    rows, more = row_blocks(call.rows.shape[0])
    gated = call.activation is not None
    # Wide tiles read the rows less often, which counts where there are many and K is not split.
    columns = 128 if rows == 64 and call.columns >= 128 * places and not (gated or call.fixed) else 64
    block = _block_k(call)
    tiles, blocks = triton.cdiv(call.columns, columns), triton.cdiv(call.rows.shape[1], block)
    splits = 1
    while call.may_split and 10 * splits * tiles < 9 * places and splits < min(_MOST_SPLITS, blocks // 4):
        splits *= 2
    units = splits * tiles * triton.cdiv(call.rows.shape[0], rows + more)
    # Few programs have the more under way each; the stages change no bits.
    ring_bytes = _RING_BYTES * (1 if 4 * units > places else _RESIDENT)
    stage_bytes = block * (call.numbers.element_size() * columns * (2 if gated else 1) + 2 * (rows + more))
    stages, registers = min(ring_bytes // stage_bytes, _MOST_STAGES), _registers(call, rows, columns)
    return Tiles(rows=rows, more=more, columns=columns, splits=splits, stages=stages, registers=registers)


def _registers(call: ProductCall, rows: int, columns: int) -> int:
    """Return the registers of a thread: the fewest that hold the sums and, with 8 bits, a widened block."""
    if not isinstance(call.weight, ScaledWeight):
        return 64 if rows <= 32 else 96
    # With fewer the compiler has each of a block's products wait for the one before.
    if call.activation is None and columns == 64:
        return 64 if rows <= 32 else 80
    return 80 if rows <= 8 else 96 if rows <= 32 else 104


def row_blocks(rows: int) -> tuple[int, int]:
    """The blocks, powers of two, that `rows` rows fit into with the fewest left over: 72 are 64 and 8."""
    largest = min(max(1 << (rows.bit_length() - 1), _LEAST_ROWS), _MOST_ROWS)
    rest = rows - largest
    if rest <= 0 or (largest == _MOST_ROWS and rest > largest // 2):
        return largest, 0
    more = max(triton.next_power_of_2(rest), _LEAST_ROWS)
    return (largest, more) if more < largest else (2 * largest, 0)


def _block_k(call: ProductCall) -> int:
    return _SCALED_BLOCK_K if isinstance(call.weight, ScaledWeight) else _BLOCK_K


def _launch_stream(call: ProductCall, tiles: Tiles) -> torch.Tensor:
    from outrider.kernels.linear import skinny_hopper as hopper
    from outrider.kernels.linear import skinny_hopper_scaled as scaled

    kernel, weight_layout, scales = hopper.skinny_linear_hopper_kernel, hopper.block_layout(), ()
    if isinstance(call.weight, ScaledWeight):
        kernel, weight_layout = scaled.skinny_linear_hopper_scaled_kernel, scaled.scaled_block_layout()
        scales = (call.weight.scales,)
    out = call.make_out(tiles.splits)
    chunks = triton.cdiv(call.rows.shape[0], tiles.rows + tiles.more)
    units = triton.cdiv(call.columns, tiles.columns) * chunks * tiles.splits
    layout, block = hopper.block_layout(), _block_k(call)
    kernel[(min(units, _RESIDENT * _multiprocessors(call.rows.device)),)](
        hopper.TensorDescriptor.from_tensor(call.rows, [tiles.rows, block], layout),
        hopper.TensorDescriptor.from_tensor(call.rows, [tiles.more or 8, block], layout),
        hopper.TensorDescriptor.from_tensor(call.numbers, [tiles.columns, block], weight_layout),
        *scales,
        out,
        call.rows.shape[0],
        call.columns,
        call.rows.shape[1],
        chunks,
        tiles.splits,
        units,
        GATED=call.activation is not None,
        GELU=call.activation == "gelu_tanh",
        STAGES=tiles.stages,
        MORE=tiles.more,
        num_warps=4,
        maxnreg=tiles.registers,
        launch_pdl=True,
    )
    return out


def _launch_any(call: ProductCall) -> torch.Tensor:
    rows, weight = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (call.rows, call.numbers))
    scales = call.weight.scales if isinstance(call.weight, ScaledWeight) else None
    out = call.make_out(1)
    grid = (triton.cdiv(rows.shape[0], 16), 1, triton.cdiv(call.columns, 64))
    skinny_linear_kernel[grid](
        rows,
        weight,
        scales,
        out,
        rows.shape[0],
        call.columns,
        rows.shape[1],
        rows.stride(0),
        weight.stride(0),
        call.columns * weight.stride(0),
        1,
        GATED=call.activation is not None,
        GELU=call.activation == "gelu_tanh",
        # Triton's interpreter multiplies no 16-bit numbers.
        WIDE=INTERPRETED,
        SCALED=scales is not None,
        INTERLEAVED=scales is not None and is_interleaved(weight.shape[1]),
        BLOCK_T=16,
        BLOCK_N=64,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=4,
        **early_options(rows.device),
    )
    return out


@functools.cache
def _has_stream(device: torch.device) -> bool:
    """Return True if the Hopper kernel can be built and run."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from outrider.kernels.linear.skinny_hopper import HAS_GLUON

    return HAS_GLUON


@functools.cache
def _converts(device: torch.device) -> bool:
    """Return True if Triton converts float8_e4m3 on this device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
