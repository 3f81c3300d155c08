"""Weights of 8 bits: float8_e4m3 numbers and one float32 factor a row, weight[n, k] = values[n, k] * scales[n].

    scales[n] = max |weight[n]| / 448        values[n] = weight[n] / scales[n], rounded to nearest even

448 is the largest float8_e4m3 number. Where K is a multiple of 64 the numbers of a row are stored in another order
within every 64: the sixteen that one thread of the matrix units multiplies stand side by side, so that it reads them
at once and widens four with few instructions (`outrider.kernels.linear.skinny_hopper_scaled`). Rows that are multiplied
with them as they are stored take the same order: `stored_order`.

Shapes: N rows, K inner size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import check_tensors
from outrider.kernels.backend import check_shape

__all__ = ["LARGEST", "ScaledWeight", "is_interleaved", "quantised", "row_scales", "scaled_weight", "stored_order"]

LARGEST = 448.0
# Numbers that are reordered among themselves.
_GROUP = 64
# Numbers that are widened at a time: all would take four times the memory of a large weight.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False, slots=True)
class ScaledWeight:
    """A weight of 8 bits, as `quantised` and `scaled_weight` make it.

    Attributes:
        values: [N, K] float8_e4m3fn, in the order described above.
        scales: [N] float32.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of values and scales."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] of `dtype`, in the usual order, rounded once."""
        plain = torch.empty(self.shape, dtype=dtype, device=self.device)
        for part in _parts(plain):
            wide = _usual(self.values[part]).float()
            plain[part].copy_(wide.mul_(self.scales[part, None]))
        return plain


def quantised(weight: torch.Tensor, scales: torch.Tensor | None = None) -> ScaledWeight:
    """A weight rounded to 8 bits.

    Args:
        weight: [N, K] floats.
        scales: [N] float32; by default those of its own rows. Some columns of a weight take those of all its columns.

    Raises:
        ValueError: it is no matrix.
    """
    check_shape("weight", weight, ("N", "K"))
    scales = row_scales(weight) if scales is None else scales
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for part in _parts(weight):
        wide = (weight[part].float() / scales[part, None]).clamp_(-LARGEST, LARGEST)
        values[part] = wide.to(torch.float8_e4m3fn)
    return scaled_weight(values, scales)


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """[N] float32: what makes the largest number of each row of a weight [N, K] 448."""
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for part in _parts(weight):
        scales[part] = weight[part].abs().amax(dim=1).float() / LARGEST
    # A row of zeros has a factor too: nothing is divided by zero.
    return scales.clamp_(min=torch.finfo(torch.float32).tiny)


def scaled_weight(values: torch.Tensor, scales: torch.Tensor) -> ScaledWeight:
    """A weight whose rounded numbers are given.

    Args:
        values: [N, K] float8_e4m3fn in the usual order.
        scales: [N] float32.

    Raises:
        ValueError: a shape or dtype that does not fit, naming the argument.
    """
    check_tensors(values=(values, ("N", "K"), (torch.float8_e4m3fn,)), scales=(scales, ("N",), (torch.float32,)))
    if not is_interleaved(values.shape[1]):
        return ScaledWeight(values.contiguous(), scales.contiguous())
    # Of a place in 64: step of the matrix units (4), half (2), thread (4), which of two (2).
    split = values.view(torch.uint8).unflatten(1, (-1, 4, 2, 4, 2))
    stored = split.permute(0, 1, 4, 2, 5, 3).reshape(values.shape)
    return ScaledWeight(stored.contiguous().view(torch.float8_e4m3fn), scales.contiguous())


def is_interleaved(inner: int) -> bool:
    """Return True if weights of `inner` columns are stored interleaved."""
    return inner > 0 and inner % _GROUP == 0


def stored_order(inner: int) -> torch.Tensor:
    """[inner] int64: which column stands in each place."""
    columns = torch.arange(inner)
    if not is_interleaved(inner):
        return columns
    return columns.view(-1, 4, 2, 4, 2).permute(0, 3, 1, 4, 2).reshape(inner)


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    """Ranges of rows."""
    rows = max(_AT_ONCE // max(weight.shape[1], 1), 1)
    return (slice(begin, begin + rows) for begin in range(0, len(weight), rows))


def _usual(values: torch.Tensor) -> torch.Tensor:
    """Stored numbers in the usual order."""
    if not is_interleaved(values.shape[1]):
        return values
    stored = values.view(torch.uint8).unflatten(1, (-1, 4, 4, 2, 2))
    return stored.permute(0, 1, 3, 5, 2, 4).reshape(values.shape).view(torch.float8_e4m3fn)
