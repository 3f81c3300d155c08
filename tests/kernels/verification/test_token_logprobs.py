"""Log probabilities of lines against torch's own, of emitted tokens against a plain lookup; kernels like references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.kernels.verification.token_logprobs import Logprobs, logprob_words, rank_logits, report_logprobs
from outrider.kernels.verification.walk import DRAFTERS_SHIFT, Walks

_SESSIONS = 5
_UNWRITTEN = -7
_ASKED = [2, -1, 0, -1, 20]
_POOL_ROWS = [4, -1, 0, 1, 2, 0, 3]


def _lines(vocab_size: int, dtype: torch.dtype, *, scale: float = 3.0) -> torch.Tensor:
    """Logits of a line for each entry of _POOL_ROWS."""
    return (torch.randn(len(_POOL_ROWS), vocab_size) * scale).to(dtype)


def _rank(logits: torch.Tensor, k: int, device: torch.device) -> Logprobs:
    out = Logprobs.allocate(len(logits) + 1, k, device)
    for column in (out.log_mass, out.top_tokens, out.top_logits):
        column.fill_(_UNWRITTEN)
    pool_rows = torch.tensor(_POOL_ROWS, dtype=torch.int32, device=device)
    rank_logits(logits.to(device), pool_rows, torch.tensor(_ASKED, dtype=torch.int32, device=device), out)
    return Logprobs(log_mass=out.log_mass.cpu(), top_tokens=out.top_tokens.cpu(), top_logits=out.top_logits.cpu())


def _check_ranks(logits: torch.Tensor, k: int, device: torch.device) -> None:
    ranked, count = _rank(logits, k, device), min(k, logits.shape[1])
    for line, pool_row in enumerate([*_POOL_ROWS, -1]):
        tokens = ranked.top_tokens[line].tolist()
        if pool_row < 0 or _ASKED[pool_row] < 0:
            assert tokens == [_UNWRITTEN] * k
            assert ranked.log_mass[line] == _UNWRITTEN and (ranked.top_logits[line] == _UNWRITTEN).all()
            continue
        values = logits[line].float()
        best = sorted(range(len(values)), key=lambda token: (-values[token].item(), token))[:k]
        assert tokens == best + [-1] * (k - count)
        assert ranked.top_logits[line, :count].tolist() == values[best].tolist()
        assert ranked.top_logits[line, count:].tolist() == [float("-inf")] * (k - count)
        logprobs = (ranked.top_logits[line, :count] - ranked.top_logits[line, 0]) - ranked.log_mass[line]
        torch.testing.assert_close(logprobs, values.log_softmax(dim=0)[best], rtol=1e-6, atol=1e-6)


def test_lines_are_ranked(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _check_ranks(_lines(777, dtype), 20, device)
        # Several blocks of ids.
        _check_ranks(_lines(9001, dtype), 20, device)
        # A vocabulary smaller than what is ranked.
        _check_ranks(_lines(7, dtype), 20, device)
    _check_ranks(_lines(300, torch.float32), 1, device)
    # So large that a log-sum-exp would round what is asked for.
    _check_ranks(_lines(500, torch.float32, scale=300.0), 5, device)
    # Nearly all tie, and some are masked out, a whole block first.
    ties = torch.randint(-1, 2, (len(_POOL_ROWS), 9001)).float()
    ties[:, :4100] = float("-inf")
    _check_ranks(ties, 20, device)
    ties[:, 5:] = float("-inf")
    ties[:, :5] = 1.0
    _check_ranks(ties, 20, device)
    # Zeros of both signs tie.
    _check_ranks(torch.where(torch.rand(len(_POOL_ROWS), 90) < 0.5, 0.0, -0.0), 20, device)
    # Ascending: every block replaces the best of those before it.
    _check_ranks(torch.arange(9001.0).expand(len(_POOL_ROWS), -1) / 100, 20, device)


def test_rows_of_a_larger_buffer_are_ranked(triton_device: torch.device) -> None:
    wide = torch.randn(len(_POOL_ROWS), 100, device=triton_device)
    narrow = _rank(wide[:, 3:90], 4, triton_device)
    asks = [row >= 0 and _ASKED[row] >= 0 for row in _POOL_ROWS]
    expected = wide.cpu()[:, 3:90].topk(4).indices
    assert torch.equal(narrow.top_tokens[: len(_POOL_ROWS)][asks].long(), expected[asks])


def test_emitted_tokens_are_reported(device: torch.device) -> None:
    """Sessions of 12, 1, 3 and 2 rows, of which the third does not ask and the last has emitted nothing."""
    vocab_size, k, most, places = 50, 4, 13, 6
    pool = Pool.allocate(sessions=_SESSIONS, max_len=64, capacity=16, places=1, device=device)
    packed = Packed.allocate(pool, (20, places - 1, most, 20), scrap_slot=0)
    walks = Walks.allocate(pool, sessions=places, most=most)
    rows, starts, counts = [2, 4, 1, 0, -1], [0, 12, 13, 16, 18], [12, 1, 3, 2, 0]
    packed.pool_rows.copy_(torch.tensor(rows))
    packed.query_start.copy_(torch.tensor([*starts, 18]))
    chance = np.random.default_rng(3)
    paths = [sorted(chance.choice(range(1, 12), 10, replace=False).tolist()), [], [1], [], []]
    # The first walk ended at an accepted node; the second emits an id that the model has not got.
    emitted = [chance.integers(0, vocab_size, 10).tolist(), [vocab_size], [3, 4], [], []]
    for number, (row, path, tokens) in enumerate(zip(rows, paths, emitted, strict=True)):
        drafters = chance.integers(0, 256, len(path)) << DRAFTERS_SHIFT
        walks.accepted[number, : len(path)] = torch.from_numpy(drafters + np.array(path, np.int64)).int()
        walks.num_accepted[number], walks.num_emitted[number] = len(path), len(tokens)
        walks.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    logits = torch.randn(18, vocab_size) * 4
    asked = torch.tensor(_ASKED, dtype=torch.int32, device=device)
    pool_rows = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    ranked = Logprobs.allocate(18, k, device)
    its = logits.to(device)
    rank_logits(its, torch.tensor(pool_rows, dtype=torch.int32, device=device), asked, ranked)
    shape = (2, places, most, logprob_words(k))
    reports = torch.full(shape, _UNWRITTEN, dtype=torch.int32, pin_memory=device.type == "cuda")
    for rounds in (2**33, 2**33 + 1):
        before = reports[(rounds + 1) % 2].clone()
        report_logprobs(its, ranked, packed, walks, asked, reports, torch.tensor([rounds], device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(reports[(rounds + 1) % 2], before)
        written = reports[rounds % 2].clone()
        for number, (row, path, tokens) in enumerate(zip(rows, paths, emitted, strict=True)):
            if row < 0 or _ASKED[row] < 0:
                continue
            for place, token in enumerate(tokens):
                line = starts[number] + (path[place - 1] if place else 0)
                logprobs = logits[line].float().log_softmax(dim=0)
                words = written[number, place].clone()
                written[number, place] = _UNWRITTEN
                floats = words.view(torch.float32)
                if token < vocab_size:
                    torch.testing.assert_close(floats[0], logprobs[token], rtol=1e-6, atol=1e-6)
                else:
                    assert floats[0] == float("-inf")
                best = logprobs.topk(k)
                assert words[1 : 1 + k].tolist() == best.indices.tolist()
                torch.testing.assert_close(floats[1 + k :], best.values, rtol=1e-6, atol=1e-6)
        assert (written == _UNWRITTEN).all()


def test_bad_arguments_are_named() -> None:
    pool = Pool.allocate(sessions=2, max_len=8, capacity=4, places=1)
    packed = Packed.allocate(pool, (4, 2, 3, 4), scrap_slot=0)
    walks, ranked = Walks.allocate(pool, sessions=2, most=3), Logprobs.allocate(4, 2)
    logits, rows, asked = torch.zeros(4, 9), torch.zeros(4).int(), torch.zeros(2).int()
    reports, rounds = torch.zeros(2, 2, 3, logprob_words(2)).int(), torch.zeros(1).long()

    def refused(message: str, call: Any, *arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            call(*arguments)

    refused("logits: dtype torch.float64", rank_logits, logits.double(), rows, asked, ranked)
    refused(r"logits: strides \(1, 4\)", rank_logits, torch.zeros(9, 4).T, rows, asked, ranked)
    refused("pool_rows: shape", rank_logits, logits, rows[1:], asked, ranked)
    refused("asked: dtype torch.int64", rank_logits, logits, rows, asked.long(), ranked)
    refused(
        "lines of out: 4 given, at least 5 needed", rank_logits, torch.zeros(5, 9), torch.zeros(5).int(), asked, ranked
    )
    refused("k: 0 given", Logprobs.allocate, 4, 0)
    given = (logits, ranked, packed, walks)
    refused("asked: shape", report_logprobs, *given, asked[1:], reports, rounds)
    refused("reports: shape", report_logprobs, *given, asked, reports[..., 1:], rounds)
    refused("sessions of reports: 1 given", report_logprobs, *given, asked, reports[:, 1:], rounds)
    refused("rounds: dtype torch.int32", report_logprobs, *given, asked, reports, rounds.int())
