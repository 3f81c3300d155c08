from __future__ import annotations

from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from tests.kernels.tensors import POISON, poisoned, recorded

from outrider.kernels.build_tree import TreeMaskMode, build_tree_kernel_efficient, build_tree_reference
from outrider.kernels.tree_mask import reconstruct_indices_from_tree_mask
from outrider.kernels.verification.build_tree_kernels import launch_build_tree

# Columns are given as lists, whose lengths no type tells.
build_tree: Any = build_tree_kernel_efficient
reference_tree: Any = build_tree_reference

_HUGE = 2**32


def _words_dtype(nodes: int) -> torch.dtype:
    return next(
        dtype
        for dtype, bits in ((torch.uint8, 8), (torch.uint16, 16), (torch.uint32, 32), (torch.int64, 64))
        if nodes <= bits
    )


def _run(
    tree: SimpleNamespace, mode: int, device: torch.device, words: torch.dtype | None = None, *, reference: bool = False
) -> SimpleNamespace:
    """The outputs for `tree`; the mask is flat, its buffer one row of cells longer than needed."""
    requests, nodes = len(tree.lengths), tree.nodes
    cells = {
        0: nodes * (nodes * requests + sum(tree.lengths)),
        1: nodes * nodes * requests,
        2: nodes * requests,
    }[mode]
    dtype = (words or _words_dtype(nodes)) if mode == 2 else torch.bool
    # True marks what the operator must leave alone: the prefix cells of mode 0 and what lies past the end.
    mask = torch.full((cells + nodes,), mode != 2, device=device).to(dtype)
    columns = [
        torch.tensor(column, dtype=tree.dtype, device=device).view(requests, -1)
        for column in (tree.parent_list, tree.selected)
    ]
    outputs = [poisoned((requests, nodes), device, tree.dtype) for _ in range(4)]
    lengths = torch.tensor(tree.lengths, dtype=tree.dtype, device=device)
    if reference:
        reference_tree(*columns, lengths, mask, outputs, tree.topk, tree.depth, TreeMaskMode(mode))
    else:
        build_tree(*columns, lengths, mask, *outputs, tree.topk, tree.depth, nodes, mode)
    written = mask.cpu().tolist()
    assert written[cells:] == [mode != 2] * nodes
    positions, index, child, sibling = (output.tolist() for output in outputs)
    return SimpleNamespace(positions=positions, index=index, child=child, sibling=sibling, mask=written[:cells])


def _check_against_reference(tree: SimpleNamespace, mode: int, device: torch.device) -> None:
    wanted = _run(tree, mode, torch.device("cpu"), reference=True)
    assert _run(tree, mode, device) == wanted, (tree.nodes, len(tree.lengths), mode)


def _grown_tree(random: Random, nodes: int, requests: int, dtype: torch.dtype = torch.int64) -> SimpleNamespace:
    """Well-formed pools and selections, as a draft makes them."""
    topk = next(k for k in (2, 3, 4, 8, 16) if k >= random.randint(2, 4) and k + 15 * k * k >= nodes)
    depth = 1
    while topk + (depth - 1) * topk**2 < nodes:
        depth += 1
    depth += random.randint(0, 2)
    tree = SimpleNamespace(nodes=nodes, topk=topk, depth=depth, dtype=dtype, parent_list=[], selected=[], lengths=[])
    for _ in range(requests):
        parent_list, level = [-1, *range(topk)], range(topk, topk + topk**2)
        for _level in range(1, depth - 1):
            parent_list += random.sample(level, topk)
            level = range(level.stop, level.stop + topk**2)
        parent_list = parent_list if depth > 1 else []
        pool, chosen = list(range(topk)), set()
        while len(chosen) < nodes - 1:
            candidate = pool.pop(random.randrange(len(pool)))
            chosen.add(candidate)
            for beam, kept in enumerate(parent_list):
                if beam and kept == candidate:
                    pool += range(beam * topk, (beam + 1) * topk)
        tree.parent_list.append(parent_list)
        tree.selected.append(sorted(chosen))
        tree.lengths.append(random.randint(0, 9))
    return tree


def _wild_tree(random: Random, nodes: int, requests: int, dtype: torch.dtype = torch.int64) -> SimpleNamespace:
    """Anything at all: unsorted, doubled and negative entries, cycles, indices far out of range."""
    topk, depth = random.randint(1, 4), random.randint(1, 6)
    pool = topk + (depth - 1) * topk**2
    columns = topk * (depth - 1) + 1
    odd = [-1, -3, pool, pool + 5, *([2**31 - 1] if dtype == torch.int32 else [_HUGE, _HUGE + 1, 2**62, -(2**63)])]

    def entry() -> int:
        return random.choice(odd) if random.random() < 0.15 else random.randrange(pool)

    return SimpleNamespace(
        nodes=nodes,
        topk=topk,
        depth=depth,
        dtype=dtype,
        parent_list=[[entry() for _ in range(columns)] for _ in range(requests)],
        selected=[[entry() for _ in range(nodes - 1)] for _ in range(requests)],
        lengths=[random.randint(0, 9) for _ in range(requests)],
    )


def test_recorded_cases(device: torch.device) -> None:
    for case in recorded("build_tree_kernel_efficient")["cases"]:
        given, expected = case["inputs"], case["expected"]
        tree = SimpleNamespace(
            parent_list=given["parent_list"], selected=given["selected_index"], lengths=given["seq_lens"],
            topk=given["topk"], depth=given["depth"], nodes=given["nodes"], dtype=torch.int64,
        )  # fmt: skip
        masks = {0: expected.get("full_mask_flat"), 2: expected["qlen_only_bitpacking_bytes"]}
        masks[1] = torch.tensor(expected["qlen_only_bool"]).flatten().tolist()
        for mode, mask in masks.items():
            got = _run(tree, mode, device)
            assert list(chain(*got.positions)) == expected["positions"], case["name"]
            assert got.index == expected["retrieve_index"], case["name"]
            assert got.child == expected["retrieve_next_token"], case["name"]
            assert got.sibling == expected["retrieve_next_sibling"], case["name"]
            if mask is not None:
                assert [int(cell) for cell in got.mask] == mask, (case["name"], mode)


def _check_sizes(
    device: torch.device,
    sizes: list[tuple[int, int]],
    dtypes: tuple[torch.dtype, ...] = (torch.int64, torch.int32),
) -> None:
    """Grown and wild trees of (nodes, requests), the mask modes and dtypes in turn."""
    random = Random(7)
    for turn, (nodes, requests) in enumerate(sizes):
        for grow in (_grown_tree, _wild_tree):
            tree = grow(random, nodes, requests, dtypes[turn % len(dtypes)])
            modes = (0, 1, 2) if nodes <= 64 else (0, 1)
            _check_against_reference(tree, modes[turn % len(modes)], device)


def _check_chain(device: torch.device, nodes: int) -> None:
    """A chain as long as can be, a cycle with more depth than nodes, a node that is its own parent, missing ones."""
    line = SimpleNamespace(nodes=nodes, topk=1, depth=nodes, dtype=torch.int64, lengths=[3])
    line.parent_list = [[-1, *range(nodes - 1)]]
    line.selected = [list(range(nodes - 1))]
    _check_against_reference(line, 1, device)
    cycle = SimpleNamespace(nodes=4, topk=1, depth=50, dtype=torch.int64, lengths=[3, 0, 5])
    cycle.parent_list = [[0, 2, 3, 1] + [9] * 46, [0, 1, -1] + [9] * 47, [9] * 50]
    cycle.selected = [[1, 2, 3], [1, 2, 0], [0, 60, -3]]
    found = _run(cycle, 2, device)
    assert found.positions == [[3, 53, 53, 53], [0, 50, 1, 1], [5, 6, 6, 6]]
    assert found.child[2] == [1, -1, -1, -1]
    _check_against_reference(cycle, 2, device)


def test_strides_and_larger_buffers(device: torch.device) -> None:
    """Strided inputs, larger and strided outputs, bits already set, and every word type that is wide enough."""
    tree = _grown_tree(Random(1), 6, 2)
    want = _run(tree, 2, device)
    for words in (torch.uint16, torch.uint32, torch.int64):
        assert _run(tree, 2, device, words) == want
    wide = [
        torch.tensor(column, device=device).repeat_interleave(2, dim=1)[:, ::2]
        for column in (tree.parent_list, tree.selected)
    ]
    lengths = torch.tensor(tree.lengths, device=device).repeat_interleave(3)[::3]
    positions = poisoned(30, device)
    links = [poisoned((4, 16), device, torch.int32) for _ in range(3)]
    mask = torch.full((3, 12), 64, dtype=torch.uint8, device=device)
    arguments = (positions[::2], *(link[:, ::2] for link in links), tree.topk, tree.depth, 6, TreeMaskMode.PACKED)
    build_tree(*wide, lengths, mask[:, ::2], *arguments)
    assert positions.tolist()[: 2 * 12 : 2] == list(chain(*want.positions))
    assert positions[1::2].eq(POISON).all() and positions[24:].eq(POISON).all()
    for link, name in zip(links, ("index", "child", "sibling"), strict=True):
        assert link[:2, :12:2].tolist() == getattr(want, name)
        assert link[2:].eq(POISON).all() and link[:, 1::2].eq(POISON).all() and link[:, 12:].eq(POISON).all()
    assert mask[:2, ::2].flatten().tolist() == [64 + bits for bits in want.mask]
    assert mask[2:].eq(64).all() and mask[:, 1::2].eq(64).all()


def _check_length(device: torch.device, length: int, *, unchecked: bool = False) -> None:
    """A prefix for which the full mask has no room: what lies before and behind it stays as it is."""
    memory = torch.full((4096,), 3, dtype=torch.uint8, device=device)
    mask = memory[1024 : 1024 + 144].view(torch.bool)
    outputs = [torch.zeros(1, 12, dtype=torch.int64, device=device) for _ in range(4)]
    tree = _grown_tree(Random(2), 12, 1)
    columns = [torch.tensor(column, device=device) for column in (tree.parent_list, tree.selected)]
    lengths = torch.tensor([length], device=device)
    if unchecked:
        arguments: list[Any] = [*columns, lengths, mask, outputs, tree.topk, tree.depth, 0]
        launch_build_tree(*arguments)
    else:
        build_tree(*columns, lengths, mask, *outputs, tree.topk, tree.depth, 12, 0)
    assert memory[:1024].eq(3).all() and memory[1024 + 144 :].eq(3).all()


def _check_round_trip(device: torch.device, sizes: list[tuple[int, int]]) -> None:
    """Check that a tree built from a well-formed, ascending selection comes back from its mask."""
    for nodes, requests in sizes:
        tree = _grown_tree(Random(nodes), nodes, requests)
        built = _run(tree, 1, device)
        outputs = [poisoned((requests, nodes), device) for _ in range(4)]
        lengths = torch.tensor(tree.lengths, device=device)
        arguments: list[Any] = [torch.tensor(built.mask, device=device), lengths, *outputs, requests, nodes]
        reconstruct_indices_from_tree_mask(*arguments)
        found = [output.tolist() for output in outputs]
        assert found == [built.positions, built.index, built.child, built.sibling]


def test_grown_and_wild_trees(triton_device: torch.device) -> None:
    sizes = [(1, 1), (2, 3), (5, 2), (17, 2), (9, 1), (64, 1), (8, 3), (33, 2), (3, 1), (20, 2), (130, 1), (129, 1)]
    _check_sizes(triton_device, sizes)


def test_chains_and_cycles(device: torch.device) -> None:
    _check_chain(device, 20)


def test_a_negative_prefix_does_no_harm(device: torch.device) -> None:
    for length in (-3, -500):
        _check_length(device, length)


def test_triton_stores_past_a_full_mask_are_left_out(triton_device: torch.device) -> None:
    for length in (128, 138, 2**40):
        _check_length(triton_device, length, unchecked=True)


def test_reconstruction_gives_back_what_was_built(device: torch.device) -> None:
    _check_round_trip(device, [(1, 2), (12, 3), (65, 1)])


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    sizes = (1, 2, 3, 7, 8, 15, 16, 31, 32, 47, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256)
    batches = (1, 2, 3, 5, 31, 64, 100, 257)
    # Every other dtype is a kernel to compile: int32 is left to a few sizes.
    _check_sizes(cuda, [(nodes, 1 + nodes % 4) for nodes in sizes for _ in range(3)], (torch.int64,))
    _check_sizes(cuda, [(5 + batch % 7, batch) for batch in batches for _ in range(3)], (torch.int64,))
    _check_sizes(cuda, [(64, 65), (256, 9), (1024, 2), (1000, 1), (511, 1)], (torch.int64,))
    _check_sizes(cuda, [(nodes, 3) for nodes in (7, 64, 200) for _ in range(3)], (torch.int32,))
    _check_chain(cuda, 1024)
    _check_round_trip(cuda, [(nodes, 3) for nodes in sizes] + [(64, 257), (1024, 2)])


def test_no_requests_is_no_work() -> None:
    empty = torch.zeros(0, 4, dtype=torch.int64)
    build_tree(empty, empty[:, :3], empty[:, 0], torch.zeros(0, dtype=torch.bool), *[empty] * 4, 3, 2, 4, 1)
