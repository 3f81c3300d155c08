from __future__ import annotations

from typing import Any

import torch

from outrider.kernels.tree_attention_batch import TreeAttentionBatch


def _columns() -> dict[str, Any]:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return {
        "slot_table": torch.arange(16, dtype=torch.int32).view(2, 8),
        "query_start": torch.tensor([0, 2, 3], dtype=torch.int32),
        "tree_start": torch.tensor([4, 2], dtype=torch.int32),
        "prefix_len": torch.tensor([4, 4, 3], dtype=torch.int32),
        "key_len": torch.tensor([6, 3], dtype=torch.int32),
        "tree_mask": torch.tensor([[1], [3], [0]]),
        "max_query_len": 2,
        "max_key_len": 6,
        "positions": zeros(3),
        "slot_positions": zeros(16),
    }


def test_plan_is_built_once_per_window_and_cache() -> None:
    batch = TreeAttentionBatch(**_columns())
    assert batch.cpu_plan(16, 0) is batch.cpu_plan(16, 0)
    assert batch.cpu_plan(16, 0) is not batch.cpu_plan(16, 4)


def test_plan_masks_only_what_some_row_may_not_see() -> None:
    batch = TreeAttentionBatch(**_columns())
    tree, decode = batch.cpu_plan(16, 0)
    assert tree.mask_begin == 4 and tree.mask is not None
    assert tree.mask[:, 0].tolist() == [[0.0, -float("inf")], [0.0, 0.0]]
    assert (tree.slots, tree.slot_begin, tree.key_count) == (None, 0, 6)
    assert decode.mask is None and decode.blank is None and decode.slot_begin == 8
