from __future__ import annotations

from random import Random
from typing import Any

import torch
from tests.kernels.tensors import POISON, poisoned, recorded, strided_columns

from outrider.kernels.draft_inputs import (
    QueryMetadata,
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
    extend_all_queries_by_N,
)


def _check_prepare(device: torch.device, drafts: list[int], valid: list[int], start: list[int], dtype: Any) -> Any:
    requests = len(drafts)
    cumulative = torch.tensor(drafts).cumsum(0).tolist()
    columns = strided_columns(device, dtype, cumulative, valid, start)
    rows, rejected = poisoned(requests + 2, device, torch.int32), poisoned(2 * requests + 1, device)
    eagle_prepare_inputs_padded(*[*columns, rows, rejected[::2]])
    wanted = [nd + 1 - valid[request] if nd > 0 else 0 for request, nd in enumerate(drafts)]
    assert rejected[: 2 * requests : 2].tolist() == wanted and rejected[1::2].eq(POISON).all()
    at = [max(start[request + 1] - 1 - wanted[request], start[request]) for request in range(requests)]
    assert rows.tolist() == [*at, POISON, POISON]
    return at, wanted


def test_recorded_inputs(device: torch.device) -> None:
    for case in recorded("eagle_prepare_inputs_padded")["cases"]:
        given, expected = case["inputs"], case["expected"]
        drafts = torch.tensor([0, *given["cu_num_draft_tokens"]]).diff().tolist()
        valid, start = given["valid_sampled_tokens_count"], given["query_start_loc"]
        found = _check_prepare(device, drafts, valid, start, torch.int64)
        assert found == (expected["token_indices_to_sample"], expected["num_rejected_tokens"])


def _check_random_inputs(device: torch.device, sizes: list[int]) -> None:
    random = Random(4)
    for turn, requests in enumerate(sizes):
        drafts = [random.randrange(5) for _ in range(requests)]
        valid = [random.randint(-1, nd + 2) for nd in drafts]
        start = torch.tensor([0, *(nd + 1 for nd in drafts)]).cumsum(0).tolist()
        _check_prepare(device, drafts, valid, start, (torch.int64, torch.int32)[turn % 2])


def _check_next(device: torch.device, given: dict[str, Any], dtype: torch.dtype) -> tuple[list[int], list[int]]:
    requests = len(given["sampled_token_ids"])
    names = ("sampled_token_ids", "discard_mask", "backup_next_token_ids")
    columns = strided_columns(device, dtype, *(given[name] for name in names))
    tokens, counts = poisoned(requests + 2, device, torch.int32), poisoned(2 * requests + 1, device)
    arguments: list[Any] = [*columns, tokens, counts[::2], given["vocab_size"]]
    eagle_prepare_next_token_padded(*arguments)
    wanted_tokens, wanted_counts = [], []
    for row, discard, backup in zip(*(given[name] for name in names), strict=True):
        valid = [] if discard else [token for token in row if 0 <= token < given["vocab_size"]]
        wanted_tokens.append(valid[-1] if valid else backup)
        wanted_counts.append(len(valid))
    assert tokens.tolist() == [*wanted_tokens, POISON, POISON]
    assert counts[: 2 * requests : 2].tolist() == wanted_counts and counts[1::2].eq(POISON).all()
    return wanted_tokens, wanted_counts


def test_recorded_next_tokens(device: torch.device) -> None:
    for case in recorded("eagle_prepare_next_token_padded")["cases"]:
        expected = case["expected"]
        found = _check_next(device, case["inputs"], torch.int64)
        assert found == (expected["next_token_ids"], expected["valid_sampled_tokens_count"])


def _check_random_next(device: torch.device, sizes: list[tuple[int, int]]) -> None:
    random = Random(5)
    for turn, (requests, columns) in enumerate(sizes):
        given = {
            "sampled_token_ids": [[random.randint(-2, 12) for _ in range(columns)] for _ in range(requests)],
            "discard_mask": [random.random() < 0.2 for _ in range(requests)],
            "backup_next_token_ids": [random.randrange(2**31 - 1) for _ in range(requests)],
            "vocab_size": 9,
        }
        _check_next(device, given, (torch.int64, torch.int32)[turn % 2])


def test_recorded_extensions(device: torch.device) -> None:
    for case in recorded("extend_all_queries_by_N")["cases"]:
        given, expected = case["inputs"], case["expected"]
        start, lengths = (torch.tensor(given[name], device=device) for name in ("query_start_loc", "seq_lens"))
        slots = torch.arange(5, device=device)
        sizes = {name: given[name] for name in ("num_actual_tokens", "max_query_len", "max_seq_len")}
        before = QueryMetadata(query_start_loc=start.int(), seq_lens=lengths, slot_mapping=slots, **sizes)
        after = extend_all_queries_by_N(before, given["N"], torch.arange(9, device=device), torch.arange(7).to(device))
        assert after.query_start_loc.tolist() == expected["query_start_loc"]
        assert after.query_start_loc.dtype == torch.int32
        assert after.seq_lens.tolist() == expected["seq_lens"]
        assert {name: getattr(after, name) for name in sizes} == {name: expected[name] for name in sizes}
        assert after.slot_mapping.tolist() == list(range(7))
        assert before.query_start_loc.tolist() == given["query_start_loc"]
        assert before.seq_lens.tolist() == given["seq_lens"]
        assert before.slot_mapping.tolist() == list(range(5))
        assert {name: getattr(before, name) for name in sizes} == sizes


def test_prepared_inputs(device: torch.device) -> None:
    _check_random_inputs(device, [1, 3, 130, 4])


def test_next_tokens(device: torch.device) -> None:
    _check_random_next(device, [(1, 1), (2, 3), (5, 17), (70, 5)])


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    batches = [1, 2, 3, 5, 31, 64, 127, 128, 129, 256, 257] * 2
    _check_random_inputs(cuda, batches)
    _check_random_next(cuda, [(batch, columns) for batch in batches for columns in (1, 2, 5, 65, 257)])


def test_no_requests_is_no_work() -> None:
    empty, rows = torch.zeros(0, dtype=torch.int64), torch.full((3,), POISON)
    eagle_prepare_inputs_padded(empty, empty, torch.zeros(1, dtype=torch.int64), rows, rows)
    eagle_prepare_next_token_padded(torch.zeros(0, 3, dtype=torch.int64), empty.bool(), empty, rows, rows, 9)
    assert rows.tolist() == [POISON] * 3
