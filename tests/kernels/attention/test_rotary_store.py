from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.kernels.attention.rotary_store import rotary_store, rotary_store_reference

_TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_FP8 = torch.float8_e4m3fn


def _given(
    *,
    rows: int = 3,
    parts: int = 2,
    heads: int = 3,
    heads_kv: int = 2,
    head_dim: int = 32,
    slots: int = 9,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    columns = (heads + 2 * heads_kv) * head_dim
    angles = torch.rand(20, head_dim // 2) * 6
    return {
        "qkv": torch.randn(parts, rows, columns).to(torch.float32 if parts > 1 else dtype),
        "cos_sin": torch.stack([angles.cos(), angles.sin()], 1),
        "positions": torch.randint(0, 20, (rows,), dtype=torch.int32),
        "write_slots": torch.randperm(slots)[:rows],
        "key_cache": torch.zeros(slots, heads_kv, head_dim).to(cache_dtype or dtype),
        "value_cache": torch.zeros(slots, heads_kv, head_dim).to(cache_dtype or dtype),
        "heads": heads,
        "query_dtype": dtype,
        **options,
    }


def _norms(head_dim: int) -> dict[str, Any]:
    return {"q_norm": torch.rand(head_dim) + 0.5, "k_norm": torch.rand(head_dim) + 0.5, "eps": 1e-6}


def _on(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()}  # fmt: skip


def _check(device: torch.device, given: dict[str, Any]) -> None:
    """Queries and both caches against the reference."""
    host, moved = _on(torch.device("cpu"), given), _on(device, given)
    expected, query = rotary_store_reference(**host), rotary_store(**moved)
    assert query.dtype == expected.dtype
    tolerance = _TOLERANCE[query.dtype]
    torch.testing.assert_close(query.cpu(), expected, rtol=tolerance, atol=tolerance)
    for name in ("key_cache", "value_cache"):
        have, want = moved[name].cpu().float(), host[name].float()
        # A number between two of eight bits may fall to either side.
        tolerance = 0.13 if host[name].dtype == _FP8 else _TOLERANCE[host[name].dtype]
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance / 10 if tolerance == 0.13 else tolerance)


def test_it_rotates_as_transformers_does() -> None:
    given = _given(parts=1, **_norms(32), bias=torch.randn(7 * 32))
    query = rotary_store(**given)
    heads = (given["qkv"][0] + given["bias"]).view(3, 7, 32).transpose(0, 1)[None]
    cos, sin = (given["cos_sin"][given["positions"].long(), place].repeat(1, 2)[None] for place in (0, 1))
    norms = [Qwen3RMSNorm(32, eps=1e-6) for _ in range(2)]
    for norm, name in zip(norms, ("q_norm", "k_norm"), strict=True):
        norm.weight.data.copy_(given[name])
    rotated = apply_rotary_pos_emb(norms[0](heads[:, :3]), norms[1](heads[:, 3:5]), cos, sin)
    torch.testing.assert_close(query, rotated[0][0].transpose(0, 1).detach(), rtol=1e-6, atol=1e-6)
    slots = given["write_slots"]
    torch.testing.assert_close(given["key_cache"][slots], rotated[1][0].transpose(0, 1).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given["value_cache"][slots], heads[0, 5:].transpose(0, 1), rtol=0, atol=0)
    untouched = [slot for slot in range(9) if slot not in slots.tolist()]
    assert not given["key_cache"][untouched].any() and not given["value_cache"][untouched].any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parts": 1, "dtype": torch.bfloat16, **_norms(32)},
        {"head_dim": 48, "bias": torch.randn(5 * 48), "heads": 1, **_norms(48)},
        {"heads": 1, "heads_kv": 1, "head_dim": 16, "parts": 3, "dtype": torch.bfloat16, "key_scale": 0.5,
         "value_scale": 2.0, "k_norm": torch.rand(16)},
    ],
)  # fmt: skip
def test_triton_against_the_reference(triton_device: torch.device, changes: dict[str, Any]) -> None:
    _check(triton_device, _given(**changes))


def test_places_out_of_range(triton_device: torch.device) -> None:
    given = _given(rows=4)
    given["positions"] = torch.tensor([-1, 20, 2**31 - 1, 5], dtype=torch.int32)
    given["write_slots"] = torch.tensor([-1, 9, 2**40, 4])
    near = {**given, "positions": torch.tensor([0, 19, 19, 5]), "write_slots": torch.tensor([-1, -1, -1, 4])}
    moved, host = _on(triton_device, given), _on(torch.device("cpu"), near)
    torch.testing.assert_close(rotary_store(**moved).cpu(), rotary_store_reference(**host), rtol=3e-6, atol=3e-6)
    for name in ("key_cache", "value_cache"):
        torch.testing.assert_close(moved[name].cpu(), host[name], rtol=3e-6, atol=3e-6)
        assert host[name].any()


def test_caches_with_heads_outermost(triton_device: torch.device) -> None:
    given = _given()
    moved = _on(triton_device, given)
    for name in ("key_cache", "value_cache"):
        moved[name] = moved[name].transpose(0, 1).contiguous().transpose(0, 1)
    moved["qkv"] = torch.cat([moved["qkv"], moved["qkv"]], 2)[:, :, : given["qkv"].shape[2]]
    rotary_store_reference(**given)
    rotary_store(**moved)
    for name in ("key_cache", "value_cache"):
        torch.testing.assert_close(moved[name].cpu(), given[name], rtol=3e-6, atol=3e-6)


def test_eight_bit_caches_hold_what_fits(triton_device: torch.device) -> None:
    # No rotation, and numbers that eight bits hold.
    given = _given(rows=2, parts=1, heads=1, heads_kv=1, head_dim=16, cache_dtype=_FP8, key_scale=0.5, value_scale=2.0)
    given["cos_sin"] = torch.stack([torch.ones(20, 8), torch.zeros(20, 8)], 1)
    given["qkv"] = torch.randint(-8, 9, (1, 2, 48)) * 16.0
    given["qkv"][0, 0, 16] = 1000.0
    moved = _on(triton_device, given)
    query = rotary_store(**moved)
    assert torch.equal(query.cpu().view(2, 16), given["qkv"][0, :, :16])
    keys = (given["qkv"][0, :, 16:32] * 2).clamp(-448, 448).view(2, 1, 16)
    slots = given["write_slots"]
    assert torch.equal(moved["key_cache"].cpu().float()[slots], keys)
    assert torch.equal(moved["value_cache"].cpu().float()[slots], given["qkv"][0, :, 32:].view(2, 1, 16) / 2)


def test_the_dtype_of_queries() -> None:
    assert rotary_store(**_given(dtype=torch.bfloat16, query_dtype=None)).dtype == torch.bfloat16
    of_qkv = _given(parts=1, dtype=torch.float16, cache_dtype=_FP8, query_dtype=None)
    assert rotary_store(**of_qkv).dtype == torch.float16


@pytest.mark.parametrize(
    ("head_dim", "rows", "parts"), [(64, 1, 8), (96, 7, 3), (96, 1500, 1), (128, 64, 4), (128, 1500, 1), (256, 65, 2)]
)
def test_cuda_sizes(head_dim: int, rows: int, parts: int, cuda: torch.device) -> None:
    sizes: dict[str, Any] = {"rows": rows, "parts": parts, "heads": 12, "heads_kv": 3, "head_dim": head_dim}
    for dtype in (torch.bfloat16, torch.float32):
        _check(cuda, _given(**sizes, slots=2000, dtype=dtype))
        normed = {**_norms(head_dim), "bias": torch.randn(18 * head_dim)}
        _check(cuda, _given(**sizes, slots=2000, dtype=dtype, **normed))
    _check(cuda, _given(**sizes, slots=2000, dtype=torch.bfloat16, cache_dtype=_FP8, key_scale=0.02))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_rows_bits_depend_on_the_row_alone(head_dim: int, cuda: torch.device) -> None:
    given = _on(cuda, _given(rows=500, slots=600, heads=8, head_dim=head_dim, **_norms(head_dim)))
    query = rotary_store(**given)
    alone = {**given, "qkv": given["qkv"][:, 77:78], "key_cache": torch.zeros_like(given["key_cache"])}
    for name in ("positions", "write_slots"):
        alone[name] = given[name][77:78]
    assert torch.equal(rotary_store(**alone)[0], query[77])
    slot = int(given["write_slots"][77])
    assert torch.equal(alone["key_cache"][slot], given["key_cache"][slot])


def test_no_rows(triton_device: torch.device) -> None:
    assert rotary_store(**_on(triton_device, _given(rows=0))).shape == (0, 3, 32)
