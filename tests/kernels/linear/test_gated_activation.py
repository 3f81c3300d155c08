from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from outrider.kernels.linear.gated_activation import Activation, gated_activation, gated_activation_reference

_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(("activation", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_it_is_the_activation_of_transformers(activation: Activation, name: str) -> None:
    gate_up = torch.randn(4, 60) * 4
    expected = ACT2FN[name](gate_up[:, :30]) * gate_up[:, 30:]
    torch.testing.assert_close(gated_activation(gate_up, activation=activation), expected, rtol=1e-6, atol=1e-6)


def _check(gate_up: torch.Tensor, device: torch.device, activation: Activation) -> None:
    expected = gated_activation_reference(gate_up, activation=activation)
    gated = gated_activation(gate_up.to(device), activation=activation)
    tolerance = _TOLERANCE[gate_up.dtype]
    torch.testing.assert_close(gated.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", _ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_against_the_reference(triton_device: torch.device, activation: Activation, dtype: torch.dtype) -> None:
    _check((torch.randn(2, 160) * 4).to(dtype), triton_device, activation)


def test_gates_far_from_zero(triton_device: torch.device) -> None:
    gates = torch.tensor([[-3e38, -1e4, -90.0, -20.0, -0.0, 1e-20, 20.0, 1e4, 3e38]])
    gate_up = torch.cat([gates, torch.ones_like(gates)], 1).to(triton_device)
    with_gelu = gated_activation(gate_up, activation="gelu_tanh").cpu()
    torch.testing.assert_close(with_gelu[:, 1:-1], torch.nn.functional.gelu(gates, approximate="tanh")[:, 1:-1])
    torch.testing.assert_close(
        gated_activation(gate_up, activation="silu").cpu(), torch.nn.functional.silu(gates), rtol=1e-5, atol=1e-6
    )


def test_rows_apart_in_memory(triton_device: torch.device) -> None:
    gate_up = torch.randn(3, 50)
    moved = gate_up.to(triton_device)[::2, :40]
    expected = gated_activation_reference(gate_up[::2, :40], activation="silu")
    torch.testing.assert_close(gated_activation(moved, activation="silu").cpu(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 14336), (64, 14336), (3000, 9216), (5, 1111)])
@pytest.mark.parametrize("activation", _ACTIVATIONS)
def test_cuda_sizes(rows: int, columns: int, activation: Activation, cuda: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        _check((torch.randn(rows, 2 * columns) * 3).to(dtype), cuda, activation)


def test_no_rows(triton_device: torch.device) -> None:
    assert gated_activation(torch.zeros(0, 8, device=triton_device), activation="silu").shape == (0, 4)
