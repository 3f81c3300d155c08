import pytest
import torch

from outrider.kernels.linear.packed_weight import ROW_SIZES, PackedWeight, can_pack, size_of
from outrider.kernels.linear.scaled_weight import quantised
from outrider.kernels.linear.skinny import gated_linear, gated_linear_reference, linear, linear_parts

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32), reason="this build of torch lacks oneDNN's packed linear layers"
)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33, 70, 600, 1100])
@torch.inference_mode()
def test_packing_changes_rounding_only(rows: int) -> None:
    torch.manual_seed(rows)
    weight, inputs = torch.randn(130, 96), torch.randn(rows, 96)
    exact, packed = inputs.double() @ weight.double().T, PackedWeight(weight, torch.float32)
    for product in (packed.product(inputs), linear(inputs, packed), linear_parts(inputs, packed)[0]):
        torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)
    gated = gated_linear(inputs, packed, activation="silu")
    torch.testing.assert_close(gated, gated_linear_reference(inputs, weight, activation="silu"), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_numbers_of_8_bits_are_what_they_stand_for() -> None:
    weight, inputs = quantised(torch.randn(40, 64)), torch.randn(5, 64)
    wanted = inputs @ weight.dequantised(torch.float32).T
    torch.testing.assert_close(PackedWeight(weight, torch.float32).product(inputs), wanted, rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def test_other_numbers_take_their_place() -> None:
    packed, other, inputs = PackedWeight(torch.zeros(4, 8), torch.float32), torch.randn(4, 8), torch.randn(2, 8)
    packed.refill(other)
    torch.testing.assert_close(packed.product(inputs), inputs @ other.T)


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: 7 columns given, 8 needed"):
        linear(torch.zeros(2, 7), PackedWeight(torch.zeros(4, 8), torch.float32))


def test_products_are_run_in_few_sizes() -> None:
    # oneDNN keeps a kernel for each.
    assert len(ROW_SIZES) <= 64
    for rows in range(1, ROW_SIZES[-1] + 1):
        assert size_of(rows) in ROW_SIZES
        assert rows <= size_of(rows) <= 9 * rows / 8
