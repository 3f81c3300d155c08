from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels import noise
from outrider.kernels.coupled_sampling import (
    coupled_choice,
    coupled_choice_reference,
    coupled_topk,
    coupled_topk_scored,
    coupled_topk_scored_reference,
)
from outrider.kernels.sampling import coupled_kernels as coupled_sampling_kernels
from outrider.kernels.sampling.row_arguments import checked_rows

# Arguments by name; Any, as they are also taken apart, replaced and left out.
Columns = dict[str, Any]


def _columns(logits: torch.Tensor, **changes: float | torch.Tensor) -> Columns:
    """Arguments for `logits` [T, V]: temperature 1 and no filters unless changed; a number stands for every row."""
    rows = logits.shape[0]
    columns: Columns = {
        "logits": logits,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,)),
        "positions": torch.randint(0, 10_000, (rows,)),
        "temperature": torch.ones(rows),
        "top_k": torch.zeros(rows, dtype=torch.int32),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
    }
    for name, value in changes.items():
        before = columns.get(name)
        if isinstance(value, torch.Tensor) or before is None:
            columns[name] = torch.as_tensor(value)
        else:
            columns[name] = torch.full_like(before, value)
    return columns


def _support(logits: torch.Tensor, columns: Columns, row: int) -> torch.Tensor:
    """The filtered, renormalised law of one row in float64, from the definitions, [V]."""
    temperature, top_k, top_p, min_p = (
        float(columns[name][row]) for name in ("temperature", "top_k", "top_p", "min_p")
    )
    law = torch.softmax(logits.double() / temperature, dim=-1)
    if 0 < top_k < len(law):
        law = torch.where(law >= law.sort(descending=True).values[int(top_k) - 1], law, 0.0)
        law = law / law.sum()
    if top_p < 1:
        ordered = law.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        # The smallest set that reaches top_p: all tokens before which less than top_p has been gathered.
        smallest = ordered[max(int((before < top_p - 1e-12).sum()) - 1, 0)]
        law = torch.where(law >= smallest, law, 0.0)
    if min_p > 0:
        law = torch.where(law >= min_p * law.max() * (1 - 1e-7), law, 0.0)
    return law / law.sum()


def _mixed(vocab_size: int, ties: bool) -> Columns:
    """One row for each way of choosing, greedy ones between them."""
    temperature = [0.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.05, 2.0, 0.0, 0.7]
    logits = torch.randn(len(temperature), vocab_size) * 3
    return _columns(
        (logits * 2).round() / 2 if ties else logits,
        temperature=torch.tensor(temperature),
        top_k=torch.tensor([0, 0, -1, 3, 0, 5, 0, 0, vocab_size, 3, 1]),
        top_p=torch.tensor([1, 1, 1, 1, 0.7, 0.8, 0.93, 1, 0.3, 0.2, 0.0]),
        min_p=torch.tensor([0, 0, 0, 0, 0, 0, 0.1, 0, 0.05, 0, 0]),
    )


def _rows(columns: Columns, **more: torch.Tensor | None):
    return checked_rows(**{"logit_bias": None, "choice_index": None, **columns, **more})


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 300])
@pytest.mark.parametrize("ties", [False, True])
def test_topk_ranks_the_support_by_log_probability_plus_noise(vocab_size: int, ties: bool) -> None:
    for _ in range(5):
        columns = _mixed(vocab_size, ties)
        k = min(vocab_size, 4)
        tokens, log_q, scores = coupled_topk_scored(**columns, k=k)
        logits = columns["logits"]
        gumbel = noise.gumbel_noise(columns["seeds"], columns["positions"], vocab_size)
        for row in range(logits.shape[0]):
            greedy = float(columns["temperature"][row]) == 0
            law = torch.softmax(logits[row].double(), 0) if greedy else _support(logits[row], columns, row)
            score = law.log() if greedy else law.log() + gumbel[row].double()
            ranked = sorted(range(vocab_size), key=lambda token, score=score: (-float(score[token]), token))
            wanted = [token if law[token] > 0 else -1 for token in ranked[:k]]
            assert tokens[row].tolist() == wanted, row
            present = [token for token in wanted if token >= 0]
            # z is a float32: at tiny temperatures it is large, and what is added to it rounds accordingly.
            scale = 1.0 if greedy else 1 / float(columns["temperature"][row])
            tolerance = max(1e-4, float(logits[row].abs().max()) * scale * 2**-22)
            for found, wanted_values in ((log_q, law.log()), (scores, score)):
                torch.testing.assert_close(
                    found[row, : len(present)].double(), wanted_values[present], rtol=1e-4, atol=tolerance
                )
            assert (log_q[row, len(present) :] == -math.inf).all() and (scores[row, len(present) :] == -math.inf).all()


def test_choice_is_the_first_of_the_topk() -> None:
    columns = _mixed(50, ties=False)
    tokens, log_q = coupled_topk(**columns, k=3)
    assert torch.equal(coupled_choice(**columns), tokens[:, 0])
    assert log_q.shape == (11, 3)


def test_greedy_ties_go_to_the_smallest_id() -> None:
    columns = _columns(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]), temperature=0.0)
    assert coupled_choice(**columns).tolist() == [1]
    assert coupled_topk(**columns, k=5)[0].tolist() == [[1, 2, 4, 3, 0]]


@pytest.mark.parametrize("temperature", [1e-9, 1e-40])
def test_vanishing_temperatures_are_greedy(temperature: float) -> None:
    columns = _columns(torch.randn(50, 20), temperature=temperature)
    assert torch.equal(coupled_choice(**columns), columns["logits"].argmax(dim=-1))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.45}, {0, 1, 2}),
        ({"top_p": 0.40}, {0}),
        ({"top_p": 0.0}, {0}),
        ({"top_k": 3, "top_p": 0.45}, {0}),
        ({"top_k": 1, "top_p": 0.9999}, {0}),
        ({"min_p": 0.49}, {0, 1, 2}),
        ({"min_p": 0.51}, {0}),
        ({"top_p": 0.9, "min_p": 0.2}, {0, 1, 2, 3}),
    ],
)
def test_ties_at_a_threshold_are_kept(filters: dict[str, float], kept: set[int]) -> None:
    law = torch.tensor([0.42, 0.21, 0.21, 0.1, 0.06])
    columns = _columns(law.log().expand(400, 5), **filters)
    assert set(coupled_choice(**columns).tolist()) == kept


def test_same_seed_and_position_same_choice_wherever_the_row_stands() -> None:
    columns = _mixed(64, ties=False)
    chosen = coupled_choice(**columns)
    order = torch.randperm(len(chosen))[:7]
    taken = {name: column[order] for name, column in columns.items() if column is not None}
    assert torch.equal(coupled_choice(**taken), chosen[order])
    for row in range(len(chosen)):
        single = {name: column[row : row + 1] for name, column in columns.items() if column is not None}
        assert coupled_choice(**single).tolist() == [int(chosen[row])]


def test_bias_and_dtype_and_choice_index() -> None:
    columns = _mixed(30, ties=False)
    logits = columns["logits"]
    bias = torch.randn_like(logits)
    merged = {**columns, "logits": logits + bias}
    before = logits.clone()
    assert torch.equal(
        coupled_topk(**columns, logit_bias=bias, k=4)[0],
        coupled_topk(**merged, k=4)[0],
    )
    assert torch.equal(logits, before)
    half = {**columns, "logits": logits.bfloat16()}
    full = {**columns, "logits": logits.bfloat16().float()}
    assert torch.equal(coupled_topk(**half, k=4)[0], coupled_topk(**full, k=4)[0])
    flat = _columns(torch.zeros(64, 16), seeds=torch.full((64,), 5), positions=torch.full((64,), 9))
    assert len(set(coupled_choice(**flat).tolist())) == 1
    several = coupled_choice(**flat, choice_index=torch.arange(64))
    assert len(set(several.tolist())) > 8


def test_forbidden_tokens_are_never_chosen() -> None:
    logits = torch.full((200, 9), -math.inf)
    logits[:, 4], logits[:, 6] = 0.0, -30.0
    columns = _columns(logits, top_k=5, top_p=0.99)
    assert set(coupled_choice(**columns).tolist()) == {4}
    tokens, log_q, scores = coupled_topk_scored(**_columns(logits), k=3)
    assert (tokens == torch.tensor([4, 6, -1])).all()
    assert (log_q[:, 2] == -math.inf).all() and (scores[:, :2] > -math.inf).all()
    nothing = coupled_topk_scored(**_columns(torch.full((2, 3), -math.inf), top_p=0.5), k=2)
    assert (nothing[0] == -1).all()


def _few_allowed(allowed: int) -> Columns:
    """Rows that allow fewer tokens than top_k, of which top_p keeps the best only, or the best two."""
    logits = torch.full((2, 90), -math.inf)
    logits[:, 90 - allowed :] = torch.arange(allowed) * 0.5
    return _columns(logits, top_k=torch.tensor([70, 80]), top_p=torch.tensor([0.1, 0.6]))


def test_top_p_holds_where_fewer_tokens_are_allowed_than_top_k() -> None:
    tokens = coupled_topk(**_few_allowed(40), k=3)[0]
    assert tokens[0].tolist() == [89, -1, -1]
    assert set(tokens[1].tolist()) == {89, 88, -1}


def test_odd_logits_never_leave_the_vocabulary() -> None:
    logits = torch.randn(6, 12)
    logits[0, 3], logits[1, 4], logits[2] = math.nan, math.inf, math.nan
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
        chosen = coupled_choice(**_columns(logits, **filters))
        assert ((chosen >= 0) & (chosen < 12)).all()


def test_empty_batch() -> None:
    columns = _columns(torch.zeros(0, 5))
    assert coupled_choice(**columns).shape == (0,)
    assert coupled_topk(**columns, k=2)[0].shape == (0, 2)


def _check_triton(columns: Columns, device: torch.device, k: int, **more: torch.Tensor) -> None:
    """Holds Triton to the reference on equal tokens, where scores differ by more than rounding.

    Logarithms differ in their last bit between devices, and so may the order of scores closer than that. Tokens of
    probability below 1e-5 are left out: whether top_p = 0.999999 keeps them may hang on the last bit of a mass.
    """
    moved = {name: column.to(device) for name, column in {**columns, **more}.items() if column is not None}
    rows = _rows(columns, **more)
    expected = coupled_topk_scored_reference(rows, min(k + 1, columns["logits"].shape[1]))
    found = [column.cpu() for column in coupled_topk_scored(**moved, k=k)]
    # z may be large, and what is added to it rounds accordingly.
    scale = columns["logits"].float().abs().nan_to_num(posinf=0.0).amax(dim=1) / columns["temperature"].clamp(min=0.05)
    close = 1e-5 + scale * 2**-21
    gaps = (expected[2][:, :-1] - expected[2][:, 1:]).nan_to_num(nan=1.0, posinf=1.0) < close[:, None]
    near = torch.nn.functional.pad(gaps, (1, 1))
    counts = (expected[1][:, :k] > math.log(1e-5)) & ~(near[:, :-1] | near[:, 1:])[:, :k]
    assert torch.equal(found[0][counts], expected[0][:, :k][counts])
    for have, want in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(have[counts], want[:, :k][counts], rtol=1e-4, atol=float(1e-4 + 4 * close.max()))
    chosen, wanted = coupled_choice(**moved).cpu(), coupled_choice_reference(rows)
    assert torch.equal(chosen[counts[:, 0]], wanted[counts[:, 0]])
    # Few rows may be left out for that: one of a handful, as greedy rows may tie.
    assert counts[:, 0].sum() >= 0.9 * (expected[2][:, 0] > -math.inf).sum() - 1


@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (64, 3)])
def test_triton_choices_equal_the_reference(triton_device: torch.device, vocab_size: int, k: int) -> None:
    columns = _mixed(vocab_size, ties=vocab_size == 64)
    _check_triton(columns, triton_device, k)


def test_triton_bias_choice_index_dtypes_and_strides(triton_device: torch.device) -> None:
    columns = _mixed(40, ties=False)
    rows = columns["seeds"].shape[0]
    bias = torch.randn(40, rows).t()
    wide = torch.randn(rows, 80)[:, ::2]
    _check_triton({**columns, "logits": wide}, triton_device, 4, logit_bias=bias, choice_index=torch.arange(rows))
    one_row = torch.randn(1, 40).half().expand(rows, -1)
    _check_triton({**columns, "logits": one_row}, triton_device, 4)


@pytest.mark.parametrize("few", [16, 64])
def test_triton_fewer_allowed_tokens_than_top_k(
    triton_device: torch.device, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_sizes(monkeypatch, _FEW=few)
    _check_triton(_few_allowed(40), triton_device, 3)


@pytest.mark.parametrize(("places", "few"), [(64, 16), (1024, 16), (1024, 256)])
def test_triton_ties_go_to_the_smallest_id(
    triton_device: torch.device, places: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, in which nothing but the order of ids decides: the whole row in blocks, and two kinds of lists."""
    _set_sizes(monkeypatch, _LIST=places, _FEW=few)
    columns = _columns(torch.randn(2, 150).round().clamp(max=0), temperature=0.0)
    moved = {name: column.to(triton_device) for name, column in columns.items()}
    assert torch.equal(coupled_topk(**moved, k=5)[0].cpu(), coupled_topk_scored_reference(_rows(columns), 5)[0])
    assert torch.equal(coupled_choice(**moved).cpu(), coupled_choice_reference(_rows(columns)))


def _every_route(vocab_size: int) -> Columns:
    """Rows that drive a short list and small tiles through most parts of the Triton side.

    In turn: no filters (tiles near the largest score); greedy with ties; top-k by the tiles' largest logits; top-k too
    wide for that, and a nucleus, by a sample; a nucleus and a top_k that no list holds; a row of equal logits; fewer
    allowed tokens than top_k; a logit beyond reckoning.
    """
    logits = torch.randn(11, vocab_size) * 3
    logits[1] = (logits[1] / 3).round()
    logits[6:8] /= 30
    logits[8] = 1.5
    logits[9, : vocab_size - 40] = -math.inf
    logits[10, 5] = 2e6
    return _columns(
        logits,
        temperature=torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 1.0, 2.0]),
        top_k=torch.tensor([0, 0, 3, 30, 0, 40, 0, 150, 0, 50, 7]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.8, 0.9, 0.9, 0.5, 0.95, 0.6, 0.3, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0]),
    )


def _flat_rows(vocab_size: int) -> Columns:
    """Rows most of which is kept for certain: only the edge of the nucleus is listed, and of the rest the best."""
    logits = torch.randn(3, vocab_size) / 5
    top_p, min_p = torch.tensor([0.5, 0.7, 1.0]), torch.tensor([0.0, 0.3, 0.6])
    return _columns(logits, top_p=top_p, min_p=min_p)


def _misleading_rows(vocab_size: int, sample: int) -> Columns:
    """Rows whose every sampled logit is far below the others (first two), or above them."""
    chunks = torch.arange(sample // 8) * (vocab_size // 8) // (sample // 8)
    sampled = (chunks[:, None] * 8 + torch.arange(8)).flatten()
    logits = torch.randn(3, vocab_size)
    logits[:2, sampled] -= 20
    logits[2, sampled] += 9
    return _columns(logits, top_p=torch.tensor([0.7, 1.0, 0.9]), top_k=torch.tensor([0, 60, 0]))


def _set_sizes(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(coupled_sampling_kernels, name, value)


def test_triton_outcome_does_not_depend_on_lists(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_sizes(monkeypatch, _LIST=64, _FEW=32, _TILE=64, _SAMPLE=256)
    _check_triton(_every_route(240), triton_device, 3)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_triton_odd_logits_end_within_the_vocabulary(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of NaN, with NaN, infinities and the largest numbers, under every filter: a token of the row, or none."""
    _set_sizes(monkeypatch, _LIST=64, _FEW=16, _TILE=32, _SAMPLE=64)
    odd = torch.randn(5, 90)
    odd[0], odd[1, ::7], odd[2, 3], odd[3, 9], odd[4, :2] = math.nan, math.nan, math.inf, 3e38, -3e38
    columns = _columns(
        odd.repeat_interleave(4, dim=0),
        temperature=torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(5),
        top_k=torch.tensor([0, 40, 0, 0]).repeat(5),
        top_p=torch.tensor([1.0, 0.9, 0.5, 1.0]).repeat(5),
    )
    moved = {name: column.to(triton_device) for name, column in columns.items()}
    with np.errstate(all="ignore"):
        chosen = coupled_choice(**moved).cpu()
        tokens = coupled_topk(**moved, k=2)[0].cpu()
    assert ((chosen >= 0) & (chosen < 90)).all()
    assert ((tokens >= -1) & (tokens < 90)).all()
    assert (chosen[8:12] == 3).all()


def test_triton_flat_rows_list_their_edge(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_sizes(monkeypatch, _LIST=2048)
    _check_triton(_flat_rows(6000), triton_device, 2)


@pytest.mark.parametrize("few", [32, 128])
def test_triton_a_misleading_sample_costs_nothing_but_time(
    triton_device: torch.device, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_sizes(monkeypatch, _LIST=128, _FEW=few, _TILE=64, _SAMPLE=64)
    _check_triton(_misleading_rows(520, 64), triton_device, 2)


def test_cuda_choices_replay_from_a_graph(cuda: torch.device) -> None:
    columns = {name: column.cuda() for name, column in _mixed(1000, ties=False).items() if column is not None}
    coupled_topk_scored(**columns, k=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = coupled_topk_scored(**columns, k=4)
    columns["logits"].normal_()
    columns["positions"].add_(1)
    graph.replay()
    for have, want in zip(replayed, coupled_topk_scored(**columns, k=4), strict=True):
        assert torch.equal(have, want)


def _any_filters(logits: torch.Tensor, index_dtype: torch.dtype = torch.int64) -> Columns:
    """Arguments with filters drawn at random, their extremes among them."""
    rows, vocab_size = logits.shape

    def drawn(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,))]

    return _columns(
        logits,
        temperature=drawn([0.0, 0.3, 1.0, 1.0, 2.0]),
        top_k=drawn([0, 0, -1, 1, 2, 50, 300, 2000, vocab_size - 1, vocab_size]).to(index_dtype),
        top_p=drawn([1.0, 1.0, 0.0, 1e-6, 0.5, 0.9, 0.99, 0.999999]),
        min_p=drawn([0.0, 0.0, 0.0, 0.05, 1.0]),
        positions=torch.randint(0, 2**31, (rows,)).to(index_dtype),
    )


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (257, 3), (64, 111), (7, 32_000), (33, 32_001), (5, 300_000)])
@pytest.mark.parametrize("kind", ["plain", "ties", "strided"])
def test_cuda_random_rows_equal_the_reference(rows: int, vocab_size: int, kind: str, cuda: torch.device) -> None:
    logits = torch.randn(rows, vocab_size) * float(torch.tensor([0.3, 1.0, 3.0, 8.0])[torch.randint(0, 4, ())])
    if kind == "ties":
        logits = logits.bfloat16().float()
    if kind == "strided":
        logits = torch.stack([logits, -logits], dim=-1)[..., 0]
        assert logits.stride(1) == 2
    columns = _any_filters(logits, torch.int32 if kind == "ties" else torch.int64)
    _check_triton(columns, cuda, min(vocab_size, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_full_vocabulary_by_every_route(dtype: torch.dtype, cuda: torch.device) -> None:
    columns = _every_route(128_256)
    columns["logits"] = columns["logits"].to(dtype)
    columns["top_k"] = torch.tensor([0, 0, 50, 1000, 0, 3000, 0, 50_000, 0, 50, 7])
    _check_triton(columns, cuda, 8)
    _check_triton(_flat_rows(128_256), cuda, 8)
    _check_triton(_misleading_rows(128_256, 4096), cuda, 8)


def test_cuda_same_bits_run_to_run_and_wherever_a_row_stands(cuda: torch.device) -> None:
    columns = {name: column.to(cuda) for name, column in _any_filters(torch.randn(70, 50_000) * 2).items()}
    first = coupled_topk_scored(**columns, k=5)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(first, coupled_topk_scored(**columns, k=5), strict=True))
    order = torch.randperm(70, device=cuda)[:23]
    part = coupled_topk_scored(**{name: column[order] for name, column in columns.items()}, k=5)
    assert all(torch.equal(whole[order], taken) for whole, taken in zip(first, part, strict=True))
    assert torch.equal(coupled_choice(**columns), first[0][:, 0].clamp(min=0))
