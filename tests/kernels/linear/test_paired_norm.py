from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.linear.paired_norm import paired_norm, paired_norm_reference
from outrider.kernels.linear.residual_norm import residual_norm

_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


def _given(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden": torch.randn(rows, columns).to(dtype),
        "token_ids": torch.randint(11, (rows,)),
        "table": torch.randn(11, columns).to(dtype),
        "table_weight": torch.rand(columns).to(dtype) + 0.5,
        "hidden_weight": torch.rand(columns) + 0.5,
    }


def _check(device: torch.device, given: dict[str, Any], *, streams_normed: bool) -> None:
    options: dict[str, Any] = {"eps": 1e-5, "streams_normed": streams_normed}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in given.items()}
    before = moved["hidden"].clone()
    tolerance = _TOLERANCE[given["hidden"].dtype]
    for have, want in zip(paired_norm(**moved, **options), paired_norm_reference(**given, **options), strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have.cpu(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(moved["hidden"], before)


@pytest.mark.parametrize("streams_normed", [False, True])
def test_it_is_both_norms_beside_each_other(streams_normed: bool) -> None:
    given = _given(3, 24, torch.float32)
    stream, pair = paired_norm(**given, eps=1e-5, streams_normed=streams_normed)
    hidden, embedded = given["hidden"].double(), given["table"][given["token_ids"]].double()
    halves = [
        values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * given[weight]
        for values, weight in ((embedded, "table_weight"), (hidden, "hidden_weight"))
    ]
    torch.testing.assert_close(pair.double(), torch.cat(halves, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stream.double(), halves[1] if streams_normed else hidden, rtol=1e-5, atol=1e-6)
    assert stream.data_ptr() != given["hidden"].data_ptr()


@pytest.mark.parametrize(("columns", "streams_normed"), [(200, False), (64, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_against_the_reference(
    triton_device: torch.device, columns: int, streams_normed: bool, dtype: torch.dtype
) -> None:
    given = _given(3, columns, dtype)
    _check(triton_device, given | {"token_ids": given["token_ids"].int()}, streams_normed=streams_normed)


def test_rows_apart_in_memory(triton_device: torch.device) -> None:
    given = _given(2, 32, torch.float32)
    wide = torch.full((2, 48), 7.0)
    wide[:, :32] = given["hidden"]
    _check(triton_device, given | {"hidden": wide[:, :32]}, streams_normed=False)


def test_tokens_out_of_range_read_zeros_from_the_table(triton_device: torch.device) -> None:
    given: dict[str, Any] = {name: each.to(triton_device) for name, each in _given(2, 32, torch.float32).items()}
    given["token_ids"] = torch.tensor([-1, 11], device=triton_device)
    _, pair = paired_norm(**given, eps=1e-5)
    assert (pair[:, :32] == 0).all()
    assert (pair[:, 32:] != 0).all()


@pytest.mark.parametrize("columns", [384, 4096, 8192])
def test_its_bits_are_those_of_single_norms(columns: int, cuda: torch.device) -> None:
    given: dict[str, Any] = {name: each.cuda() for name, each in _given(70, columns, torch.bfloat16).items()}
    stream, pair = paired_norm(**given, eps=1e-5)
    embedded = given["table"][given["token_ids"]]
    halves = [residual_norm(embedded, None, given["table_weight"], eps=1e-5),
              residual_norm(given["hidden"], None, given["hidden_weight"], eps=1e-5)]  # fmt: skip
    assert torch.equal(pair, torch.cat(halves, 1))
    assert torch.equal(stream, given["hidden"])
