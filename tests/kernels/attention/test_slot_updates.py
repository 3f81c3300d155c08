from __future__ import annotations

import torch

from outrider.kernels.attention.slot_updates import gather_paths, gather_slot_rows, store_positions


def _ints(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _inside(size: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of zeros with wide margins of -9 around it, and all of it."""
    surrounding = torch.full((size[0] + 4, size[1] + 8), -9, dtype=torch.int32, device=device)
    inner = surrounding[2:-2, 4:-4]
    inner.zero_()
    return inner, surrounding


def _check_gather(device: torch.device) -> None:
    table = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)[:, 1:9]
    out, surrounding = _inside((6, 5), device)
    gather_slot_rows(table, _ints([3, 0, 4, -1, 1, 2], device), _ints([2, 100, 3, 3, -5, 0], device), out)
    assert out.tolist() == [[31, 32, 0, 0, 0], [1, 2, 3, 4, 5], *([0] * 5 for _ in range(4))]
    assert int((surrounding == -9).sum()) == surrounding.numel() - out.numel()


def _check_positions(device: torch.device) -> None:
    surrounding = torch.full((14,), -9, dtype=torch.int32, device=device)
    slots = _ints([3, -1, 6, 0, 2**40, 5], device, torch.int64)
    store_positions(surrounding[4:10], slots, _ints([7, 8, 9, 10, 11, 12], device))
    assert surrounding.tolist() == [-9] * 4 + [10, -9, -9, 7, -9, 12] + [-9] * 4


def _check_paths(device: torch.device) -> None:
    table = torch.arange(300, dtype=torch.int32, device=device).view(3, 100)
    masks = [[0b1, 0], [0b1011, 0], [-(2**63) + 1, 0b101], [0b1111, 0], [0, 0], [-1, -1], [0b11, 0]]
    # The third row's path goes beyond the first word, the fourth's beyond its session's keys, the sixth has no session.
    mask, sessions = torch.tensor(masks, device=device), _ints([0, 0, 1, 2, 0, -1, 3], device)
    out = torch.full((7, 128), 7, dtype=torch.int32, device=device)
    gather_paths(table, sessions, _ints([4, 20, 97], device), _ints([9, 90, 99], device), mask, out)
    found = [[slot for slot in row if slot >= 0] for row in out.tolist()]
    assert found == [[4], [4, 5, 7], [120, 183, 184, 186], [297, 298], [], [], []]
    assert all(row[: len(slots)] == slots for row, slots in zip(out.tolist(), found, strict=True))


def test_each_operator(device: torch.device) -> None:
    for check in (_check_gather, _check_positions, _check_paths):
        check(device)


def test_long_rows(triton_device: torch.device) -> None:
    table = torch.randint(0, 1000, (3, 2500), dtype=torch.int32, device=triton_device)
    out = torch.full((2, 2300), -9, dtype=torch.int32, device=triton_device)
    gather_slot_rows(table, _ints([2, 0], triton_device), _ints([2100, 3], triton_device), out)
    assert torch.equal(out[0, :2100], table[2, :2100])
    assert torch.equal(out[1, :3], table[0, :3])
    assert (out[0, 2100:] == -9).all() and (out[1, 3:] == -9).all()


def test_changed_rows_replay_from_a_graph(cuda: torch.device) -> None:
    table, out = (torch.zeros(count, 9000, dtype=torch.int32, device=cuda) for count in (257, 256))
    sessions = torch.randperm(256, device=cuda).int()
    key_len = torch.full((256,), 9000, dtype=torch.int32, device=cuda)
    gather_slot_rows(table, sessions, key_len, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_slot_rows(table, sessions, key_len, out)
    for _ in range(5):
        table.random_(1, 10**6)
        graph.replay()
        assert torch.equal(out, table[sessions.long()])
