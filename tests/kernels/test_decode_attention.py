"""The recipes' attention of one new token a sequence."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def decode_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES / "embedded_pair"))
    return importlib.import_module("decode_attention").decode_attention


@pytest.mark.parametrize("length", [1, 64, 77])
@pytest.mark.parametrize("group", [1, 3])
def test_it_is_attention_to_what_the_cache_holds(
    decode_attention: Any, device: torch.device, length: int, group: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 3, group, 64, device=device)
    keys, values = (torch.randn(2, 3, 80, 64, device=device) for _ in range(2))
    keys[:, :, length:] = values[:, :, length:] = torch.nan
    wanted = functional.scaled_dot_product_attention(query, keys[:, :, :length], values[:, :, :length])
    # A GPU multiplies float32 in fewer bits.
    tolerance = 1e-5 if device.type == "cpu" else 5e-3
    torch.testing.assert_close(decode_attention(query, keys, values, length), wanted, rtol=tolerance, atol=tolerance)
