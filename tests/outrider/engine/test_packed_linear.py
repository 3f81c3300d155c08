import pytest
import torch
from torch import nn

from outrider.engine.packed_linear import ROW_SIZES, PackedLinear, can_pack, pack_linear_layers, size_of

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch lacks oneDNN's packed linear layers")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33, 70, 600, 1100])
@torch.inference_mode()
def test_packing_changes_rounding_only(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 130, bias=bias)
    inputs = torch.randn(1, rows, 96)
    exact = inputs.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(PackedLinear(linear)(inputs).double(), exact, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_products_are_run_in_few_sizes(monkeypatch):
    run: set[int] = set()
    product = torch.ops.mkldnn._linear_pointwise

    def noted(rows, *others):
        run.add(len(rows))
        return product(rows, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    layer = PackedLinear(nn.Linear(8, 4))
    for rows in range(1, 1200):
        assert layer(torch.zeros(rows, 8)).shape == (rows, 4)
    # oneDNN keeps a kernel for each.
    assert run == set(ROW_SIZES)
    assert len(run) <= 64
    assert all(rows <= size_of(rows) <= 9 * rows / 8 for rows in range(1, ROW_SIZES[-1] + 1))


def test_every_linear_layer_of_a_model_is_replaced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.Linear(2, 2).bfloat16())
    pack_linear_layers(model)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [PackedLinear, PackedLinear, nn.ReLU, nn.Linear]
