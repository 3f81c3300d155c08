from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.kernels.linear.residual_norm import residual_norm, residual_norm_reference

_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _given(rows: int, columns: int, parts: int, dtype: torch.dtype, *, norms: bool) -> dict[str, Any]:
    return {
        "hidden": torch.randn(rows, columns).to(dtype),
        "addend": torch.randn(parts, rows, columns).to(torch.float32 if parts > 1 else dtype) if parts else None,
        "weight": torch.rand(columns).to(dtype) + 0.5,
        "addend_weight": torch.rand(columns) + 0.5 if norms else None,
    }


def _on(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor if tensor is None else tensor.to(device, copy=True) for name, tensor in given.items()}


def _check(device: torch.device, given: dict[str, Any], dtype: torch.dtype) -> None:
    moved = _on(device, given)
    expected = residual_norm_reference(**given, eps=1e-5)
    normed = residual_norm(**moved, eps=1e-5)
    assert normed.dtype == dtype
    for have, want in ((normed, expected), (moved["hidden"], given["hidden"])):
        torch.testing.assert_close(have.cpu(), want, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


def test_it_is_the_norm_of_llama() -> None:
    norm = LlamaRMSNorm(96, eps=1e-5)
    norm.weight.data.uniform_(0.5, 1.5)
    hidden, addend = torch.randn(5, 96), torch.randn(3, 5, 96)
    total = hidden + addend.sum(0)
    normed = residual_norm(hidden, addend, norm.weight.data, eps=1e-5)
    torch.testing.assert_close(hidden, total, rtol=0, atol=1e-6)
    torch.testing.assert_close(normed, norm(total).detach(), rtol=0, atol=1e-6)


def test_it_norms_what_a_block_of_gemma_returns() -> None:
    norms = [Gemma3RMSNorm(96, eps=1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight.data.uniform_(-0.5, 0.5)
    before, after = (1 + norm.weight.data for norm in norms)
    hidden, addend = torch.randn(5, 96), torch.randn(1, 5, 96)
    total = hidden + norms[0](addend[0]).detach()
    normed = residual_norm(hidden, addend, after, eps=1e-6, addend_weight=before)
    torch.testing.assert_close(hidden, total, rtol=0, atol=1e-6)
    torch.testing.assert_close(normed, norms[1](total).detach(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("columns", "parts", "norms"), [(200, 0, False), (96, 3, False), (64, 1, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_against_the_reference(
    triton_device: torch.device, columns: int, parts: int, norms: bool, dtype: torch.dtype
) -> None:
    _check(triton_device, _given(2, columns, parts, dtype, norms=norms), dtype)


def test_rows_apart_in_memory(triton_device: torch.device) -> None:
    given = _given(2, 32, 2, torch.float32, norms=False)
    moved = _on(triton_device, given)
    hidden = torch.full((2, 48), 7.0, device=triton_device)
    hidden[:, :32] = moved["hidden"]
    addend = torch.full((2, 3, 40), 7.0, device=triton_device)
    addend[:, :2, :32] = moved["addend"]
    normed = residual_norm(hidden[:, :32], addend[:, :2, :32], moved["weight"], eps=1e-5)
    expected = residual_norm_reference(**given, eps=1e-5)
    torch.testing.assert_close(normed.cpu(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(hidden[:, :32].cpu(), given["hidden"])
    assert (hidden[:, 32:] == 7).all()


@pytest.mark.parametrize("columns", [768, 1152, 2304, 3584, 4096, 8192])
@pytest.mark.parametrize(("rows", "parts"), [(1, 16), (7, 4), (3000, 1), (1, 0)])
def test_cuda_sizes(columns: int, rows: int, parts: int, cuda: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        _check(cuda, _given(rows, columns, parts, dtype, norms=columns == 2304 and parts > 0), dtype)


def test_a_rows_bits_depend_on_the_row_alone(cuda: torch.device) -> None:
    given = _on(cuda, _given(500, 3584, 2, torch.bfloat16, norms=True))
    alone = dict(given, hidden=given["hidden"][321:322].clone(), addend=given["addend"][:, 321:322])
    assert torch.equal(residual_norm(**given, eps=1e-6)[321:322], residual_norm(**alone, eps=1e-6))
    assert torch.equal(given["hidden"][321:322], alone["hidden"])
