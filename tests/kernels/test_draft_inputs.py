"""Inputs of draft heads: recorded cases, the kernels against the references, and positions of nonsense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from tests.kernels.tensors import POISON, recorded, strided_columns

from outrider.kernels.draft_inputs import (
    QueryMetadata,
    copy_and_expand_eagle_inputs,
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
    eagle_step_update_slot_mapping_and_metadata,
    extend_all_queries_by_N,
    prepare_inputs_reference,
    prepare_next_token_reference,
)
from outrider.kernels.drafting.expand_inputs import copy_and_expand_reference
from outrider.kernels.drafting.step_inputs import eagle_step_reference

Given = dict[str, Any]
Arguments = Callable[[Given, list[Any], list[Any]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator and its reference; names are those of recorded cases, sizes those of a case's outputs."""

    recorded: str
    columns: Sequence[str]
    outputs: Sequence[str]
    sizes: Callable[[Given], list[int]]
    draw: Callable[[Random, Any], Given]
    operator: Callable[..., None]
    arguments: Arguments
    reference: Callable[..., None]
    its_arguments: Arguments


def _starts(lengths: list[int]) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def _draw_rejections(random: Random, requests: int) -> Given:
    drafts = [random.randrange(5) for _ in range(requests)]
    return {
        "cu_num_draft_tokens": _starts(drafts)[1:],
        "valid_sampled_tokens_count": [random.randint(-1, nd + 2) for nd in drafts],
        "query_start_loc": _starts([nd + 1 for nd in drafts]),
    }


def _draw_samples(random: Random, size: tuple[int, int]) -> Given:
    requests, columns = size
    return {
        "sampled_token_ids": [[random.randint(-2, 12) for _ in range(columns)] for _ in range(requests)],
        "discard_mask": [random.random() < 0.2 for _ in range(requests)],
        "backup_next_token_ids": [random.randrange(2**31 - 1) for _ in range(requests)],
        "vocab_size": 9,
    }


def _draw_steps(random: Random, requests: int) -> Given:
    blocks = random.randint(1, 9)
    return {
        "positions": [random.randint(-9, random.choice([250, 2**31 - 2])) for _ in range(requests)],
        "block_table": [[random.randrange(1000) for _ in range(blocks)] for _ in range(requests)],
        "seq_lens": [random.randrange(250) for _ in range(requests)],
        "block_size": random.choice([1, 7, 16]),
        "max_model_len": random.randint(1, 200),
        "input_batch_size": requests + random.choice([0, 5, 200]),
    }


def _draw_expansion(random: Random, size: tuple[int, int]) -> Given:
    """Draw inputs of `size`: requests, and tokens of the longest query."""
    start = _starts([random.randint(1, size[1]) for _ in range(size[0])])
    return {
        "target_token_ids": [random.randrange(50_000) for _ in range(start[-1])],
        "target_positions": [random.randrange(9_000) for _ in range(start[-1])],
        "next_token_ids": [random.randrange(50_000) for _ in range(size[0])],
        "query_start_loc": start,
        "query_end_loc": [random.randrange(start[r], start[r + 1]) for r in range(size[0])],
        "padding_token_id": 3,
        "parallel_drafting_token_id": -5,
        "num_padding_slots_per_request": random.randint(1, 4),
        "shift_input_ids": random.random() < 0.5,
    }


def _expanded_sizes(given: Given) -> list[int]:
    requests, rows = len(given["next_token_ids"]), given["query_start_loc"][-1]
    slots = given["num_padding_slots_per_request"]
    return [rows + requests * (slots - given["shift_input_ids"])] * 4 + [requests * slots, rows]


def _sizes(given: Given) -> list[int]:
    return [given["block_size"], given["max_model_len"]]


def _expansion(given: Given) -> list[Any]:
    names = ("padding_token_id", "parallel_drafting_token_id", "num_padding_slots_per_request", "shift_input_ids")
    return [given[name] for name in names]


_OPERATORS = {
    "prepare_inputs": Operator(
        recorded="eagle_prepare_inputs_padded",
        columns=("cu_num_draft_tokens", "valid_sampled_tokens_count", "query_start_loc"),
        outputs=("token_indices_to_sample", "num_rejected_tokens"),
        sizes=lambda given: [len(given["cu_num_draft_tokens"])] * 2,
        draw=_draw_rejections,
        operator=eagle_prepare_inputs_padded,
        arguments=lambda _, columns, outputs: [*columns, *outputs],
        reference=prepare_inputs_reference,
        its_arguments=lambda _, columns, outputs: [columns, outputs],
    ),
    "prepare_next_token": Operator(
        recorded="eagle_prepare_next_token_padded",
        columns=("sampled_token_ids", "discard_mask", "backup_next_token_ids"),
        outputs=("next_token_ids", "valid_sampled_tokens_count"),
        sizes=lambda given: [len(given["sampled_token_ids"])] * 2,
        draw=_draw_samples,
        operator=eagle_prepare_next_token_padded,
        arguments=lambda given, columns, outputs: [*columns, *outputs, given["vocab_size"]],
        reference=prepare_next_token_reference,
        its_arguments=lambda given, columns, outputs: [*columns, given["vocab_size"], outputs],
    ),
    "step": Operator(
        recorded="eagle_step_slot_mapping",
        columns=("positions", "block_table", "seq_lens"),
        outputs=("clamped_positions", "slot_mapping"),
        sizes=lambda given: [len(given["positions"]), given["input_batch_size"]],
        draw=_draw_steps,
        operator=eagle_step_update_slot_mapping_and_metadata,
        arguments=lambda given, columns, outputs: [*columns, *_sizes(given), *outputs, given["input_batch_size"]],
        reference=eagle_step_reference,
        its_arguments=lambda given, columns, outputs: [
            *columns[:2],
            *_sizes(given),
            (columns[2], *outputs),
            given["input_batch_size"],
        ],
    ),
    "expand": Operator(
        recorded="copy_and_expand_inputs",
        columns=("target_token_ids", "target_positions", "next_token_ids", "query_start_loc", "query_end_loc"),
        outputs=("input_ids", "positions", "is_rejected", "is_masked", "new_token_indices", "hidden_state_mapping"),
        sizes=_expanded_sizes,
        draw=_draw_expansion,
        operator=copy_and_expand_eagle_inputs,
        arguments=lambda given, columns, outputs: [*columns, *_expansion(given), *outputs],
        reference=copy_and_expand_reference,
        its_arguments=lambda given, columns, outputs: [columns, *_expansion(given), outputs],
    ),
}


def _written(
    name: str, given: Given, device: torch.device, dtype: torch.dtype, *, reference: bool = False
) -> list[list[Any]]:
    """The columns and the outputs afterwards; outputs have two cells more than needed each, every other one strided."""
    operator = _OPERATORS[name]
    columns = strided_columns(device, dtype, *(given[column] for column in operator.columns))
    outputs = []
    for place, (size, output) in enumerate(zip(operator.sizes(given), operator.outputs, strict=True)):
        kind = torch.bool if output.startswith("is_") else (torch.int32, torch.int64)[place % 2]
        strided = torch.full((2 * size + 4,), POISON, device=device).to(kind)[::2]
        outputs.append(strided if place % 2 else strided.contiguous())
    if reference:
        operator.reference(*operator.its_arguments(given, columns, outputs))
    else:
        operator.operator(*operator.arguments(given, columns, outputs))
    return [tensor.tolist() for tensor in (*columns, *outputs)]


# (operator, case, what it writes)
_EDGES: list[tuple[str, Given, Given]] = [
    # No row before a request's first; of a request without drafts none is rejected.
    ("prepare_inputs",
     {"cu_num_draft_tokens": [2, 2], "valid_sampled_tokens_count": [-1, 0], "query_start_loc": [5, 8, 9]},
     {"token_indices_to_sample": [5, 8], "num_rejected_tokens": [4, 0]}),
    ("prepare_next_token",
     {"sampled_token_ids": [[3, 9]], "discard_mask": [False], "backup_next_token_ids": [7], "vocab_size": 9},
     {"next_token_ids": [3], "valid_sampled_tokens_count": [1]}),
    # Before the first position there is no slot; no request is longer than the model takes.
    ("step",
     {"positions": [-4, 2], "block_table": [[3, 2], [3, 2]], "seq_lens": [1, 9], "block_size": 2, "max_model_len": 9,
      "input_batch_size": 2},
     {"clamped_positions": [-3, 3], "slot_mapping": [-1, 5], "seq_lens": [2, 9]}),
]  # fmt: skip


@pytest.mark.parametrize("name", _OPERATORS)
def test_recorded_cases_and_edges(device: torch.device, name: str) -> None:
    operator = _OPERATORS[name]
    cases = [(case["inputs"], case["expected"]) for case in recorded(operator.recorded)["cases"]]
    cases += [(given, expected) for edge, given, expected in _EDGES if edge == name]
    for given, expected in cases:
        found = dict(
            zip((*operator.columns, *operator.outputs), _written(name, given, device, torch.int64), strict=True)
        )
        for output in operator.outputs:
            poison = [True if output.startswith("is_") else POISON]
            # Without shift the mapping is left alone.
            wanted = expected[output] or poison * (len(found[output]) - 2)
            assert found[output] == wanted + 2 * poison, (given, output)
        if name == "step":
            assert found["seq_lens"] == expected["seq_lens"]


def _check_random(name: str, device: torch.device, sizes: Sequence[Any]) -> None:
    random = Random(4)
    for turn, size in enumerate(sizes):
        given, dtype = _OPERATORS[name].draw(random, size), (torch.int64, torch.int32)[turn % 2]
        expected = _written(name, given, torch.device("cpu"), dtype, reference=True)
        assert _written(name, given, device, dtype) == expected, size


_SMALL: dict[str, Sequence[Any]] = {
    "prepare_inputs": [1, 3, 130, 4],
    "prepare_next_token": [(1, 1), (2, 3), (5, 17), (70, 5)],
    "step": [1, 3, 130, 2, 5, 7],
    "expand": [(1, 1), (2, 3), (3, 40), (5, 9), (1, 700), (2, 500)],
}
_BATCHES = [1, 2, 3, 5, 31, 64, 127, 128, 129, 256, 257]
_LARGE: dict[str, Sequence[Any]] = {
    "prepare_inputs": _BATCHES * 2,
    "prepare_next_token": [(batch, columns) for batch in _BATCHES * 2 for columns in (1, 2, 5, 65, 257)],
    "step": _BATCHES * 3,
    "expand": [
        *((batch, longest) for batch in _BATCHES * 2 for longest in (1, 6, 65)),
        (1, 20_000), (2, 9_000), (3, 1), (257, 300),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", _OPERATORS)
def test_triton_against_the_reference(triton_device: torch.device, name: str) -> None:
    _check_random(name, triton_device, _SMALL[name])


@pytest.mark.parametrize("name", _OPERATORS)
def test_every_size_on_a_gpu(cuda: torch.device, name: str) -> None:
    _check_random(name, cuda, _LARGE[name])


def test_positions_may_be_their_own_output(device: torch.device) -> None:
    positions, lengths, slots = (torch.tensor(column, device=device) for column in ([4, 9], [5, 10], [0, 0]))
    table = torch.tensor([[3, 2], [8, 7]], device=device)
    eagle_step_update_slot_mapping_and_metadata(positions, table, lengths, 5, 10, positions, slots)
    assert positions.tolist() == [5, 0] and lengths.tolist() == [6, 1] and slots.tolist() == [10, -1]


def test_expanded_positions_of_nonsense(device: torch.device) -> None:
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


def test_without_shift_no_mapping_is_needed() -> None:
    rows = torch.zeros(8, dtype=torch.int64)
    masks = rows.bool()
    copy_and_expand_eagle_inputs(
        rows[:5], rows[:5], rows[:2], torch.tensor([0, 3, 5]), torch.tensor([1, 4]), 0, 0, 1, False,
        rows, rows.clone(), masks, masks.clone(), rows[:2].clone(), None,
    )  # fmt: skip
    assert masks.tolist() == [False, False, False, True, False, False, False, False]


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
        # The argument is not changed.
        assert before.query_start_loc.tolist() == given["query_start_loc"]
        assert before.seq_lens.tolist() == given["seq_lens"]
        assert before.slot_mapping.tolist() == list(range(5))


def test_no_requests_is_no_work() -> None:
    empty, start = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    rows, masks, none = torch.full((3,), POISON), torch.ones(3, dtype=torch.bool), torch.zeros(0, 3, dtype=torch.int64)
    eagle_prepare_inputs_padded(empty, empty, start, rows, rows)
    eagle_prepare_next_token_padded(none, empty.bool(), empty, rows, rows, 9)
    copy_and_expand_eagle_inputs(
        empty, empty, empty, start, empty, 0, 0, 1, True, rows, rows, masks, masks, empty, empty
    )
    assert rows.tolist() == [POISON] * 3 and masks.all()
    # A step writes its padding all the same.
    eagle_step_update_slot_mapping_and_metadata(empty, none, empty, 4, 8, empty, rows, input_batch_size=2)
    assert rows.tolist() == [-1, -1, POISON]
    eagle_step_update_slot_mapping_and_metadata(empty, none, empty, 4, 8, empty, empty)
