"""Cases of the operators that build, read and walk token trees: no arithmetic, so a launch is most of their time."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work, size_of
from benchmarks.kernel_bench.forest import draft_pool, follow_children, make_forest

_BATCHES = (1, 64)
_NODES = 64
_TOPK, _DEPTH = 8, 8
_COMMITTED = 1024
_MODES = {"full mask": 0, "tree mask": 1, "packed mask": 2}


def cases() -> list[Case]:
    """Batch 1 and 64, 64 nodes each; masks of a whole context for packbits."""
    made = []
    for batch in _BATCHES:
        shape = f"batch {batch}, nodes {_NODES}"
        build = functools.partial(_build_walk, batch)
        made.append(Case(operator="verify_tree_greedy", shape=shape, target="verify_tree_greedy", build=build))
    for batch in _BATCHES:
        for name, mode in _MODES.items():
            made.append(
                Case(
                    operator="build_tree_kernel_efficient",
                    shape=f"batch {batch}, nodes {_NODES}, {name}",
                    target="build_tree_kernel_efficient",
                    build=functools.partial(_build_tree, batch, mode),
                )
            )
    for batch in _BATCHES:
        made.append(
            Case(
                operator="reconstruct_indices_from_tree_mask",
                shape=f"batch {batch}, nodes {_NODES}",
                target="reconstruct_indices_from_tree_mask",
                build=functools.partial(_build_reconstruct, batch),
            )
        )
    for batch, bits in ((64, _NODES * _NODES), (8, _NODES * (32768 + _NODES))):
        build = functools.partial(_build_packbits, batch, bits)
        made.append(Case(operator="segment_packbits", shape=f"segments {batch}, bits {bits}", build=build))
    return made


def _build_walk(batch: int, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.verify_tree import verify_tree_greedy, verify_tree_greedy_reference

    forest = make_forest(batch, _NODES, device)
    candidates = torch.randint(1000, (batch, _NODES), device=device)
    chosen = follow_children(forest, candidates, share=0.8)
    outputs = (
        torch.zeros(batch * _NODES, dtype=torch.int32, device=device),
        torch.zeros(batch, forest.max_depth + 1, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )
    inputs = (candidates, *forest.links, chosen)
    return Subject(
        ours=lambda: verify_tree_greedy(*outputs, *inputs),
        reference=lambda: verify_tree_greedy_reference(*outputs, *inputs),
        work=Work(bytes_moved=size_of(*inputs, *outputs)),
    )


def _build_tree(batch: int, mode: int, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.build_tree import TreeMaskMode, build_tree_kernel_efficient, build_tree_reference

    parent_list, selected = draft_pool(batch, _NODES, _TOPK, _DEPTH, device)
    committed = torch.full((batch,), _COMMITTED, device=device)
    cells = batch * _NODES * _NODES
    masks = (
        torch.zeros(cells + batch * _NODES * _COMMITTED, dtype=torch.bool, device=device),
        torch.zeros(cells, dtype=torch.bool, device=device),
        torch.zeros(batch * _NODES, dtype=torch.int64, device=device),
    )
    mask = masks[mode]
    outputs = [torch.zeros(batch, _NODES, dtype=torch.int64, device=device) for _ in range(4)]
    written = cells if mode < 2 else size_of(mask)
    return Subject(
        ours=lambda: build_tree_kernel_efficient(
            parent_list,
            selected,
            committed,
            mask,
            *outputs,
            topk=_TOPK,
            depth=_DEPTH,
            draft_token_num=_NODES,
            tree_mask_mode=mode,
        ),
        reference=lambda: build_tree_reference(
            parent_list, selected, committed, mask, outputs, _TOPK, _DEPTH, TreeMaskMode(mode)
        ),
        work=Work(bytes_moved=size_of(parent_list, selected, committed, *outputs) + written),
    )


def _build_reconstruct(batch: int, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.tree_mask import reconstruct_indices_from_tree_mask, reconstruct_reference

    mask = make_forest(batch, _NODES, device).sees.flatten()
    committed = torch.full((batch,), _COMMITTED, device=device)
    outputs = [torch.zeros(batch, _NODES, dtype=torch.int64, device=device) for _ in range(4)]
    return Subject(
        ours=lambda: reconstruct_indices_from_tree_mask(
            mask, committed, *outputs, batch_size=batch, draft_token_num=_NODES
        ),
        reference=lambda: reconstruct_reference(mask, committed, outputs),
        work=Work(bytes_moved=size_of(mask, committed, *outputs)),
    )


def _build_packbits(batch: int, bits: int, device: torch.device, flashinfer: Any) -> Subject:
    from outrider.kernels.tree_mask import segment_packbits, segment_packbits_reference

    values = torch.rand(batch * bits, device=device) < 0.5
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * bits
    packed_starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * (-(-bits // 8))
    packed = torch.zeros(batch * (-(-bits // 8)), dtype=torch.uint8, device=device)
    theirs: Run | None = None
    if flashinfer is not None:
        # Its public function waits for the host to learn the size of the result; this is the kernel below it.
        kernel = importlib.import_module("flashinfer.quantization.packbits").get_quantization_module().segment_packbits
        theirs = functools.partial(kernel, values, starts, packed_starts, "little", packed)
    return Subject(
        ours=lambda: segment_packbits(values, starts, packed_starts, packed, batch),
        reference=lambda: segment_packbits_reference(values, starts, packed_starts, packed, batch),
        flashinfer=theirs,
        work=Work(bytes_moved=size_of(values, starts, packed_starts, packed)),
    )
