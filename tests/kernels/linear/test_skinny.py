"""Products of few rows: the kernels against plain torch, sums in parts, and bits that do not depend on other rows."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.linear.gated_activation import Activation
from outrider.kernels.linear.scaled_weight import quantised, scaled_weight
from outrider.kernels.linear.skinny import (
    gated_linear,
    gated_linear_reference,
    linear,
    linear_parts,
    linear_reference,
)

# Rows, columns and inner sizes: a block, less than one, and no multiples of one.
SMALL = [(1, 64, 64), (5, 70, 33), (17, 3, 130)]
# Shapes whose products stream: wide and narrow tiles, split and not, one and several units a program, and ends that are
# no whole block.
STREAMED = [
    (1, 4096, 4096), (8, 1000, 776), (9, 6144, 512), (33, 768, 2056), (64, 4096, 14336), (64, 768, 768), (64, 8, 8),
    (3, 40000, 136), (64, 40000, 136), (24, 6144, 520), (40, 4096, 512), (72, 4096, 4096), (70, 40000, 136),
]  # fmt: skip


def _matrices(rows: int, columns: int, inner: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    left = torch.randn(rows, inner, device=device).to(dtype)
    return [left, (torch.randn(columns, inner, device=device) / inner**0.5).to(dtype)]


def _assert_near(given: torch.Tensor, wanted: torch.Tensor, *, inner: int) -> None:
    """Equal but for the order of float32 sums and one rounding to the dtype given."""
    assert given.shape == wanted.shape
    unit = torch.finfo(given.dtype).eps
    tolerance = (unit if given.dtype != torch.float32 else 0.0) * wanted.abs() + 2e-6 * inner**0.5
    off = (given.double() - wanted.double()).abs() > tolerance
    assert not off.any(), f"{int(off.sum())} of {off.numel()} are off"


@pytest.mark.parametrize(("rows", "columns", "inner"), SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_sizes_match_plain_torch(
    triton_device: torch.device, rows: int, columns: int, inner: int, dtype: torch.dtype
) -> None:
    left, weight = _matrices(rows, columns, inner, triton_device, dtype)
    wanted = left.double() @ weight.double().T
    _assert_near(linear(left, weight, fixed=True), wanted, inner=inner)
    _assert_near(linear_parts(left, weight, fixed=True).sum(0), wanted, inner=inner)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_are_multiplied(triton_device: torch.device, activation: Activation, dtype: torch.dtype) -> None:
    left, weight = _matrices(5, 2 * 35, 72, triton_device, dtype)
    gate, up = (left.double() @ weight.double().T).chunk(2, dim=1)
    if activation == "silu":
        wanted = gate * torch.sigmoid(gate) * up
    else:
        wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    _assert_near(gated_linear(left, weight, activation=activation, fixed=True), wanted, inner=72)
    _assert_near(gated_linear_reference(left, weight, activation=activation), wanted, inner=72)


@pytest.mark.parametrize(("rows", "columns", "inner"), [(5, 70, 128), (3, 10, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_8_bits_are_multiplied_as_what_they_stand_for(
    triton_device: torch.device, rows: int, columns: int, inner: int, dtype: torch.dtype
) -> None:
    left, whole = _matrices(rows, columns, inner, triton_device, dtype)
    weight = quantised(whole)
    wanted = left.double() @ weight.dequantised(torch.float64).T
    _assert_near(linear(left, weight, fixed=True), wanted, inner=inner)
    _assert_near(linear_parts(left, weight, fixed=True).sum(0), wanted, inner=inner)
    _assert_near(linear_reference(left, weight), wanted, inner=inner)
    gate, up = wanted.chunk(2, dim=1)
    gated = gate * torch.sigmoid(gate) * up
    _assert_near(gated_linear(left, weight, activation="silu", fixed=True), gated, inner=inner)
    _assert_near(gated_linear_reference(left, weight, activation="silu"), gated, inner=inner)


def test_a_view_of_wider_rows_is_taken(triton_device: torch.device) -> None:
    wide, weight = _matrices(3, 24, 64, triton_device, torch.float32)
    wanted = wide[:, 8:40].double() @ weight[:, :32].double().T
    _assert_near(linear(wide[:, 8:40], weight[:, :32], fixed=True), wanted, inner=32)
    columns_first = weight[:, :32].T.contiguous().T
    _assert_near(linear(wide[:, 8:40], columns_first, fixed=True), wanted, inner=32)


def test_no_rows_and_no_inner_size() -> None:
    assert linear(torch.empty(0, 8), torch.empty(3, 8)).shape == (0, 3)
    assert linear_parts(torch.empty(0, 8), torch.empty(3, 8)).shape == (1, 0, 3)
    assert torch.equal(linear(torch.empty(2, 0), torch.empty(3, 0)), torch.zeros(2, 3))


def test_the_cpu_runs_the_reference() -> None:
    left, weight = _matrices(3, 10, 16, torch.device("cpu"), torch.bfloat16)
    wanted = (left.float() @ weight.float().T).bfloat16()
    assert torch.equal(linear_reference(left, weight), wanted)
    assert torch.equal(linear(left, weight), wanted)
    assert torch.equal(linear_parts(left, weight), wanted[None])


@pytest.mark.parametrize(("rows", "columns", "inner"), STREAMED)
@pytest.mark.parametrize("fixed", [False, True])
def test_streamed_products_match_float64(rows: int, columns: int, inner: int, fixed: bool, cuda: torch.device) -> None:
    left, weight = _matrices(rows, columns, inner, cuda, torch.bfloat16)
    wanted = left.double() @ weight.double().T
    parts = linear_parts(left, weight, fixed=fixed)
    assert parts.dtype == (torch.float32 if parts.shape[0] > 1 else torch.bfloat16)
    _assert_near(parts.sum(0), wanted, inner=inner)
    _assert_near(linear(left, weight, fixed=fixed), wanted, inner=inner)
    if columns % 2 == 0:
        gate, up = wanted.chunk(2, dim=1)
        gated = gated_linear(left, weight, activation="silu", fixed=fixed)
        _assert_near(gated, gate * torch.sigmoid(gate) * up, inner=4 * inner)


@pytest.mark.parametrize(
    ("columns", "inner", "eight_bits"),
    [(4096, 4096, False), (1000, 776, False), (70, 33, False), (4096, 4096, True), (1000, 832, True), (70, 33, True)],
)
def test_fixed_bits_depend_on_the_row_alone(columns: int, inner: int, eight_bits: bool, cuda: torch.device) -> None:
    left, whole = _matrices(300, columns, inner, cuda, torch.bfloat16)
    weight = quantised(whole) if eight_bits else whole
    all_rows = linear_parts(left, weight, fixed=True)
    gated = gated_linear(left, weight, activation="silu", fixed=True)
    for begin, end in ((0, 1), (7, 20), (100, 164), (10, 34), (3, 75), (5, 86), (31, 300)):
        some = left[begin:end]
        assert eight_bits or torch.equal(linear_parts(some, weight, fixed=True), all_rows[:, begin:end])
        assert torch.equal(linear(some, weight, fixed=True), all_rows[0, begin:end])
        assert torch.equal(gated_linear(some, weight, activation="silu", fixed=True), gated[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_rows_and_other_dtypes(dtype: torch.dtype, cuda: torch.device) -> None:
    left, weight = _matrices(200, 96, 64, cuda, dtype)
    wanted = left.double() @ weight.double().T
    for rows in (3, 200):
        _assert_near(linear(left[:rows], weight), wanted[:rows], inner=64)
        gate, up = wanted[:rows].chunk(2, dim=1)
        gated = gated_linear(left[:rows], weight, activation="gelu_tanh")
        wanted_gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
        # Torch's product rounds the gate and up before they are multiplied.
        torch.testing.assert_close(gated.double(), wanted_gated, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


def test_a_chain_of_overlapping_launches_in_a_graph_is_in_order(cuda: torch.device) -> None:
    """Each product reads what the one before wrote; a launch that did not wait would read what was there before."""
    size, steps = 4096, 12
    rows = torch.randn(16, size, device=cuda, dtype=torch.bfloat16)
    weights = [(torch.randn(size, size, device=cuda) / size**0.5).bfloat16() for _ in range(steps)]

    def chain(hidden: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            hidden = linear(hidden, weight)
        return hidden

    wanted = chain(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = chain(rows)
    for _ in range(20):
        rows.copy_(torch.randn_like(rows))
        graph.replay()
        torch.cuda.synchronize()
        wanted = rows
        for weight in weights:
            wanted = linear(wanted, weight)
            torch.cuda.synchronize()
        assert torch.equal(given, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_8_bits_is_widened_exactly(dtype: torch.dtype, cuda: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=cuda)
    codes[[127, 255]] = 0  # the two that are no numbers
    weight = scaled_weight(codes.view(torch.float8_e4m3fn).expand(256, 256).contiguous(), torch.ones(256, device=cuda))
    for unit in torch.eye(256, dtype=dtype, device=cuda).split(64):
        assert torch.equal(linear(unit, weight), unit @ weight.dequantised(dtype).T)


# Shapes of every kind of tile: rows in one and two blocks, K split and not, ends that are no whole block, few and many
# units, wide tiles; and inner sizes that are stored in the usual order.
SCALED = [
    (1, 4096, 4096), (8, 1000, 832), (9, 6144, 512), (33, 768, 2112), (64, 4096, 14336), (64, 768, 64),
    (3, 40000, 192), (64, 40000, 192), (24, 6144, 576), (40, 4096, 512), (72, 4096, 4096), (70, 40000, 192),
    (16, 96, 1088), (5, 80, 776), (5, 96, 80),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "inner"), SCALED)
@pytest.mark.parametrize("fixed", [False, True])
def test_streamed_weights_of_8_bits(rows: int, columns: int, inner: int, fixed: bool, cuda: torch.device) -> None:
    left, whole = _matrices(rows, columns, inner, cuda, torch.bfloat16)
    weight = quantised(whole)
    wanted = left.double() @ weight.dequantised(torch.float64).T
    _assert_near(linear_parts(left, weight, fixed=fixed).sum(0), wanted, inner=4 * inner)
    _assert_near(linear(left, weight, fixed=fixed), wanted, inner=inner)
    gate, up = wanted.chunk(2, dim=1)
    gated = gated_linear(left, weight, activation="gelu_tanh", fixed=fixed)
    _assert_near(gated, torch.nn.functional.gelu(gate, approximate="tanh") * up, inner=4 * inner)


def test_many_rows_of_other_dtypes_keep_their_bits(cuda: torch.device) -> None:
    for dtype, columns in ((torch.float16, 96), (torch.float32, 96), (torch.bfloat16, 90)):
        left, whole = _matrices(200, columns, 128, cuda, dtype)
        weight = quantised(whole)
        given = linear(left, weight)
        torch.testing.assert_close(given, left @ weight.dequantised(dtype).T, rtol=0.02, atol=0.02)
        off = given.double() - left.double() @ weight.dequantised(torch.float64).T
        assert off.norm() < 0.005 * given.double().norm()
