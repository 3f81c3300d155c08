from __future__ import annotations

import pytest
import torch
from benchmarks import products


@pytest.mark.parametrize("product", [products.ours, products.torchs])
def test_a_chain_runs_every_weight_once_in_order(product: products.Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", dict.fromkeys(products.SHAPES, (8, 4096)))
    rows = {4096: torch.randn(2, 4096)}
    weights = {name: [torch.randn(8, 4096) for _ in range(1 if name == "lm_head" else 2)] for name in products.SHAPES}
    seen = []

    def noted(name: str, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((name, next(place for place, one in enumerate(weights[name]) if one is weight)))
        return product(name, given, weight)

    products.chain(noted, rows, weights, list(products.SHAPES))
    inside = [name for name in products.SHAPES if name != "lm_head"]
    assert seen == [*((name, layer) for layer in (0, 1) for name in inside), ("lm_head", 0)]
    seen.clear()
    products.chain(noted, rows, weights, ["lm_head"])
    assert seen == [("lm_head", 0)]


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert products.main(["--rows", "1"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
