"""Linear layers for a CPU: weights packed once for oneDNN, which halves the time of a step.

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
from torch import nn
from torch.nn import functional

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


class PackedLinear(nn.Module):
    """The same function as an `nn.Linear`, for inference on a CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self.refill(linear.weight.detach(), self._bias)

    def refill(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Takes other numbers, [N, K] and [N] or None."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., K] to [..., N]."""
        count = rows.numel() // self.in_features
        if count <= _UNFILLED:
            return self._product(rows)
        flat = rows.reshape(count, self.in_features)
        outputs = torch.cat([self._filled(part) for part in flat.split(_MOST_ROWS)])
        return outputs.reshape(*rows.shape[:-1], self.out_features)

    def _filled(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N], run with as many rows as `ROW_SIZES` has."""
        count = len(rows)
        missing = size_of(count) - count
        return self._product(functional.pad(rows, (0, 0, 0, missing)))[:count] if missing else self._product(rows)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")


def size_of(rows: int) -> int:
    """How many rows a product of so many, 1 to `ROW_SIZES[-1]`, is run with."""
    return ROW_SIZES[bisect_left(ROW_SIZES, rows)]


def can_pack() -> bool:
    """Whether this build of torch has oneDNN and the operators used here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linear_layers(model: nn.Module) -> None:
    """Replaces every float32 linear layer of the model, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))
