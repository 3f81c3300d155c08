from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from outrider.kernels.attention import launch as module
from outrider.kernels.attention.batch import TreeAttentionBatch
from outrider.kernels.attention.launch import (
    AttentionCall,
    AttentionNumbers,
    Tiles,
    plan_grid,
)

pytest.importorskip("triton")


def _batch(rows: list[int], keys: list[int], **changes: Any) -> TreeAttentionBatch:
    starts = [sum(rows[:session]) for session in range(len(rows) + 1)]
    columns: dict[str, Any] = {
        "slot_table": torch.zeros(len(rows), max(keys), dtype=torch.int32),
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "tree_start": torch.tensor(keys, dtype=torch.int32),
        "prefix_len": torch.zeros(sum(rows), dtype=torch.int32),
        "key_len": torch.tensor(keys, dtype=torch.int32),
        "tree_mask": torch.zeros(sum(rows), 1, dtype=torch.int64),
        "max_query_len": max(rows),
        "max_key_len": max(keys),
    }
    return TreeAttentionBatch(**{**columns, **changes})


def _call(batch: TreeAttentionBatch, **changes: Any) -> AttentionCall:
    cache = torch.zeros(10, 8, 128, dtype=torch.bfloat16)
    columns: dict[str, Any] = {
        "query": torch.zeros(batch.prefix_len.shape[0], 32, 128, dtype=torch.bfloat16),
        "key_cache": cache,
        "value_cache": cache,
        "batch": batch,
        "numbers": AttentionNumbers(scale=1.0),
    }
    return AttentionCall(**{**columns, **changes})


_TILES = Tiles(rows=64, keys=64, stages=3, resident=2)


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def _units(batch: TreeAttentionBatch, grid: module.Grid, tiles: Tiles, group: int) -> list[tuple[int, int]]:
    """(tiles, splits) of every session, as the kernels share them out."""
    rows = torch.diff(batch.query_start).tolist()
    keys = batch.key_len.tolist()
    counts = [math.ceil(row * group / tiles.rows) for row in rows]
    if grid.split_keys:
        return [(count, max(math.ceil(key / grid.split_keys), 1)) for count, key in zip(counts, keys, strict=True)]
    work = sum(count * key for count, key in zip(counts, keys, strict=True))
    shares = [int(key * grid.units_wanted / work + 1e-3) for key in keys]
    return [
        (count, max(min(share, math.ceil(key / grid.least_keys)), 1))
        for count, share, key in zip(counts, shares, keys, strict=True)
    ]


@pytest.mark.parametrize("split_keys", [None, 100, 4096])
def test_units_stay_within_the_grid(split_keys: int | None) -> None:
    for _ in range(200):
        sessions = int(torch.randint(1, 40, ()))
        rows = torch.randint(0, 90, (sessions,)).clamp(min=1).tolist()
        keys = (torch.rand(sessions).pow(8) * 100_000).int().clamp(min=1).tolist()
        batch = _batch(rows, keys, split_keys=split_keys)
        tiles = Tiles(rows=int(2 ** torch.randint(4, 8, ())), keys=64, stages=3, resident=2)
        grid = plan_grid(_call(batch), tiles)
        units = _units(batch, grid, tiles, 4)
        assert sum(count for count, _ in units) <= grid.tiles
        assert sum(count * splits for count, splits in units) < grid.units
        assert max(splits for _, splits in units) <= grid.splits


def test_rows_of_no_session_alone_have_a_grid() -> None:
    batch = _batch([4], [1000], query_start=torch.zeros(2, dtype=torch.int32), max_query_len=0)
    assert plan_grid(_call(batch), _TILES).units >= 1


_WITHOUT_GLUON = """
import sys
sys.modules["triton.experimental"] = None
from outrider.kernels.attention.hopper import HAS_GLUON
assert not HAS_GLUON
import torch
from outrider.kernels.attention.launch import runs_specialised
torch.cuda.get_device_capability = lambda device: (9, 0)
assert not runs_specialised(torch.device("cuda:0"))
"""


def test_without_gluon_the_plain_kernel_runs() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT_GLUON], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
