from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.kernels.sampling.grammar_mask import apply_grammar_masks


def _plainly(logits: torch.Tensor, rows: list[int], masks: np.ndarray) -> torch.Tensor:
    """Token by token."""
    wanted = logits.clone()
    for row, mask in zip(rows, masks.view(np.uint32).tolist(), strict=True):
        for token in range(logits.shape[1]):
            word = mask[token // 32] if token // 32 < len(mask) else 0
            if 0 <= row < logits.shape[0] and not word >> token % 32 & 1:
                wanted[row, token] = -torch.inf
    return wanted


def _random_masks(rows: int, words: int) -> np.ndarray:
    masks = np.random.default_rng(5).integers(-(2**31), 2**31, (rows, words), dtype=np.int64).astype(np.int32)
    masks[0] = -1
    masks[-1] = 0
    return masks


# A vocabulary that ends within a word, one with fewer words than it needs, and one with more.
@pytest.mark.parametrize(("vocab", "words"), [(70, 3), (100, 2), (40, 4)])
def test_rows_keep_what_their_bits_allow(device: torch.device, vocab: int, words: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, vocab)
    logits[2, 3] = -torch.inf
    rows = [4, 0, 2, 9, -1, 5]
    masks = _random_masks(len(rows), words)
    given = logits.to(device)
    apply_grammar_masks(
        given,
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.from_numpy(masks).to(device),
    )
    assert torch.equal(given.cpu(), _plainly(logits, rows, masks))


def test_strided_logits_and_no_masks(device: torch.device) -> None:
    wide = torch.randn(3, 128, device=device)
    before = wide.clone()
    masks = torch.from_numpy(_random_masks(2, 2)).to(device)
    rows = torch.tensor([2, 1], dtype=torch.int32, device=device)
    apply_grammar_masks(wide[:, ::2], rows, masks)
    assert torch.equal(wide[:, 1::2], before[:, 1::2])
    wanted = _plainly(before[:, ::2].cpu(), [2, 1], masks.cpu().numpy())
    assert torch.equal(wide[:, ::2].cpu(), wanted)
    apply_grammar_masks(wide, rows[:0], masks[:0])
    assert torch.equal(wide[:, ::2].cpu(), wanted)
