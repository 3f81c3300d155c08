"""Cases of tree_attention: 32 query heads, 8 key heads of 128, bfloat16, slots in random order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work
from benchmarks.kernel_bench.targets import tree_attention_target

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
_SCALE = HEAD_DIM**-0.5
_WORKSPACE_BYTES = 384 << 20
# Each node hangs from one of the nodes shortly before it: some six levels at 16 nodes, some twenty at 64.
_PARENT_REACH = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sessions of equal size: `context` keys that all nodes see, then `nodes` keys of the tree itself.

    With a `window`, a node sees keys of fewer positions before its own.
    """

    batch: int
    context: int
    nodes: int
    window: int = 0

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"batch {self.batch}, context {self.context}, nodes {self.nodes}{window}"

    def work(self) -> Work:
        """Every key and value once; both products over every (node, key) pair. Queries and results are not counted."""
        keys = self.batch * (min(self.context, self.window or self.context) + self.nodes)
        return Work(
            bytes_moved=keys * HEADS_KV * HEAD_DIM * 2 * torch.bfloat16.itemsize,
            flops=4 * keys * self.nodes * HEADS * HEAD_DIM,
        )


SHAPES = tuple(
    Shape(batch=batch, context=context, nodes=nodes)
    for batch, context, nodes in (
        (1, 1024, 16),
        (1, 8192, 16),
        (1, 8192, 64),
        (1, 32768, 64),
        (8, 8192, 16),
        (8, 8192, 64),
        (8, 32768, 64),
        (32, 1024, 16),
        (32, 8192, 8),
        (32, 8192, 64),
    )
)
WINDOWED = tuple(Shape(batch=8, context=8192, nodes=16, window=window) for window in (1024, 4096))


def cases() -> list[Case]:
    """Shapes from one short session to 32 long ones, and two windows."""
    return [
        Case(
            operator="tree_attention",
            shape=str(shape),
            # Windows have no target, as nothing to compare with was measured.
            target=None
            if shape.window
            else tree_attention_target(batch=shape.batch, context=shape.context, nodes=shape.nodes),
            build=functools.partial(_build, shape),
        )
        for shape in (*SHAPES, *WINDOWED)
    ]


def _build(shape: Shape, device: torch.device, flashinfer: Any) -> Subject:
    from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference

    keys = shape.context + shape.nodes
    sees, mask_words = _tree(shape.nodes)
    mask = torch.cat([torch.ones(shape.nodes, shape.context, dtype=torch.bool), sees], dim=1).to(device)
    slots = torch.randperm(shape.batch * keys, device=device).int().view(shape.batch, keys)
    query = torch.randn(shape.batch * shape.nodes, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, slots.numel(), HEADS_KV, HEAD_DIM, dtype=torch.bfloat16, device=device)
    of_rows, of_slots = _token_positions(shape, sees.to(device), slots) if shape.window else (None, None)
    every = functools.partial(torch.full, (shape.batch,), dtype=torch.int32, device=device)
    batch = TreeAttentionBatch(
        slot_table=slots,
        query_start=torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.nodes,
        tree_start=every(shape.context),
        prefix_len=every(shape.context).repeat_interleave(shape.nodes),
        key_len=every(keys),
        tree_mask=mask_words.to(device).repeat(shape.batch, 1),
        max_query_len=shape.nodes,
        max_key_len=keys,
        positions=of_rows,
        slot_positions=of_slots,
    )
    seen = {"scale": _SCALE, "sliding_window": shape.window}
    return Subject(
        ours=lambda: tree_attention(query, key, value, batch, **seen),
        reference=lambda: tree_attention_reference(query, key, value, batch, **seen),
        work=shape.work(),
        **_flashinfer_runs(flashinfer, shape, (query, key, value), batch, mask.repeat(shape.batch, 1)),
    )


def _token_positions(shape: Shape, sees: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the rows and of the slots' tokens: a node stands behind its prefix and its ancestors."""
    of_nodes = (shape.context + sees.sum(dim=1) - 1).int()
    of_keys = torch.cat([torch.arange(shape.context, dtype=torch.int32, device=slots.device), of_nodes])
    slot_positions = torch.empty(slots.numel(), dtype=torch.int32, device=slots.device)
    slot_positions[slots.long()] = of_keys.expand_as(slots)
    return of_nodes.repeat(shape.batch), slot_positions


def _flashinfer_runs(
    flashinfer: Any,
    shape: Shape,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    batch: Any,
    mask: torch.Tensor,
) -> dict[str, Any]:
    """Return FlashInfer's mask over all keys, its causal kernel (another answer), and this repository's two passes."""
    if flashinfer is None or shape.window:
        return {}
    from outrider.kernels.attention.flashinfer import tree_attention_flashinfer

    query, key, value = tensors
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)

    def planned(**how: Any) -> Run:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        pages = torch.arange(shape.batch + 1, dtype=torch.int32, device=query.device) * batch.slot_table.shape[1]
        wrapper.plan(
            batch.query_start,
            pages,
            batch.slot_table.flatten(),
            torch.ones_like(pages[1:]),
            HEADS,
            HEADS_KV,
            HEAD_DIM,
            1,
            q_data_type=query.dtype,
            sm_scale=_SCALE,
            **how,
        )
        out = torch.empty_like(query)
        return lambda: wrapper.run(query, (key[:, None], value[:, None]), out=out)

    return {
        "flashinfer": planned(custom_mask=mask.flatten()),
        "beside": {
            "its causal kernel": planned(causal=True),
            "two passes": lambda: tree_attention_flashinfer(query, key, value, batch, scale=_SCALE),
        },
    }


def _tree(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nodes that each node of a random tree sees, [n, n] bool, and the mask words of it, [n, W] int64."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - _PARENT_REACH), node, ()))
        sees[node] |= sees[parent]
    padded = torch.nn.functional.pad(sees, (0, -nodes % 64)).view(nodes, -1, 64)
    # The sum wraps around for bit 63, which is the sign: what the word needs.
    return sees, (padded.long() << torch.arange(64)).sum(dim=-1)
