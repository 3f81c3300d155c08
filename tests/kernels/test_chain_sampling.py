from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.tensors import recorded

from outrider.kernels.chain_sampling import (
    chain_speculative_sampling,
    chain_speculative_sampling_reference,
    chain_uniforms_reference,
    judge_chains_reference,
)
from outrider.kernels.noise import STREAM_COINS, STREAM_RESIDUAL, philox_uint32


def _given(case: dict[str, Any], rows: int, device: torch.device) -> list[Any]:
    """Draft probabilities, ids and target probabilities of a recorded case, `rows` times."""
    return [
        torch.tensor(case[name], dtype=dtype, device=device).expand(rows, *[-1] * rank).contiguous()
        for name, dtype, rank in (
            ("draft_probs", torch.float32, 2),
            ("draft_token_ids", torch.int64, 1),
            ("target_probs", torch.float32, 2),
        )
    ]


def _random_case(requests: int, drafts: int, vocab_size: int, device: torch.device) -> list[Any]:
    """p and q that often agree, so that chains of every length come out."""
    generator = torch.Generator(device).manual_seed(drafts * 1009 + vocab_size)
    q = torch.rand(requests, drafts, vocab_size, generator=generator, device=device)
    p = torch.rand(requests, drafts + 1, vocab_size, generator=generator, device=device)
    p *= p > 0.3
    p[:, :drafts] += 3 * q * (q > 0.5)
    p /= p.sum(2, keepdim=True)
    q /= q.sum(2, keepdim=True)
    return [q, torch.randint(0, vocab_size, (requests, drafts), generator=generator, device=device), p]


def _lists(verdict: tuple[torch.Tensor, ...]) -> list[list]:
    return [part.tolist() for part in verdict]


def test_recorded_cases(device: torch.device) -> None:
    rows = 2
    certain = [case for case in recorded("chain_speculative_sampling_cases")["cases"] if case["deterministic"]]
    assert len(certain) == 4
    for case in certain:
        tokens, accepted, emitted = chain_speculative_sampling(*_given(case, rows, device), seed=11)
        assert tokens.tolist() == [case["output_law"][0]["tokens"]] * rows, case["name"]
        assert emitted.tolist() == [case["expected_emitted"]] * rows
        assert accepted.tolist() == [case["textbook_independent_accept_expectation"]] * rows
        assert {tokens.dtype, accepted.dtype, emitted.dtype} == {torch.int32}


# The interpreter would take long.
@pytest.mark.parametrize("device", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_recorded_law(device: torch.device, chi_square_p: Callable[..., float]) -> None:
    rows = 20_000
    (case,) = (case for case in recorded("chain_speculative_sampling_cases")["cases"] if not case["deterministic"])
    tokens, accepted, emitted = chain_speculative_sampling(*_given(case, rows, device), seed=12)
    law = {tuple(entry["tokens"]): entry["prob"] for entry in case["output_law"]}
    seen = Counter(map(tuple, tokens.tolist()))
    assert set(seen) <= set(law)
    observed = torch.tensor([seen[outcome] for outcome in law])
    assert chi_square_p(observed, torch.tensor(list(law.values()))) > 1e-4
    assert (
        chi_square_p(emitted.long().cpu().bincount(minlength=3), torch.tensor(case["emitted_draft_count_law"])) > 1e-4
    )
    # Acceptances of 0.4 and 0.5, with the walk's own coins: never fewer accepted than emitted.
    assert (accepted >= emitted).all()
    assert chi_square_p(accepted.long().cpu().bincount(minlength=3), torch.tensor([0.3, 0.5, 0.2])) > 1e-4


# B, S, V: odd sizes, no drafts at all, chains longer than a warp, several blocks of V.
_SMALL = [(1, 0, 1), (3, 1, 2), (5, 3, 7), (2, 40, 111), (2, 2, 9000)]
_LARGE = [(257, 5, 111), (64, 5, 128256), (1, 7, 128256), (33, 3, 32000), (3, 256, 32000)]


def _check_against_reference(case: list[Any]) -> None:
    requests, device = case[0].shape[0], case[0].device
    for seed, offset in (
        (5, None),
        (2**64 - 3, 2**40 + 7),
        (torch.tensor([9]), torch.arange(requests) + 2**33),
        (torch.arange(requests) - 2**62, torch.tensor([-4])),
    ):
        keys = [key.to(device) if isinstance(key, torch.Tensor) else key for key in (seed, offset)]
        found = chain_speculative_sampling(*case, seed=keys[0], offset=keys[1])
        arguments = [*case, seed, 0 if offset is None else offset]
        expected = chain_speculative_sampling_reference(*arguments)
        assert _lists(found) == _lists(expected)


@pytest.mark.parametrize("shape", _SMALL, ids=str)
def test_triton_small_chains(shape: tuple[int, int, int], triton_device: torch.device) -> None:
    case = _random_case(*shape, triton_device)
    _check_against_reference(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*_SMALL, *_LARGE], ids=str)
def test_large_chains(shape: tuple[int, int, int], dtype: torch.dtype, cuda: torch.device) -> None:
    q, ids, p = _random_case(*shape, cuda)
    case = [q.to(dtype), ids.int(), p]
    _check_against_reference(case)


def test_the_random_chains_are_of_every_length() -> None:
    q, ids, p = _random_case(400, 4, 50, torch.device("cpu"))
    assert len(chain_speculative_sampling(q, ids, p, seed=3)[2].unique()) == 5


def test_unknown_ids(device: torch.device) -> None:
    """An id outside [0, V) ends the chain: the final token comes from p there, and nothing later counts."""
    q = torch.full((3, 3, 4), 0.25, device=device)
    p = torch.zeros(3, 4, 4, device=device)
    p[:, 0, 1], p[:, 1, 2], p[:, 2, 0], p[:, 3, 3] = 1, 1, 1, 1
    ids = torch.tensor([[1, -1, 0], [4, 2, 0], [1, 2, 2**31 - 1]], device=device)
    tokens, accepted, emitted = chain_speculative_sampling(q, ids, p, seed=1)
    assert tokens.tolist() == [[1, 2, -1, -1], [1, -1, -1, -1], [1, 2, 0, -1]]
    assert emitted.tolist() == accepted.tolist() == [1, 0, 2]


def test_no_residual(device: torch.device) -> None:
    """p nowhere above q, and yet a rejection (p is not normalised): the token comes from p, and from V - 1 at last."""
    q = torch.tensor([[[1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]], [[0.5, 0.5, 0.0]]], device=device)
    p = torch.tensor([[0.0, 1e-9, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, float("nan")]], device=device)
    p = p[:, None].expand(3, 2, 3)
    ids = torch.zeros(3, 1, dtype=torch.int64, device=device)
    tokens, accepted, emitted = chain_speculative_sampling(q, ids, p, seed=1)
    assert tokens.tolist() == [[1, -1], [2, -1], [2, -1]]
    assert emitted.tolist() == accepted.tolist() == [0, 0, 0]


def test_counters(device: torch.device) -> None:
    case = _random_case(3, 4, 6, device)
    expected = _lists(chain_speculative_sampling(*case, seed=4))
    for dtype in (torch.int32, torch.int64):
        wide = torch.arange(6, dtype=dtype, device=device)
        accepted, emitted = wide[::2], torch.full((3,), 100, dtype=dtype, device=device)
        arguments = [*case, accepted, emitted]
        found = chain_speculative_sampling(*arguments, seed=4)
        assert found[0].tolist() == expected[0]
        assert found[1] is accepted and found[2] is emitted
        assert (accepted - torch.tensor([0, 2, 4], device=device)).tolist() == expected[1]
        assert (emitted - 100).tolist() == expected[2]
        assert wide[1::2].tolist() == [1, 3, 5]
    only = torch.zeros(3, dtype=torch.int64, device=device)
    found = chain_speculative_sampling(*case, maybe_output_emitted_draft_token_num=only, seed=4)
    assert found[2] is only and _lists(found) == expected


def test_strides(device: torch.device) -> None:
    q, ids, p = _random_case(3, 4, 10, device)
    expected = _lists(chain_speculative_sampling(q, ids, p, seed=4))
    wide_q, wide_p = torch.rand(3, 4, 20, device=device), torch.rand(5, 5, 13, device=device)
    wide_ids = torch.full((3, 8), -1, dtype=torch.int32, device=device)
    wide_q[..., ::2], wide_p[2:, :, 3:], wide_ids[:, 1::2] = q, p, ids
    seeds = torch.tensor([4, 0, 4, 0, 4, 0], device=device)
    found = chain_speculative_sampling(wide_q[..., ::2], wide_ids[:, 1::2], wide_p[2:, :, 3:], seed=4)
    assert _lists(found) == expected
    found = chain_speculative_sampling(q, ids, p, seed=seeds[::2])
    assert _lists(found) == _lists(chain_speculative_sampling(q, ids, p, seed=seeds[::2].contiguous()))


def test_rows_with_seeds_of_their_own(device: torch.device) -> None:
    """With B seeds a row's verdict goes with the row; with one seed equal rows are independent."""
    q, ids, p = (tensor.repeat(4, *[1] * (tensor.dim() - 1)) for tensor in _random_case(2, 3, 30, device))
    seeds = torch.arange(8, device=device) * 1000
    order = torch.tensor([5, 2, 7, 0, 1, 4, 3, 6], device=device)
    whole = chain_speculative_sampling(q, ids, p, seed=seeds, offset=17)
    moved = chain_speculative_sampling(q[order], ids[order], p[order], seed=seeds[order], offset=17)
    assert _lists(moved) == [part[order].tolist() for part in whole]
    alone = chain_speculative_sampling(q[6:7], ids[6:7], p[6:7], seed=seeds[6:7], offset=17)
    assert _lists(alone) == [part[6:7].tolist() for part in whole]
    shared = chain_speculative_sampling(q, ids, p, seed=seeds[:1], offset=17)[0]
    assert len(shared[::2].unique(dim=0)) > 1


def test_a_coin_on_the_boundary_rejects() -> None:
    q, p = torch.full((1, 1, 2), 0.5), torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for coin, emitted in ((0.5, 0), (0.5 - 2**-53, 1), (0.0, 1)):
        verdict = judge_chains_reference(q, ids, p, torch.full((1, 1), coin, dtype=torch.float64), torch.zeros(1, 2))
        assert verdict[2].tolist() == [emitted], coin
    # Certain acceptance: the largest coin is below 1.
    verdict = judge_chains_reference(
        q, ids, q.expand(1, 2, 2), torch.full((1, 1), 1 - 2**-53, dtype=torch.float64), torch.zeros(1, 2)
    )
    assert verdict[2].tolist() == [1]


def test_uniforms_are_the_words_of_the_generator() -> None:
    """The formula of the module's docstring, spelled out."""
    seed, offset = 2**63 + 12345, 5 * 2**32 + 99
    key = (seed + 5 * 0x9E3779B97F4A7C15) % 2**64
    key -= 2**64 if key >= 2**63 else 0
    for stream, found in zip(
        (STREAM_COINS, STREAM_RESIDUAL), chain_uniforms_reference(seed, offset, 3, 4), strict=True
    ):
        for row in range(3):
            words = philox_uint32(torch.tensor([key]), torch.tensor([99]), torch.arange(8), stream, row)[0].tolist()
            expected = [((words[2 * i] >> 5) * 2**26 + (words[2 * i + 1] >> 6)) / 2**53 for i in range(4)]
            assert found[row].tolist() == expected


def _rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_streams_of_different_keys_are_independent() -> None:
    """Uniform, and uncorrelated between neighbouring seeds, offsets, positions, rows, and coins and residuals."""
    count = 20_000
    draws = {
        "base": chain_uniforms_reference(7, 0, count, 3)[0],
        "residual": chain_uniforms_reference(7, 0, count, 3)[1],
        "next seed": chain_uniforms_reference(8, 0, count, 3)[0],
        "next offset": chain_uniforms_reference(7, 1, count, 3)[0],
        "high offset": chain_uniforms_reference(7, 2**32, count, 3)[0],
        "offset per row": chain_uniforms_reference(torch.full((count,), 7), torch.arange(count), count, 3)[0],
        "seed per row": chain_uniforms_reference(torch.arange(count), 0, count, 3)[0],
        "next position": chain_uniforms_reference(7, 0, count, 4)[0][:, 1:],
        "next row": chain_uniforms_reference(7, 0, count + 1, 3)[0][1:],
    }
    names = list(draws)
    for i, name in enumerate(names):
        assert abs(float(draws[name].mean()) - 0.5) < 0.006, name
        assert abs(float((draws[name] < 0.1).double().mean()) - 0.1) < 0.006, name
        for other in names[:i]:
            assert abs(_rank_correlation(draws[name], draws[other])) < 0.02, (name, other)
    # What does not enter leaves the stream as it is.
    assert torch.equal(chain_uniforms_reference(7, 0, 5, 9)[0][:, :3], draws["base"][:5])


def test_seeds_come_from_the_generator() -> None:
    case = _random_case(40, 3, 30, torch.device("cpu"))

    def tokens(state: int | None) -> list:
        generator = None if state is None else torch.Generator().manual_seed(state)
        return chain_speculative_sampling(*case, generator=generator)[0].tolist()

    assert tokens(1) == tokens(1) != tokens(2)
    torch.manual_seed(5)
    first = tokens(None)
    assert first != tokens(None)
    torch.manual_seed(5)
    assert first == tokens(None)
    generator = torch.Generator().manual_seed(1)
    drawn = [chain_speculative_sampling(*case, generator=generator)[0].tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]


# torch says once a process that this mode is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_graph_replays_with_new_keys_and_without_waiting(cuda: torch.device) -> None:
    case = _random_case(64, 5, 128256, cuda)
    seeds, offset = torch.arange(64, device=cuda), torch.zeros(1, dtype=torch.int64, device=cuda)
    first = _lists(chain_speculative_sampling(*case, seed=seeds, offset=offset))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in (seeds, 3, None):
            chain_speculative_sampling(*case, seed=seed, offset=offset)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain_speculative_sampling(*case, seed=seeds, offset=offset)
    for step in range(4):
        offset.fill_(step)
        graph.replay()
        assert _lists(replayed) == _lists(chain_speculative_sampling(*case, seed=seeds, offset=step)), step
        assert (_lists(replayed) == first) == (step == 0)
    for _ in range(20):
        assert _lists(chain_speculative_sampling(*case, seed=seeds, offset=0)) == first
    for row in range(0, 64, 7):
        alone: list[Any] = [part[row : row + 1] for part in (*case, seeds)]
        found = chain_speculative_sampling(*alone[:3], seed=alone[3], offset=0)
        assert _lists(found) == [part[row : row + 1] for part in first], row


def test_no_requests_is_no_work() -> None:
    verdict = chain_speculative_sampling(
        torch.zeros(0, 3, 5), torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 4, 5), seed=1
    )
    assert [tuple(part.shape) for part in verdict] == [(0, 4), (0,), (0,)]
