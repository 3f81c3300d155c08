"""Filtered distributions against their definition, and as what `coupled_sampling` chooses from."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.sampling.filtered_probs import filtered_probs, filtered_probs_reference

FILTERS = ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.05), (1, 1.0, 0.0), (-1, 0.01, 0.0))


def columns(rows: int, device: torch.device, temperature: float = 0.7) -> dict[str, torch.Tensor]:
    """Every combination of filters in turn."""
    filters = [FILTERS[row % len(FILTERS)] for row in range(rows)]
    return {
        "temperature": torch.full((rows,), temperature, device=device),
        "top_k": torch.tensor([top_k for top_k, _, _ in filters], device=device),
        "top_p": torch.tensor([top_p for _, top_p, _ in filters], device=device),
        "min_p": torch.tensor([min_p for _, _, min_p in filters], device=device),
    }


def plain(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The definition, token by token, of one row without ties."""
    mass = [math.exp(value / temperature) for value in logits.tolist()]
    ranked = sorted(range(len(mass)), key=lambda token: -mass[token])
    if top_k > 0:
        ranked = ranked[:top_k]
    total, reached, kept = sum(mass[token] for token in ranked), 0.0, []
    for token in ranked:
        if reached >= top_p * total:
            break
        kept.append(token)
        reached += mass[token]
    kept = [token for token in kept if mass[token] >= min_p * mass[ranked[0]]]
    total = sum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(mass))]


def test_rows_are_the_definitions():
    logits = torch.randn(28, 37) * 2
    found = filtered_probs(logits, **columns(28, logits.device))
    for row in range(28):
        wanted = torch.tensor(plain(logits[row], 0.7, *FILTERS[row % len(FILTERS)]))
        torch.testing.assert_close(found[row], wanted, atol=1e-6, rtol=1e-5)
        assert torch.equal(found[row] > 0, wanted > 0)


def test_choices_are_samples_of_these_rows():
    """Same support and same logarithms as the scores that `coupled_sampling` ranks by, also at ties."""
    logits = torch.randint(-6, 6, (28, 24)).float()
    settings = columns(28, logits.device)
    seeds = torch.zeros(28, dtype=torch.int64)
    tokens, log_q, _ = coupled_topk_scored(logits, seeds, seeds, *settings.values(), k=24)
    found = filtered_probs(logits, **settings)
    for row in range(28):
        kept = tokens[row] >= 0
        assert set(tokens[row][kept].tolist()) == set(found[row].nonzero().flatten().tolist())
        torch.testing.assert_close(found[row][tokens[row][kept]].log(), log_q[row][kept], atol=1e-5, rtol=1e-5)


def test_temperature_0_is_the_largest_and_nothing_allowed_is_0():
    logits = torch.tensor([[0.0, 2.0, 1.0], [-math.inf] * 3])
    found = filtered_probs(logits, **columns(2, logits.device, temperature=0.0))
    assert found.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_leaves_the_others_alone(broken: float):
    logits = torch.randn(14, 9)
    settings = columns(14, logits.device)
    wanted = filtered_probs(logits, **settings)
    logits[::2] = broken
    assert torch.equal(filtered_probs(logits, **settings)[1::2], wanted[1::2])


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"), [(7, 50, torch.float32), (3, 5000, torch.float32), (7, 16, torch.bfloat16)]
)
def test_triton_equals_the_reference(triton_device: torch.device, rows: int, vocabulary: int, dtype: torch.dtype):
    logits = torch.randn(rows, 2 * vocabulary).mul(3).to(dtype)[:, ::2]
    logits[rows - 1, 1:] = -math.inf
    settings = columns(rows, logits.device)
    wanted = filtered_probs_reference(logits, **settings)
    moved = logits.to(triton_device)
    found = filtered_probs(moved, **{name: column.to(triton_device) for name, column in settings.items()}).cpu()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [111, 32000, 128256])
def test_large_vocabularies_on_a_gpu(vocabulary: int, cuda: torch.device):
    logits = torch.randn(35, vocabulary) * 3
    settings = columns(35, logits.device)
    wanted = filtered_probs(logits, **settings)
    found = filtered_probs(logits.cuda(), **{name: column.cuda() for name, column in settings.items()}).cpu()
    # A token whose mass is that of the threshold may fall either way with the order of summation.
    off = (found > 0) != (wanted > 0)
    assert int(off.sum()) <= 2
    torch.testing.assert_close(found[~off.any(dim=1)], wanted[~off.any(dim=1)], atol=1e-6, rtol=1e-3)
