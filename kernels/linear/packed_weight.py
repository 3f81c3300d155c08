"""Weights packed once for oneDNN: on a CPU they halve the time of a step.

A step has few rows, so its products are skinny: [T, K] x [K, N] with T from 1 to some dozens. MKL, which torch calls
by default, re-packs the weight in every call. On two cores of an AMD EPYC (AVX-512, one thread, float32, the embedded
target's 36 weights) all products of a step took 1.5 / 2.3 / 2.9 ms with packed weights and 3.0 / 5.4 / 7.1 ms without,
for 1 / 8 / 16 rows.

oneDNN compiles a kernel for every T it has not seen yet, for each shape of weights: 1 to 17 ms at the first product,
and 0.57 MiB that stay, 0.27 of them (the kernel) whatever ONEDNN_PRIMITIVE_CACHE_CAPACITY says. A service meets
hundreds of T. So products are run in a few sizes: rows are filled up to the next one, none up to 32 and by at most an
eighth beyond, and more than the largest are run in parts.

Shapes: T rows, K inputs, N outputs.
"""

from bisect import bisect_left

import torch
from torch.nn import functional

from outrider.kernels.linear.scaled_weight import ScaledWeight

__all__ = ["ROW_SIZES", "PackedWeight", "can_pack", "size_of"]

# All up to 32, then eight from a power of two to the next.
_UNFILLED = 32
ROW_SIZES = (
    *range(1, _UNFILLED + 1),
    *range(36, 65, 4),
    *range(72, 129, 8),
    *range(144, 257, 16),
    *range(288, 513, 32),
)
_MOST_ROWS = ROW_SIZES[-1]


class PackedWeight:
    """A weight on a CPU that can only be multiplied with.

    Args:
        weight: [N, K], plain, or of 8 bits: what these stand for is packed.
        dtype: of the products, one that `can_pack`.

    Attributes:
        shape: [N, K].
    """

    def __init__(self, weight: torch.Tensor | ScaledWeight, dtype: torch.dtype) -> None:
        self.shape, self._dtype = weight.shape, dtype
        self.refill(weight)

    def refill(self, weight: torch.Tensor | ScaledWeight) -> None:
        """Take other numbers of the same shape."""
        assert weight.shape == self.shape
        plain = weight.dequantised(self._dtype) if isinstance(weight, ScaledWeight) else weight.to(self._dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.contiguous(), None)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows weight^T`, [T, K] to [T, N].

        Raises:
            ValueError: the rows have another size.
        """
        if rows.shape[1] != self.shape[1]:
            raise ValueError(f"rows: {rows.shape[1]} columns given, {self.shape[1]} needed")
        if len(rows) <= _UNFILLED:
            return self._product(rows)
        return torch.cat([self._filled(part) for part in rows.split(_MOST_ROWS)])

    def _filled(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N], run with as many rows as `ROW_SIZES` has."""
        count = len(rows)
        missing = size_of(count) - count
        return self._product(functional.pad(rows, (0, 0, 0, missing)))[:count] if missing else self._product(rows)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, None, "none", [], "")


def size_of(rows: int) -> int:
    """Return the row count that a product of `rows`, 1 to `ROW_SIZES[-1]`, is padded to."""
    return ROW_SIZES[bisect_left(ROW_SIZES, rows)]


def can_pack(dtype: torch.dtype) -> bool:
    """True if this build of torch has oneDNN and the operators used here, and this processor multiplies the dtype."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    is_wide = dtype == torch.float32
    return is_wide or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
