"""Rows of logits like a language model's: a few likely tokens and a long tail."""

from __future__ import annotations

import torch

VOCABULARY = 128_256


def zipf_logits(rows: int, device: torch.device) -> torch.Tensor:
    """[rows, V] float32: p falls as rank ** -1.5, with noise, in random order; some two nats."""
    ranks = torch.arange(1, VOCABULARY + 1, device=device, dtype=torch.float32)
    logits = -1.5 * ranks.log() + 0.5 * torch.randn(rows, VOCABULARY, device=device)
    order = torch.rand(rows, VOCABULARY, device=device).argsort(dim=-1)
    return logits.gather(1, order)


def flat_logits(rows: int, device: torch.device) -> torch.Tensor:
    """[rows, V] float32, normal with deviation 2: about ten nats, the hard case for filters."""
    return 2 * torch.randn(rows, VOCABULARY, device=device)
