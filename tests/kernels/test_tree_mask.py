from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.kernels.tensors import POISON, poisoned, recorded

from outrider.kernels.tree_mask import reconstruct_indices_from_tree_mask, reconstruct_reference, segment_packbits

# Columns are given as lists, whose lengths no type tells.
reconstruct: Any = reconstruct_indices_from_tree_mask
pack_bits: Any = segment_packbits


def _outputs(requests: int, nodes: int, device: torch.device, dtype: torch.dtype = torch.int64) -> list[torch.Tensor]:
    return [poisoned((requests, nodes), device, dtype) for _ in range(4)]


def _expected(mask: torch.Tensor, lengths: torch.Tensor) -> list[list[list[int]]]:
    """Positions, rows, first children and next siblings of masks [bs, n, n] by the reference."""
    outputs = _outputs(len(mask), mask.shape[1], torch.device("cpu"))
    reconstruct_reference(mask.flatten(), lengths, outputs)
    return [output.tolist() for output in outputs]


def _forest_masks(generator: torch.Generator, requests: int, nodes: int) -> torch.Tensor:
    """Masks of trees, some of whose nodes have no parent at all (a second root)."""
    mask = torch.eye(nodes, dtype=torch.bool).repeat(requests, 1, 1)
    for request in range(requests):
        for node in range(1, nodes):
            if float(torch.rand((), generator=generator)) < 0.7:
                parent = int(torch.randint(0, node, (), generator=generator))
                mask[request, node] |= mask[request, parent]
    return mask


def test_recorded_cases(device: torch.device) -> None:
    for case in recorded("reconstruct_indices_from_tree_mask")["cases"]:
        given, expected = case["inputs"], case["expected"]
        requests, nodes = given["bs"], given["draft_token_num"]
        mask = torch.tensor(given["tree_mask"], device=device).bool()
        outputs = _outputs(requests, nodes, device)
        lengths = torch.tensor(given["verified_seq_len"], device=device)
        reconstruct(mask, lengths, outputs[0].view(-1), *outputs[1:], requests, nodes)
        names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        assert outputs[0].flatten().tolist() == expected["positions"]
        assert [output.tolist() for output in outputs[1:]] == [expected[name] for name in names]
    for case in recorded("segment_packbits")["cases"]:
        y = torch.full((len(case["expected"]["y"]) + 3,), 99, dtype=torch.uint8, device=device)
        pointers = [
            torch.tensor(column, device=device) for column in (case["input_indptr"], case["expected"]["output_indptr"])
        ]
        pack_bits(torch.tensor(case["x"], device=device).bool(), *pointers, y, len(case["input_indptr"]) - 1)
        assert y.tolist() == [*case["expected"]["y"], 99, 99, 99]


def _check_masks(
    device: torch.device,
    sizes: list[tuple[int, int]],
    dtypes: tuple[torch.dtype, ...] = (torch.int64, torch.int32),
) -> None:
    """Masks of forests and masks of noise, of (nodes, requests)."""
    generator = torch.Generator().manual_seed(5)
    for turn, (nodes, requests) in enumerate(sizes):
        noise = torch.rand(requests, nodes, nodes, generator=generator) < 0.2
        for mask in (_forest_masks(generator, requests, nodes), noise):
            lengths = torch.randint(0, 99, (requests,), generator=generator)
            dtype = dtypes[turn % len(dtypes)]
            outputs = _outputs(requests, nodes, device, dtype)
            reconstruct(mask.to(device), lengths.to(device, dtype), *outputs, requests, nodes)
            found = [output.tolist() for output in outputs]
            assert found == _expected(mask, lengths), (nodes, requests)


def test_strides_and_larger_buffers(device: torch.device) -> None:
    """Strided inputs and outputs, and buffers larger than needed, of which nothing more is written."""
    mask = _forest_masks(torch.Generator().manual_seed(1), 2, 6)
    want = _expected(mask, torch.tensor([5, 9]))
    wide = mask.flatten().to(device).repeat_interleave(2)[::2]
    lengths = torch.tensor([5, 9, 1], device=device).repeat_interleave(3)[::3]
    positions = poisoned(30, device)
    links = [poisoned((4, 16), device, torch.int32) for _ in range(3)]
    reconstruct(wide, lengths, positions[::2], *(link[:, ::2] for link in links), 2, 6)
    assert positions[:24:2].view(2, 6).tolist() == want[0]
    assert positions[1::2].eq(POISON).all() and positions[24:].eq(POISON).all()
    for link, rows in zip(links, want[1:], strict=True):
        assert link[:2, :12:2].tolist() == rows
        assert link[2:].eq(POISON).all() and link[:, 1::2].eq(POISON).all() and link[:, 12:].eq(POISON).all()


def _check_segments(device: torch.device, lengths: list[int], dtype: torch.dtype = torch.int64) -> None:
    """Segments of these lengths, with gaps between them on both sides, against numpy's packbits."""
    generator = torch.Generator().manual_seed(len(lengths))
    for x_dtype, high in ((torch.bool, 2), (torch.uint8, 4)):
        x = torch.randint(0, high, (sum(lengths) + 8,), generator=generator).to(x_dtype)
        begin = torch.tensor([3, *lengths]).cumsum(0)
        first = torch.tensor([2, *(-(-length // 8) for length in lengths)]).cumsum(0)
        y = torch.full((int(first[-1]) + 5,), 170, dtype=torch.uint8, device=device)
        want = y.cpu().numpy().copy()
        for segment in range(len(lengths)):
            bits = x[int(begin[segment]) : int(begin[segment + 1])].numpy() != 0
            want[int(first[segment]) : int(first[segment + 1])] = np.packbits(bits, bitorder="little")
        pack_bits(x.to(device), begin.to(device, dtype), first.to(device, dtype), y, len(lengths))
        assert y.tolist() == want.tolist(), lengths


def test_wild_segments(device: torch.device) -> None:
    """Index arrays of nonsense: memory beside x and y stays as it is, and the call comes back."""
    huge = 2**62
    memory = torch.full((64,), 170, dtype=torch.uint8, device=device)
    x, y = torch.ones(20, dtype=torch.bool, device=device), memory[24:40]
    starts = torch.tensor([-9, 4, huge, 2, huge, 3, 0], device=device)
    outputs = torch.tensor([0, 2, 7, 15, huge, 10, 12], device=device)
    pack_bits(x, starts, outputs, y, 6)
    assert memory[:24].eq(170).all() and memory[40:].eq(170).all()
    # Segment 0 is x[-9:4]. Segments 1 and 3 never end: they have the 5 bytes up to the next one's and the last of y.
    assert y.tolist() == [0, 0b11110, 255, 255, 0, 0, 0] + [170] * 8 + [255]


def test_masks_of_forests_and_of_noise(triton_device: torch.device) -> None:
    _check_masks(triton_device, [(1, 1), (2, 3), (5, 2), (16, 2), (17, 1), (64, 1), (130, 1)])


def test_segments(device: torch.device) -> None:
    _check_segments(device, [1, 7, 8, 9, 17, 0, 300])
    _check_segments(device, [0, 9000, 5], torch.int32)


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    sizes = (1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256)
    # Every other dtype is a kernel to compile: int32 is left to a few sizes.
    _check_masks(cuda, [(nodes, 1 + nodes % 5) for nodes in sizes], (torch.int64,))
    _check_masks(cuda, [(7, 257), (64, 100), (600, 1), (1024, 1)], (torch.int64,))
    _check_masks(cuda, [(7, 3), (64, 2), (200, 2)], (torch.int32,))
    _check_segments(cuda, [(37 * segment) % 101 for segment in range(257)])
    _check_segments(cuda, [100_003, 1, 7_777, 0, 64 * 64])


def test_no_requests_is_no_work() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    reconstruct(empty.bool(), empty, *_outputs(0, 4, torch.device("cpu")), 0, 4)
    y = torch.full((3,), 9, dtype=torch.uint8)
    pack_bits(empty.bool(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), y, 0)
    assert y.tolist() == [9, 9, 9]
