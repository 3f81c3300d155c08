from __future__ import annotations

import pytest
import torch

from outrider.kernels.promised_tokens import fill_promised_tokens


def _check_filled(device: torch.device) -> None:
    # Every other token of a longer tensor, so that strides count, and more of them than one program looks at.
    surrounding = torch.full((600,), -9, dtype=torch.int64, device=device)
    tokens = surrounding[::2]
    tokens.copy_(torch.arange(300))
    tokens[[0, 7, 150, 298, 299]] = torch.tensor([-1, -4, -2, -3, -5], device=device)
    fill_promised_tokens(tokens, torch.tensor([40, -1, 2**31 - 1, 43], dtype=torch.int32, device=device))
    expected = list(range(300))
    # The second had no child, and there is no fifth row.
    expected[0], expected[7], expected[150], expected[298], expected[299] = 40, 43, 0, 2**31 - 1, 0
    assert tokens.tolist() == expected
    assert (surrounding[1::2] == -9).all()


def _check_known_ones_stay(device: torch.device) -> None:
    tokens = torch.tensor([5], device=device)
    fill_promised_tokens(tokens, torch.zeros(0, dtype=torch.int32, device=device))
    assert tokens.tolist() == [5]
    fill_promised_tokens(tokens[:0], torch.zeros(1, dtype=torch.int32, device=device))


def test_references() -> None:
    for check in (_check_filled, _check_known_ones_stay):
        check(torch.device("cpu"))


def test_triton(triton_device: torch.device) -> None:
    for check in (_check_filled, _check_known_ones_stay):
        check(triton_device)


def test_arguments_that_do_not_fit() -> None:
    tokens, chosen = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    for wrong in ((tokens.int(), chosen), (tokens, chosen.long()), (tokens[None], chosen), (tokens, chosen[None])):
        with pytest.raises(ValueError, match="given"):
            fill_promised_tokens(*wrong)
