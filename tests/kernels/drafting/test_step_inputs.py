from __future__ import annotations

from random import Random
from typing import Any

import torch
from tests.kernels.tensors import POISON, poisoned, recorded, strided_columns

from outrider.kernels.draft_inputs import eagle_step_update_slot_mapping_and_metadata


def _step_expected(
    given: dict[str, Any], rows: int
) -> tuple[list[int], list[int], list[int]]:  # positions, slots, lengths
    positions, slots, lengths = [], [-1] * rows, []
    size, most = given["block_size"], given["max_model_len"]
    for request, position in enumerate(given["positions"]):
        new, table = position + 1, given["block_table"][request]
        positions.append(0 if new >= most else new)
        lengths.append(1 if new >= most else min(given["seq_lens"][request] + 1, most))
        if 0 <= new < most:
            slots[request] = table[min(new // size, len(table) - 1)] * size + new % size
    return positions, slots, lengths


def _check_step(device: torch.device, given: dict[str, Any], dtype: torch.dtype = torch.int64) -> list[list[int]]:
    requests, rows = len(given["positions"]), given["input_batch_size"]
    columns = (given[name] for name in ("positions", "block_table", "seq_lens"))
    positions, table, lengths = strided_columns(device, dtype, *columns)
    out_positions, slots = poisoned(requests + 2, device, torch.int32), poisoned(rows + 3, device)
    arguments: list[Any] = [positions, table, lengths, given["block_size"], given["max_model_len"]]
    arguments += [out_positions, slots, None if rows == requests else rows]
    eagle_step_update_slot_mapping_and_metadata(*arguments)
    found = [out_positions.tolist(), slots.tolist(), lengths.tolist()]
    assert found[0][requests:] == [POISON] * 2 and found[1][rows:] == [POISON] * 3
    found = [found[0][:requests], found[1][:rows], found[2]]
    assert found == list(_step_expected(given, rows))
    return found


def test_recorded_cases(device: torch.device) -> None:
    for case in recorded("eagle_step_slot_mapping")["cases"]:
        expected = case["expected"]
        wanted = [expected[name] for name in ("clamped_positions", "slot_mapping", "seq_lens")]
        assert _check_step(device, case["inputs"]) == wanted, case["name"]


def _check_random_steps(device: torch.device, sizes: list[int]) -> None:
    random = Random(3)
    for turn, requests in enumerate(sizes):
        blocks, most = random.randint(1, 9), random.randint(1, 200)
        given = {
            "positions": [random.randint(-9, random.choice([250, 2**31 - 2])) for _ in range(requests)],
            "block_table": [[random.randrange(1000) for _ in range(blocks)] for _ in range(requests)],
            "seq_lens": [random.randrange(250) for _ in range(requests)],
            "block_size": random.choice([1, 7, 16]),
            "max_model_len": most,
            "input_batch_size": requests + random.choice([0, 5, 200]),
        }
        _check_step(device, given, (torch.int64, torch.int32)[turn % 2])


def test_positions_may_be_their_own_output(device: torch.device) -> None:
    positions, lengths, slots = (torch.tensor(column, device=device) for column in ([4, 9], [5, 10], [0, 0]))
    table = torch.tensor([[3, 2], [8, 7]], device=device)
    eagle_step_update_slot_mapping_and_metadata(positions, table, lengths, 5, 10, positions, slots)
    assert positions.tolist() == [5, 0] and lengths.tolist() == [6, 1] and slots.tolist() == [10, -1]


def test_steps(device: torch.device) -> None:
    _check_random_steps(device, [1, 3, 130, 2, 5, 7])


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    _check_random_steps(cuda, [1, 2, 3, 5, 31, 64, 127, 128, 129, 256, 257] * 3)


def test_without_requests_only_padding_is_written() -> None:
    empty, table = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
    eagle_step_update_slot_mapping_and_metadata(empty, table, empty, 4, 8, empty, empty)
    slots = torch.zeros(2, dtype=torch.int64)
    eagle_step_update_slot_mapping_and_metadata(empty, table, empty, 4, 8, empty, slots, input_batch_size=2)
    assert slots.tolist() == [-1, -1]
