from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.kernels import backend, early_launch
from outrider.kernels.early_launch import early_options
from outrider.kernels.gated_activation import gated_activation
from outrider.kernels.residual_norm import residual_norm
from outrider.kernels.rotary_store import rotary_store
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention


@pytest.mark.parametrize(("capability", "early"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_launches_begin_early_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], early: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert early_launch.launches_early.__wrapped__(torch.device("cuda:0")) is early
    assert not early_launch.launches_early.__wrapped__(torch.device("cpu"))


def test_kernels_of_a_cpu_are_launched_in_order() -> None:
    assert early_options(torch.device("cpu")) == {"EARLY": False}


_LAYERS, _ROWS, _HEADS, _HEADS_KV, _DIM = 6, 16, 8, 2, 64


def _step_tensors() -> dict[str, torch.Tensor]:
    device, columns = torch.device("cuda"), (_HEADS + 2 * _HEADS_KV) * _DIM
    angles = torch.rand(4000, _DIM // 2, device=device)
    caches = torch.randn(2, _LAYERS, 5000, _HEADS_KV, _DIM, device=device, dtype=torch.bfloat16)
    return {
        "hidden": torch.randn(_ROWS, _HEADS * _DIM, device=device, dtype=torch.bfloat16),
        "w_qkv": torch.randn(_HEADS * _DIM // 2, columns, device=device, dtype=torch.bfloat16) / 8,
        "addend": torch.randn(_ROWS, columns, device=device, dtype=torch.bfloat16),
        "cos_sin": torch.stack([angles.cos(), angles.sin()], 1),
        "positions": torch.arange(3000, 3000 + _ROWS, device=device, dtype=torch.int32),
        "write_slots": torch.arange(100, 100 + _ROWS, device=device),
        "key_caches": caches[0],
        "value_caches": caches[1],
    }


def _step(
    tensors: dict[str, torch.Tensor], batch: TreeAttentionBatch, window: int, between: Callable[[], object]
) -> torch.Tensor:
    """Layers of a decoder with one product of torch each; `between` is called after every launch."""
    hidden, weight = tensors["hidden"].clone(), torch.ones_like(tensors["hidden"][0])
    rows = gated_activation(hidden, activation="silu")
    for layer in range(_LAYERS):
        qkv = torch.stack([rows @ tensors["w_qkv"], tensors["addend"]])
        between()
        key_cache, value_cache = tensors["key_caches"][layer], tensors["value_caches"][layer]
        where = tensors["cos_sin"], tensors["positions"], tensors["write_slots"]
        query = rotary_store(qkv, *where, key_cache, value_cache, heads=_HEADS)
        between()
        mixed = tree_attention(query, key_cache, value_cache, batch, scale=_DIM**-0.5, sliding_window=window)
        between()
        normed = residual_norm(hidden, mixed.view(1, _ROWS, -1), weight, eps=1e-5)
        between()
        rows = gated_activation(normed, activation="silu")
        between()
    return rows


@pytest.mark.gpu
@pytest.mark.skipif(backend.INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 700])
def test_a_step_without_waits_between_has_the_same_bits(window: int) -> None:
    tensors, device = _step_tensors(), torch.device("cuda")
    keys = 900 + _ROWS
    slots = torch.randperm(4000, device=device, dtype=torch.int32)[:keys] + 1000
    slots[900:] = tensors["write_slots"].int()
    slot_positions = torch.arange(-1000, 4000, device=device, dtype=torch.int32)
    slot_positions[tensors["write_slots"]] = tensors["positions"]
    batch = TreeAttentionBatch(
        slot_table=slots[None].clone(),
        query_start=torch.tensor([0, _ROWS], dtype=torch.int32, device=device),
        tree_start=torch.tensor([900], dtype=torch.int32, device=device),
        prefix_len=torch.full((_ROWS,), 900, dtype=torch.int32, device=device),
        key_len=torch.tensor([keys], dtype=torch.int32, device=device),
        tree_mask=torch.tensor([[(2 << row) - 1] for row in range(_ROWS)], device=device),
        max_query_len=_ROWS,
        max_key_len=keys,
        positions=tensors["positions"],
        slot_positions=slot_positions,
    )
    expected = _step(tensors, batch, window, torch.cuda.synchronize)
    for cache in ("key_caches", "value_caches"):
        tensors[cache][:, 100 : 100 + _ROWS] = 9.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = _step(tensors, batch, window, lambda: None)
    for _ in range(20):
        for cache in ("key_caches", "value_caches"):
            tensors[cache][:, 100 : 100 + _ROWS] = 9.0
        graph.replay()
        assert torch.equal(replayed, expected)
