"""Weights of 8 bits: rounding, the order they are stored in, and what they stand for."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.linear.scaled_weight import is_interleaved, quantised, row_scales, scaled_weight, stored_order


@pytest.mark.parametrize("inner", [64, 33, 192])
def test_rounding_is_to_the_nearest_number_of_each_row(inner: int) -> None:
    weight = torch.randn(7, inner) * torch.logspace(-6, 3, 7)[:, None]
    weight[3] = 0
    given = quantised(weight)
    scales = weight.abs().amax(dim=1) / 448
    wanted = (weight / scales.clamp(min=1e-30)[:, None]).to(torch.float8_e4m3fn).float() * scales[:, None]
    assert given.values.dtype == torch.float8_e4m3fn and given.scales.dtype == torch.float32
    torch.testing.assert_close(given.dequantised(torch.float32), wanted, rtol=1e-6, atol=0)
    # Three bits behind the point: no number is off by more than a sixteenth, the smallest ones of a row apart.
    off = (given.dequantised(torch.float32) - weight).abs()
    assert (off <= weight.abs() / 16 + scales[:, None] * 2**-10).all()
    assert torch.equal(given.dequantised(torch.bfloat16), given.dequantised(torch.float32).bfloat16())


def test_columns_take_the_scales_of_whole_rows() -> None:
    weight = torch.randn(5, 128)
    whole = quantised(weight).dequantised(torch.float32)
    part = quantised(weight[:, 64:], row_scales(weight))
    assert torch.equal(part.dequantised(torch.float32), whole[:, 64:])


@pytest.mark.parametrize("inner", [64, 128, 72])
def test_the_stored_order_is_the_one_announced(inner: int) -> None:
    numbers = (torch.arange(3 * inner, dtype=torch.float32) % 15).view(3, inner)
    given = scaled_weight(numbers.to(torch.float8_e4m3fn), torch.ones(3))
    order = stored_order(inner)
    assert torch.equal(given.values.float(), numbers[:, order])
    assert torch.equal(order.sort().values, torch.arange(inner))
    assert is_interleaved(inner) == (inner % 64 == 0) == (not torch.equal(order, torch.arange(inner)))
    assert torch.equal(given.dequantised(torch.float32), numbers)


def test_sixteen_that_stand_together_are_one_threads() -> None:
    # Of a product over 16 numbers a thread has two pairs, eight apart; here for four such products.
    pairs = [(16 * step + half, 16 * step + 8 + half) for step in range(4) for half in (0, 1)]
    assert stored_order(64)[:16].tolist() == [column for pair in pairs for column in pair]
