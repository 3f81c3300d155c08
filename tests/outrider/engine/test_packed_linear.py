import pytest
import torch
from torch import nn

from outrider.engine.packed_linear import PackedLinear, can_pack, pack_linear_layers

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch lacks oneDNN's packed linear layers")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@torch.inference_mode()
def test_packing_changes_rounding_only(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 130, bias=bias)
    inputs = torch.randn(1, rows, 96)
    exact = inputs.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(PackedLinear(linear)(inputs).double(), exact, rtol=1e-5, atol=1e-5)


def test_every_linear_layer_of_a_model_is_replaced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.Linear(2, 2).bfloat16())
    pack_linear_layers(model)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [PackedLinear, PackedLinear, nn.ReLU, nn.Linear]
