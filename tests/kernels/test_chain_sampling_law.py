"""The law of what `chain_speculative_sampling` emits when the drafts are sampled from q.

For the reference by exact integration: the verdict is piecewise constant in every uniform, so one evaluation inside
every piece, weighted by the piece's length and by q of the drafts, has no sampling error. The kernels, which draw
their own uniforms, by chi-square.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.tensors import pieces, recorded

from outrider.kernels import chain_sampling

_Law = dict[tuple[int, ...], float]
(_RECORDED,) = recorded("chain_unbiasedness")


def _rows(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q [S, V] and p [S + 1, V], the recorded case or random ones with zeros."""
    if number == 0:
        return torch.tensor(_RECORDED["draft_probs"]), torch.tensor(_RECORDED["target_probs"])
    generator = torch.Generator().manual_seed(number)
    drafts, vocab_size = number % 3, 2 + number % 2
    rows = torch.rand(2 * drafts + 1, vocab_size, generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 0.2] = 0
    rows[:, 0] += 0.1
    rows /= rows.sum(1, keepdim=True)
    return rows[:drafts], rows[drafts:]


def _expected_law(q: torch.Tensor, p: torch.Tensor) -> _Law:
    """Token i is accepted with min(p, q) and final with what p has beyond: together p, given that i is reached."""
    drafts, vocab_size = q.shape
    law: _Law = {}
    q, p = q.double(), p.double()
    for emitted in range(drafts + 1):
        for tokens in itertools.product(range(vocab_size), repeat=emitted + 1):
            *kept, final = tokens
            last = p[emitted] if emitted == drafts else (p[emitted] - q[emitted]).clamp(min=0)
            mass = float(last[final])
            for position, token in enumerate(kept):
                mass *= float(torch.minimum(p[position, token], q[position, token]))
            law[(*tokens, *[-1] * (drafts - emitted))] = mass
    return law


def _integrated_law(q: torch.Tensor, p: torch.Tensor, judge: Callable[..., tuple[torch.Tensor, ...]]) -> _Law:
    drafts, vocab_size = q.shape
    residuals = [*p, *(p[:drafts] - q).clamp(min=0)]
    sums = [row.double().cumsum(0) for row in residuals]
    finals = pieces([end for row in sums for end in (row / row[-1].clamp(min=1e-30)).tolist()])
    law: _Law = defaultdict(float)
    for ids in itertools.product(range(vocab_size), repeat=drafts):
        chosen = [(float(q[i, token].double()), float(p[i, token].double())) for i, token in enumerate(ids)]
        drafted = torch.tensor([given for given, _ in chosen]).prod().item()
        if drafted == 0:
            continue
        points = list(itertools.product(*(pieces([wanted / given]) for given, wanted in chosen), finals))
        count = len(points)
        coins = torch.tensor([[point for point, _ in row[:-1]] for row in points], dtype=torch.float64)
        final = torch.tensor([[row[-1][0]] for row in points], dtype=torch.float64).expand(-1, drafts + 1)
        tokens, *_ = judge(
            q.expand(count, -1, -1),
            torch.tensor(ids, dtype=torch.int64).expand(count, -1),
            p.expand(count, -1, -1),
            coins.view(count, drafts),
            final,
        )
        for outcome, row in zip(tokens.tolist(), points, strict=True):
            law[tuple(outcome)] += drafted * torch.tensor([size for _, size in row], dtype=torch.float64).prod().item()
    return law


def _error(number: int, judge: Callable[..., tuple[torch.Tensor, ...]]) -> float:
    q, p = _rows(number)
    found, expected = _integrated_law(q, p, judge), _expected_law(q, p)
    return max(abs(found.get(outcome, 0.0) - expected.get(outcome, 0.0)) for outcome in {*found, *expected})


def test_the_law_is_the_targets() -> None:
    assert max(_error(number, chain_sampling.judge_chains_reference) for number in range(12)) < 1e-6


def test_the_recorded_marginals() -> None:
    law = _integrated_law(*_rows(0), chain_sampling.judge_chains_reference)
    first = [sum(mass for outcome, mass in law.items() if outcome[0] == token) for token in range(3)]
    assert first == pytest.approx(_RECORDED["first_token_law"], abs=1e-6)
    accepted = sum(mass for outcome, mass in law.items() if outcome[1] >= 0)
    assert accepted == pytest.approx(_RECORDED["first_accept_prob"], abs=1e-6)


def _sampled_p(device: torch.device, rows: int, chi_square_p: Callable[..., float]) -> float:
    """Smallest chi-square probability over the recorded rows and random ones, drafts sampled from q."""
    smallest = 1.0
    for number in (0, 2, 5, 8):
        q, p = _rows(number)
        generator = torch.Generator().manual_seed(number)
        ids = torch.multinomial(q, rows, replacement=True, generator=generator).T.contiguous()
        given = (q.expand(rows, -1, -1).to(device), ids.to(device), p.expand(rows, -1, -1).to(device))
        seeds = torch.arange(rows, device=device)
        law = _expected_law(q, p)
        weights = torch.tensor([(p.shape[1] + 1) ** place for place in range(p.shape[0])])
        codes = (torch.tensor(list(law)) + 1) @ weights
        keys: list[dict[str, Any]] = [{"seed": 5 + number}, {"seed": seeds}, {"seed": 3, "offset": seeds << 20}]
        for key in keys:
            tokens = chain_sampling.chain_speculative_sampling(*given, **key)[0].cpu().long()
            counts = ((tokens + 1) @ weights).bincount(minlength=int(codes.max()) + 1)
            if int(counts[codes].sum()) < rows:
                return 0.0
            smallest = min(smallest, chi_square_p(counts[codes], torch.tensor(list(law.values()))))
    return smallest


# The interpreter would take long.
@pytest.mark.parametrize("device", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_samples_follow_the_law(device: torch.device, chi_square_p: Callable[..., float]) -> None:
    assert _sampled_p(device, 200_000 if device.type == "cuda" else 10_000, chi_square_p) > 1e-4
