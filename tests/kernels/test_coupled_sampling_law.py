"""That choices follow the law they claim: chi-square against exact laws."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.kernels.coupled_sampling import coupled_choice
from outrider.kernels.noise import gumbel_from_uint32, gumbel_noise

ChiSquare = Callable[[torch.Tensor, torch.Tensor], float]

# A true law falls below this once in a hundred thousand tests, noise that is a tenth too weak by hundreds of orders.
_REJECTED = 1e-5
_LAW = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01], dtype=torch.float64)
_DRAWS = 20_000


def _choose(logits: torch.Tensor, draws: int, **filters: float) -> torch.Tensor:
    """Choices at `draws` consecutive positions of one request."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((draws,), value, dtype=dtype, device=logits.device)

    return coupled_choice(
        logits.expand(draws, -1),
        column(-77, torch.int64),
        torch.arange(draws, device=logits.device),
        column(filters.get("temperature", 1.0), torch.float32),
        column(int(filters.get("top_k", 0)), torch.int32),
        column(filters.get("top_p", 1.0), torch.float32),
        column(filters.get("min_p", 0.0), torch.float32),
    )


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, 10),
        ({"temperature": 0.5}, 10),
        ({"temperature": 1.7}, 10),
        ({"top_k": 4}, 4),
        ({"top_p": 0.7}, 4),
        ({"min_p": 0.19}, 6),
        ({"temperature": 2.0, "top_k": 7, "top_p": 0.9, "min_p": 0.45}, 5),
    ],
)
def test_choices_follow_the_filtered_law(filters: dict[str, float], kept: int, chi_square_p: ChiSquare) -> None:
    law = _LAW ** (1 / filters.get("temperature", 1.0))
    law = torch.where(torch.arange(10) < kept, law, 0.0)
    counts = torch.bincount(_choose(_LAW.log().float(), _DRAWS, **filters), minlength=10)
    assert chi_square_p(counts, law / law.sum()) > _REJECTED


def _words_above(bounds: np.ndarray) -> np.ndarray:
    """Return how many of the 2^32 words have a G above each bound, by bisection: G falls as its word grows."""
    low, high = np.zeros(bounds.shape, dtype=np.int64), np.full(bounds.shape, 2**32, dtype=np.int64)
    for _ in range(33):
        middle = np.minimum((low + high) // 2, 2**32 - 1)
        above = gumbel_from_uint32(middle.astype(np.uint32)) > bounds
        low, high = np.where(above & (low < high), middle + 1, low), np.where(above, high, np.minimum(high, middle))
    return low


def _exact_law(scaled: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """The law of argmax(scaled + scale * G) over independent words, by integration over the winner's word.

    The others' words are counted, not sampled; the winner's 2^32 are stood for by the middles of 2^14 strata.
    """
    words = ((np.arange(2**14) + 0.5) * 2**18).astype(np.uint32)
    score = scaled[:, None] + scale * gumbel_from_uint32(words).astype(np.float64)
    beaten = 1 - _words_above((score[:, None, :] - scaled[None, :, None]) / scale) / 2**32
    beaten[np.arange(len(scaled)), np.arange(len(scaled))] = 1.0
    return beaten.prod(axis=1).mean(axis=1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
@pytest.mark.parametrize("kept", [2, 5])
def test_the_noise_makes_the_argmax_an_exact_sample(temperature: float, kept: int) -> None:
    scaled = np.log(np.array([0.4, 0.25, 0.15, 0.12, 0.08]))[:kept] / temperature
    law = np.exp(scaled) / np.exp(scaled).sum()
    found = _exact_law(scaled)
    assert abs(found.sum() - 1) < 1e-6
    assert np.abs(found - law).max() < 1e-6
    # Noise that is a hundredth too weak is found out by the same yardstick.
    assert np.abs(_exact_law(scaled, 0.99) - law).max() > 1e-4


def test_consecutive_choices_are_independent(chi_square_p: ChiSquare) -> None:
    chosen = _choose(_LAW.log().float(), 2 * _DRAWS).view(-1, 2)
    pairs = torch.bincount(chosen[:, 0] * 10 + chosen[:, 1], minlength=100)
    assert chi_square_p(pairs, torch.outer(_LAW, _LAW).flatten()) > _REJECTED


# A head of three tokens and tails of 1e-4, 1e-5 and 1e-6, spread over a vocabulary of 128,256.
_WIDE_IDS = torch.tensor([0, 70_001, 128_255, 5, 64_000, 128_000, 128_254, 1, 2, 3, 127_999, 40_003])
_WIDE_LAW = torch.tensor([0.6, 0.3, 0, *[1e-4] * 4, *[1e-5] * 4, 1e-6], dtype=torch.float64)
_WIDE_LAW[2] = 1 - _WIDE_LAW.sum()
_WIDE_VOCAB = 128_256
_MILLION = 1_000_000


def test_a_million_choices_over_a_full_vocabulary_keep_small_probabilities_small(chi_square_p: ChiSquare) -> None:
    # Every other token has probability 0, so noise is needed for these ids alone: the choice is the same.
    logits = _WIDE_LAW.log().float()
    counts = torch.zeros(len(_WIDE_IDS), dtype=torch.int64)
    chunk = 50_000
    for begin in range(0, _MILLION, chunk):
        gumbel = gumbel_noise(
            torch.full((chunk,), 12345), torch.arange(begin, begin + chunk), _WIDE_IDS.expand(chunk, -1)
        )
        counts += torch.bincount((logits + gumbel).argmax(dim=-1), minlength=len(_WIDE_IDS))
    assert chi_square_p(counts, _WIDE_LAW) > _REJECTED
    # Poisson bounds for each small entry: seven standard deviations and a few.
    expected = _WIDE_LAW * _MILLION
    assert (counts[3:] <= expected[3:] + 7 * expected[3:].sqrt() + 4).all()
    assert (counts[3:7] > 0).all()


def test_choices_over_a_full_vocabulary_need_only_the_support() -> None:
    logits = torch.full((_WIDE_VOCAB,), -math.inf)
    logits[_WIDE_IDS] = _WIDE_LAW.log().float()
    chosen = _choose(logits, 16)
    gumbel = gumbel_noise(torch.full((16,), -77), torch.arange(16), _WIDE_IDS.expand(16, -1))
    assert torch.equal(chosen, _WIDE_IDS[(_WIDE_LAW.log().float() + gumbel).argmax(dim=-1)])


def test_cuda_a_million_choices_over_a_full_vocabulary(chi_square_p: ChiSquare, cuda: torch.device) -> None:
    # Here every one of the 128,256 tokens has a chance: the tail shares one part in a hundred.
    law = torch.full((_WIDE_VOCAB,), 0.01 / (_WIDE_VOCAB - 3), dtype=torch.float64)
    law[[7, 65_000, 128_001]] = torch.tensor([0.6, 0.3, 0.09], dtype=torch.float64)
    logits = law.log().float().cuda()
    counts = torch.zeros(_WIDE_VOCAB, dtype=torch.int64)
    chunk = 10_000
    for begin in range(0, _MILLION, chunk):
        rows = torch.full((chunk,), 3, dtype=torch.int64, device=cuda)
        ones, zeros = torch.ones(chunk, device=cuda), torch.zeros(chunk, device=cuda)
        positions = torch.arange(begin, begin + chunk, device=cuda)
        chosen = coupled_choice(logits.expand(chunk, -1), rows, positions, ones, zeros.int(), ones, zeros)
        counts += torch.bincount(chosen.cpu(), minlength=_WIDE_VOCAB)
    head = [7, 65_000, 128_001]
    tail = counts.clone()
    tail[head] = 0
    # The tail by blocks of ids, so that a fault tied to a place in the vocabulary shows.
    blocks = torch.arange(_WIDE_VOCAB) // 4096
    tail_law = law.clone()
    tail_law[head] = 0
    block_counts = torch.zeros(32, dtype=torch.int64).index_add_(0, blocks, tail)
    block_law = torch.zeros(32, dtype=torch.float64).index_add_(0, blocks, tail_law)
    observed = torch.cat([counts[head], block_counts])
    assert chi_square_p(observed, torch.cat([law[head], block_law])) > _REJECTED
    # Each tail token is expected 0.08 times; five or more of one has probability below 3e-8 each.
    assert int(tail.max()) <= 5
