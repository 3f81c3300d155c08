from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from outrider.kernels.draft_inputs import eagle_step_update_slot_mapping_and_metadata

_VECTORS = Path(__file__).parent / "vectors"
_CPU = torch.device("cpu")
_POISON = -7


def _poisoned(size: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full((size,), _POISON, dtype=dtype, device=device)


def _on(device: torch.device, dtype: torch.dtype, *columns: list[Any]) -> list[torch.Tensor]:
    """Columns on a device, int ones of `dtype`, each a strided view of a larger tensor."""
    tensors = [torch.tensor(column, device=device) for column in columns]
    tensors = [tensor if tensor.dtype == torch.bool else tensor.to(dtype) for tensor in tensors]
    return [tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in tensors]


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
    positions, table, lengths = _on(device, dtype, given["positions"], given["block_table"], given["seq_lens"])
    out_positions, slots = _poisoned(requests + 2, device, torch.int32), _poisoned(rows + 3, device)
    arguments: list[Any] = [positions, table, lengths, given["block_size"], given["max_model_len"]]
    arguments += [out_positions, slots, None if rows == requests else rows]
    eagle_step_update_slot_mapping_and_metadata(*arguments)
    found = [out_positions.tolist(), slots.tolist(), lengths.tolist()]
    assert found[0][requests:] == [_POISON] * 2 and found[1][rows:] == [_POISON] * 3
    found = [found[0][:requests], found[1][:rows], found[2]]
    assert found == list(_step_expected(given, rows))
    return found


def test_recorded_cases(device: torch.device) -> None:
    for case in json.loads((_VECTORS / "eagle_step_slot_mapping.json").read_text())["cases"]:
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


def _check_step_in_place(device: torch.device) -> None:
    """The positions may be their own output."""
    positions, lengths, slots = (torch.tensor(column, device=device) for column in ([4, 9], [5, 10], [0, 0]))
    table = torch.tensor([[3, 2], [8, 7]], device=device)
    eagle_step_update_slot_mapping_and_metadata(positions, table, lengths, 5, 10, positions, slots)
    assert positions.tolist() == [5, 0] and lengths.tolist() == [6, 1] and slots.tolist() == [10, -1]


def test_steps() -> None:
    _check_random_steps(_CPU, [1, 2, 3, 130] * 6)
    _check_step_in_place(_CPU)


def test_triton_steps(triton_device: torch.device) -> None:
    _check_random_steps(triton_device, [1, 3, 130, 2, 5, 7])
    _check_step_in_place(triton_device)


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    _check_random_steps(cuda, [1, 2, 3, 5, 31, 64, 127, 128, 129, 256, 257] * 3)


def test_without_requests_only_padding_is_written() -> None:
    empty, table = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64)
    eagle_step_update_slot_mapping_and_metadata(empty, table, empty, 4, 8, empty, empty)
    slots = torch.zeros(2, dtype=torch.int64)
    eagle_step_update_slot_mapping_and_metadata(empty, table, empty, 4, 8, empty, slots, input_batch_size=2)
    assert slots.tolist() == [-1, -1]
