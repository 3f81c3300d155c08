from __future__ import annotations

from random import Random
from typing import Any

import torch
from tests.kernels.tensors import POISON, recorded, strided_columns

from outrider.kernels.draft_inputs import copy_and_expand_eagle_inputs

_ROW_OUTPUTS = ("input_ids", "positions", "is_rejected", "is_masked")


def _expand_expected(given: dict[str, Any]) -> dict[str, list[Any]]:
    """The expanded rows as lists, one part of each request's row after the other."""
    rows: dict[str, list[Any]] = {name: [] for name in (*_ROW_OUTPUTS, "new_token_indices", "hidden_state_mapping")}
    shift, slots, start = given["shift_input_ids"], given["num_padding_slots_per_request"], given["query_start_loc"]
    for request, bonus in enumerate(given["next_token_ids"]):
        first, end, behind = start[request], given["query_end_loc"][request], start[request + 1]
        begin = len(rows["input_ids"])
        kept = given["target_token_ids"][first + shift : end + 1]
        masks, rejected = slots - 1, behind - end - 1
        rows["hidden_state_mapping"] += range(begin, begin + behind - first)
        rows["new_token_indices"] += range(begin + len(kept), begin + len(kept) + slots)
        rows["input_ids"] += [*kept, bonus] + [given["parallel_drafting_token_id"]] * masks
        rows["input_ids"] += [given["padding_token_id"]] * rejected
        position = given["target_positions"][first]
        rows["positions"] += [*range(position, position + len(kept) + slots)] + [0] * rejected
        rows["is_rejected"] += [False] * (len(kept) + slots) + [True] * rejected
        rows["is_masked"] += [False] * (len(kept) + 1) + [True] * masks + [False] * rejected
    return rows


def _expand_outputs(device: torch.device, sizes: list[int]) -> list[torch.Tensor]:
    """Two cells more than needed each, and every other one strided."""
    dtypes = (torch.int64, torch.int32, torch.bool, torch.bool, torch.int32, torch.int64)
    outputs = []
    for place, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        strided = torch.full((2 * size + 4,), POISON, device=device).to(dtype)[::2]
        outputs.append(strided if place % 2 else strided.contiguous())
    return outputs


def _check_expand(device: torch.device, given: dict[str, Any], dtype: torch.dtype) -> dict[str, list[Any]]:
    names = ("target_token_ids", "target_positions", "next_token_ids", "query_start_loc", "query_end_loc")
    columns = strided_columns(device, dtype, *(given[name] for name in names))
    wanted = _expand_expected(given)
    shift = given["shift_input_ids"]
    outputs = _expand_outputs(device, [len(rows) for rows in wanted.values()])
    scalars = ("padding_token_id", "parallel_drafting_token_id", "num_padding_slots_per_request", "shift_input_ids")
    arguments: list[Any] = [*columns, *(given[name] for name in scalars), *outputs]
    copy_and_expand_eagle_inputs(*arguments)
    for output, (name, rows) in zip(outputs, wanted.items(), strict=True):
        poison = [True if output.dtype == torch.bool else POISON]
        untouched = name == "hidden_state_mapping" and not shift
        assert output.tolist() == (poison * len(rows) if untouched else rows) + 2 * poison, name
    return wanted


def test_recorded_cases(device: torch.device) -> None:
    for case in recorded("copy_and_expand_inputs")["cases"]:
        found, expected = _check_expand(device, case["inputs"], torch.int64), case["expected"]
        mapping = expected["hidden_state_mapping"] or found["hidden_state_mapping"]
        names = (*_ROW_OUTPUTS, "new_token_indices")
        assert [found[name] for name in names] == [expected[name] for name in names], case["name"]
        assert found["hidden_state_mapping"] == mapping


def _check_random_expansion(device: torch.device, sizes: list[tuple[int, int]]) -> None:
    """Of (requests, longest query)."""
    random = Random(6)
    for turn, (requests, longest) in enumerate(sizes):
        lengths = [random.randint(1, longest) for _ in range(requests)]
        start = torch.tensor([0, *lengths]).cumsum(0).tolist()
        shift = bool(turn % 2)
        given = {
            "target_token_ids": [random.randrange(50_000) for _ in range(start[-1])],
            "target_positions": [random.randrange(9_000) for _ in range(start[-1])],
            "next_token_ids": [random.randrange(50_000) for _ in range(requests)],
            "query_start_loc": start,
            "query_end_loc": [random.randrange(start[r], start[r + 1]) for r in range(requests)],
            "padding_token_id": 3,
            "parallel_drafting_token_id": -5,
            "num_padding_slots_per_request": random.randint(1, 4),
            "shift_input_ids": shift,
        }
        _check_expand(device, given, (torch.int64, torch.int32)[turn % 3 == 0])


def test_positions_of_nonsense(device: torch.device) -> None:
    """Memory beside the outputs stays as it is, and the call comes back."""
    huge, least = 2**63 - 1, -(2**63)
    tokens = torch.arange(6, device=device)
    wild = [0, huge, -4, least, 90, 3, 50, 6]
    ends = [huge, 5, -8, least, huge, 2, 1]
    start, end = torch.tensor(wild, device=device), torch.tensor(ends, device=device)
    for shift in (False, True):
        memory = torch.full((6, 64), POISON, device=device)
        masks = memory.bool()
        outputs = [memory[0, 20:50], memory[1, 20:50], masks[2, 20:50], masks[3, 20:50], memory[4, 20:34]]
        arguments: list[Any] = [tokens, tokens, tokens.repeat(2)[:7], start, end, 1, 2, 2, shift]
        arguments += [*outputs, memory[5, 20:26]]
        copy_and_expand_eagle_inputs(*arguments)
        for place, width in enumerate((30, 30, 30, 30, 14, 6)):
            row = masks[place] if place in {2, 3} else memory[place]
            assert row[:20].eq(row[0]).all() and row[20 + width :].eq(row[0]).all(), place


def test_expansion(device: torch.device) -> None:
    _check_random_expansion(device, [(1, 1), (2, 3), (3, 40), (5, 9), (1, 700), (2, 500)])


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    batches = [1, 2, 3, 5, 31, 64, 127, 128, 129, 256, 257] * 2
    _check_random_expansion(cuda, [(batch, longest) for batch in batches for longest in (1, 6, 65)])
    _check_random_expansion(cuda, [(1, 20_000), (2, 9_000), (3, 1), (257, 300)])


def test_without_shift_no_mapping_is_needed() -> None:
    rows = torch.zeros(8, dtype=torch.int64)
    masks = rows.bool()
    copy_and_expand_eagle_inputs(
        rows[:5], rows[:5], rows[:2], torch.tensor([0, 3, 5]), torch.tensor([1, 4]), 0, 0, 1, False,
        rows, rows.clone(), masks, masks.clone(), rows[:2].clone(), None,
    )  # fmt: skip
    assert masks.tolist() == [False, False, False, True, False, False, False, False]


def test_no_requests_is_no_work() -> None:
    empty, start = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    rows, masks = torch.full((3,), POISON), torch.ones(3, dtype=torch.bool)
    copy_and_expand_eagle_inputs(
        empty, empty, empty, start, empty, 0, 0, 1, True, rows, rows, masks, masks, empty, empty
    )
    assert rows.tolist() == [POISON] * 3 and masks.all()
