from __future__ import annotations

import pytest
import torch

from outrider.kernels.sampling.residual_sampling import residual_tokens_reference, with_dense_rows


@pytest.mark.parametrize(
    ("residual", "uniform", "token"),
    [
        ([0.25, 0.25, 0.5], 0.0, 0),
        ([0.25, 0.25, 0.5], 0.2499, 0),
        ([0.25, 0.25, 0.5], 0.25, 1),
        ([0.25, 0.25, 0.5], 0.9999, 2),
        ([0.0, 0.25, 0.0, 0.25, 0.0], 0.0, 1),
        ([0.0, 0.25, 0.0, 0.25, 0.0], 0.5, 3),
        ([0.0, 0.25, 0.0, 0.25, 0.0], 1.0, 3),
        ([0.0, 0.0, 0.0], 0.5, 2),
        ([30.0, 10.0], 0.74, 0),
        ([30.0, 10.0], 0.76, 1),
        ([1e-40, 0.0], 0.5, 0),
    ],
)
def test_token_of_a_row(residual: list[float], uniform: float, token: int) -> None:
    assert residual_tokens_reference(torch.tensor([residual]), torch.tensor([uniform])).tolist() == [token]


def test_rows_are_judged_alone() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert residual_tokens_reference(rows, torch.full((3,), 0.6)).tolist() == [0, 1, 1]


def test_only_rows_that_are_not_dense_are_copied() -> None:
    tensor = torch.rand(2, 3, 8)
    assert with_dense_rows(tensor[:, ::2]).data_ptr() == tensor.data_ptr()
    assert torch.equal(with_dense_rows(tensor[..., ::2]), tensor[..., ::2])
    assert with_dense_rows(tensor[..., ::2]).stride(-1) == 1
