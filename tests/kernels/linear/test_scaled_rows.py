"""Rows rounded to 8 bits, and the products of many rows."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.linear.scaled_rows import can_scale_rows, scale_rows, scale_rows_reference, scaled_product
from outrider.kernels.linear.scaled_weight import quantised, stored_order


@pytest.mark.parametrize("inner", [64, 72, 192])
def test_every_row_has_a_factor_and_the_order_of_weights(triton_device: torch.device, inner: int) -> None:
    # Numbers that float8_e4m3 has, times a power of two: they come back as they are.
    numbers = torch.randint(-15, 16, (5, inner), device=triton_device).float()
    numbers[:, 0] = 14 * torch.tensor([1, -1, 1, -1, 1], device=triton_device)
    numbers[:, 1:].clamp_(-14, 14)
    numbers[2] = 0
    values, scales = scale_rows((numbers * 4).bfloat16())
    assert torch.equal(values.float() * scales[:, None], 4 * numbers[:, stored_order(inner)])
    assert scales[0] == 56 / 448


def test_the_reference_rounds_to_the_nearest() -> None:
    rows = torch.randn(4, 100)
    values, scales = scale_rows_reference(rows)
    off = (values.float() * scales[:, None] - rows[:, stored_order(100)]).abs()
    assert (off <= rows[:, stored_order(100)].abs() / 16 + scales[:, None] * 2**-10).all()


def test_a_cpu_has_no_units_of_8_bits() -> None:
    assert not can_scale_rows(torch.zeros(2, 64).bfloat16(), quantised(torch.ones(16, 64)))


@pytest.mark.parametrize("inner", [64, 100, 4096, 14336])
def test_rows_equal_the_reference(inner: int, cuda: torch.device) -> None:
    rows = torch.randn(37, 2 * inner, device=cuda).bfloat16()[:, :inner]
    for given, wanted in zip(scale_rows(rows), scale_rows_reference(rows), strict=True):
        assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns", "inner"), [(73, 512, 768), (300, 96, 64), (4096, 1024, 4096)])
def test_products_of_many_rows(rows: int, columns: int, inner: int, cuda: torch.device) -> None:
    left, weight = (
        torch.randn(rows, inner, device=cuda).bfloat16(),
        quantised(torch.randn(columns, inner, device=cuda)),
    )
    assert can_scale_rows(left, weight)
    values, scales = scale_rows_reference(left)
    wanted = (values.double() * scales[:, None].double()) @ (weight.values.double() * weight.scales[:, None].double()).T
    given = scaled_product(left, weight)
    # Of float8 the matrix units add up fewer bits than float32 has.
    assert (given.double() - wanted).norm() < 0.006 * wanted.norm()
    whole = left.double() @ weight.dequantised(torch.float64).T
    assert (given.double() - whole).norm() < 0.04 * whole.norm()
