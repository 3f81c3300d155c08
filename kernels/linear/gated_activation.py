"""The gate of a feed-forward block: out[t, f] = act(gate_up[t, f]) * gate_up[t, F + f].

silu(x) = x sigmoid(x), and gelu_tanh(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is GELU's approximation
by tanh without its cancellation. Computed in float32 and rounded once.

Shapes: T rows, F feed-forward sizes.
Source: gated linear units, arXiv 2002.05202; GELU, arXiv 1606.08415.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from typing import Literal, get_args

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, check_dense, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.early_launch import early_options

__all__ = ["Activation", "check_activation", "gated_activation", "gated_activation_reference"]

Activation = Literal["silu", "gelu_tanh"]

# Columns of a program.
_BLOCK = 1024


def gated_activation(gate_up: torch.Tensor, *, activation: Activation) -> torch.Tensor:
    """The activated gates times what they let through.

    Args:
        gate_up: [T, 2F] bfloat16, float16 or float32: the gates, then what they let through.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, F] in the dtype of `gate_up`.

    Raises:
        ValueError: a shape, dtype or stride that does not fit, or an unknown activation.
    """
    check_activation(activation)
    check_tensors(gate_up=(gate_up, ("T", "2F"), FLOAT_DTYPES))
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: {gate_up.shape[1]} columns given, an even number needed")
    check_dense(gate_up=gate_up)
    if not uses_triton(gate_up):
        return gated_activation_reference(gate_up, activation=activation)
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    gated = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    if gated.numel():
        _launch(gated, gate_up, activation)
    return gated


def check_activation(activation: str) -> None:
    """Raise ValueError unless the activation is one of `Activation`."""
    if activation not in get_args(Activation):
        raise ValueError(f"activation: {activation!r} given, one of {', '.join(get_args(Activation))} needed")


def gated_activation_reference(gate_up: torch.Tensor, *, activation: Activation) -> torch.Tensor:
    """`gated_activation` in plain torch, on any device."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        activated = torch.nn.functional.silu(gate)
    else:
        activated = torch.nn.functional.gelu(gate, approximate="tanh")
    return (activated * up).to(gate_up.dtype)


def _launch(gated: torch.Tensor, gate_up: torch.Tensor, activation: Activation) -> None:
    rows, columns = gated.shape
    blocks = triton.cdiv(columns, _BLOCK)
    _gated_activation_kernel[(rows * blocks,)](
        gated,
        gate_up,
        gate_up.stride(0),
        columns,
        blocks,
        GELU=activation == "gelu_tanh",
        BLOCK=_BLOCK,
        num_warps=4,
        **early_options(gated.device),
    )


@jit
def _gated_activation_kernel(
    gated_ptr,  # [T, F]
    gate_up_ptr,  # [T, 2F]
    row_stride,
    columns,
    blocks,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    kept = column < columns
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate_up_ptr += row * row_stride
    gate = tl.load(gate_up_ptr + column, mask=kept, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + columns + column, mask=kept, other=0).to(tl.float32)
    gated = activated(gate, GELU) * up
    tl.store(gated_ptr + row * columns + column, gated.to(gated_ptr.dtype.element_ty), mask=kept)


@jit
def activated(gate, GELU: tl.constexpr):
    """The activation of a block of float32 gates."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)
