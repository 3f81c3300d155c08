"""Products of few rows with a large weight: what a decode or verify step spends nearly all of its time on.

    linear(rows, weight)       = rows weight^T
    linear_parts(rows, weight) = P partial sums of it over ranges of K, to be added in their order
    gated_linear(rows, weight) = act(rows gate^T) * (rows up^T), weight = gate's rows, then up's

With few rows such a product takes as long as its weight takes to be read. The weight is the tall side of the matrix
units, the rows, in blocks of 8 to 64, the narrow one; K is split where columns alone would not fill the device,
and the partial sums are left to whoever reads them, so that no kernel stands between. Many rows are torch's.

A weight of 8 bits (`outrider.kernels.linear.scaled_weight`) takes half as long to be read. Few rows keep their 16 bits:
the weight is widened on its way into the matrix units, so the result is that of the dequantised weight. Many bfloat16
rows are rounded to 8 bits as well (`outrider.kernels.linear.scaled_rows`), unless `fixed` asks for one way for all.
Where neither can be (an older device, float32, many rows of float16), the weight is written out in the rows' dtype.

On a CPU a weight may be packed (`outrider.kernels.linear.packed_weight`): oneDNN multiplies with it, in any order of
sums.

Launches may overlap: a product asks for its first weights while the kernel before it still runs (see
`outrider.kernels.linear.skinny_hopper`), and waits for it before it reads rows.

Shapes: T rows, K inner size, N columns of the result, F columns of a gated one, P parts.
"""

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, check_tensors
from outrider.kernels.backend import uses_triton
from outrider.kernels.linear.gated_activation import (
    Activation,
    check_activation,
    gated_activation,
    gated_activation_reference,
)
from outrider.kernels.linear.packed_weight import PackedWeight
from outrider.kernels.linear.scaled_rows import can_scale_rows, scaled_product
from outrider.kernels.linear.scaled_weight import ScaledWeight
from outrider.kernels.linear.skinny_launch import PlainWeight, ProductCall, can_stream, can_widen, launch

__all__ = ["Weight", "gated_linear", "gated_linear_reference", "linear", "linear_parts", "linear_reference"]

Weight = PlainWeight | PackedWeight
# Up to this many rows our kernels are the faster ones on an H200; beyond, torch's (cuBLAS).
MOST_ROWS = 72


def linear_parts(rows: torch.Tensor, weight: Weight, *, fixed: bool = False) -> torch.Tensor:
    """Partial sums of `rows weight^T`; the product is their sum, added in their order.

    Args:
        rows: [T, K] bfloat16, float16 or float32.
        weight: [N, K], of the same dtype, of 8 bits, or packed.
        fixed: one configuration of tiles and one order of the sum over K for any T: the bits of a row depend on that
            row and the weight alone. Slower for many rows.

    Returns:
        [P, T, N]: float32 where P > 1, and otherwise of the rows' dtype.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    if isinstance(weight, PackedWeight):
        return weight.product(rows)[None]
    _check_arguments(rows, weight)
    if not uses_triton(rows):
        return linear_reference(rows, weight)[None]
    call = ProductCall(rows=rows, weight=weight, fixed=fixed, may_split=not fixed)
    return launch(call) if _is_ours(call) else _of_many(rows, weight)[None]


def linear(rows: torch.Tensor, weight: Weight, *, fixed: bool = False) -> torch.Tensor:
    """`rows weight^T`, [T, N]; arguments and errors as in `linear_parts`."""
    if isinstance(weight, PackedWeight):
        return weight.product(rows)
    _check_arguments(rows, weight)
    if not uses_triton(rows):
        return linear_reference(rows, weight)
    call = ProductCall(rows=rows, weight=weight, fixed=fixed)
    return launch(call)[0] if _is_ours(call) else _of_many(rows, weight)


def gated_linear(rows: torch.Tensor, weight: Weight, *, activation: Activation, fixed: bool = False) -> torch.Tensor:
    """`act(rows gate^T) * (rows up^T)`, rounded once where the kernels are ours.

    Args:
        rows: [T, K] bfloat16, float16 or float32.
        weight: [2 F, K], of the same dtype, of 8 bits, or packed: the rows of gate, then those of up.
        activation: "silu", or "gelu_tanh" (GELU by its tanh approximation).
        fixed: as in `linear_parts`.

    Returns:
        [T, F], of the rows' dtype.

    Raises:
        ValueError: a shape, dtype or device that does not fit, an odd number of weight rows, another activation.
    """
    if weight.shape[0] % 2:
        raise ValueError(f"weight: {weight.shape[0]} rows given, an even number (gate's, then up's) needed")
    if isinstance(weight, PackedWeight):
        return gated_activation(weight.product(rows), activation=activation)
    _check_arguments(rows, weight)
    check_activation(activation)
    if not uses_triton(rows):
        return gated_linear_reference(rows, weight, activation=activation)
    call = ProductCall(rows=rows, weight=weight, fixed=fixed, activation=activation)
    if _is_ours(call):
        return launch(call)[0]
    return gated_activation(_of_many(rows, weight), activation=activation)


def _is_ours(call: ProductCall) -> bool:
    """Return True if the skinny kernels run the product; torch runs float32 and products of many rows."""
    if call.fixed or not call.rows.is_cuda:
        return True
    return call.rows.shape[0] <= MOST_ROWS and (can_stream(call) or can_widen(call))


def _of_many(rows: torch.Tensor, weight: PlainWeight) -> torch.Tensor:
    """The product by torch."""
    if isinstance(weight, ScaledWeight):
        if rows.shape[0] > MOST_ROWS and can_scale_rows(rows, weight):
            return scaled_product(rows, weight)
        weight = weight.dequantised(rows.dtype)
    return torch.nn.functional.linear(rows, weight)


def _check_arguments(rows: torch.Tensor, weight: PlainWeight) -> None:
    is_scaled = isinstance(weight, ScaledWeight)
    numbers = weight.values if is_scaled else weight
    check_tensors(
        rows=(rows, ("T", "K"), FLOAT_DTYPES),
        weight=(numbers, ("N", "K"), (torch.float8_e4m3fn if is_scaled else rows.dtype,)),
    )


def linear_reference(rows: torch.Tensor, weight: PlainWeight) -> torch.Tensor:
    """`linear` in float32, rounded once; and the one part of `linear_parts`."""
    return (rows.float() @ _wide(weight).T).to(rows.dtype)


def gated_linear_reference(rows: torch.Tensor, weight: PlainWeight, *, activation: Activation) -> torch.Tensor:
    """`gated_linear` in float32, rounded once."""
    gate_up = rows.float() @ _wide(weight).T
    return gated_activation_reference(gate_up, activation=activation).to(rows.dtype)


def _wide(weight: PlainWeight) -> torch.Tensor:
    return weight.dequantised(torch.float32) if isinstance(weight, ScaledWeight) else weight.float()
