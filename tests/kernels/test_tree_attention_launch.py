from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from outrider.kernels import tree_attention_launch as module
from outrider.kernels.tree_attention_batch import TreeAttentionBatch
from outrider.kernels.tree_attention_launch import (
    AttentionCall,
    AttentionNumbers,
    Tiles,
    choose_tiles,
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


@pytest.mark.parametrize(("sessions", "keys", "splits"), [(1, 8208, 33), (8, 8208, 4), (32, 1040, 1), (1, 1040, 9)])
def test_splits_fill_the_device(sessions: int, keys: int, splits: int) -> None:
    batch = _batch([16] * sessions, [keys] * sessions)
    grid = plan_grid(_call(batch), _TILES)
    assert _units(batch, grid, _TILES, 4) == [(1, splits)] * sessions
    assert sessions * splits * 8 <= 264


def test_a_second_wave_is_filled_too() -> None:
    # Nine sessions of three splits would leave 48 of 264 places empty.
    batch = _batch([16] * 9, [8208] * 9)
    [(_, splits)] = set(_units(batch, plan_grid(_call(batch), _TILES), _TILES, 4))
    assert splits == 7


def test_a_session_of_several_tiles_has_fewer_splits() -> None:
    tiles = Tiles(rows=64, keys=64, stages=3, resident=2, groups=1)
    for nodes, keys, splits in ((64, 1064, 5), (65, 1065, 5), (64, 8000, 8), (65, 8000, 6), (16, 1040, 9)):
        batch = _batch([nodes], [keys], slot_table=torch.zeros(1, 30000, dtype=torch.int32), max_key_len=30000)
        grid = plan_grid(_call(batch), tiles)
        assert [found for _, found in _units(batch, grid, tiles, 4)] == [splits], (nodes, keys)


def test_short_sessions_that_fill_the_device_are_not_merged() -> None:
    short, long = (plan_grid(_call(_batch([16] * 32, [keys] * 32)), _TILES) for keys in (1040, 8208))
    assert short.splits == 1 and long.splits > 1


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
from outrider.kernels.tree_attention_hopper import HAS_GLUON
assert not HAS_GLUON
import torch
from outrider.kernels.tree_attention_launch import runs_specialised
torch.cuda.get_device_capability = lambda device: (9, 0)
assert not runs_specialised(torch.device("cuda:0"))
"""


def test_without_gluon_the_plain_kernel_runs() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT_GLUON], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_with_gluon_the_specialised_kernel_runs() -> None:
    from outrider.kernels.tree_attention_hopper import HAS_GLUON

    assert HAS_GLUON


def test_fixed_splits_are_whole_blocks() -> None:
    batch = _batch([16], [1000], split_keys=100)
    grid = plan_grid(_call(batch), _TILES)
    assert (grid.split_keys, grid.splits) == (128, 8)


def _choose(monkeypatch: pytest.MonkeyPatch, *, nodes: int = 16, keys: int = 1000,
            numbers: dict[str, Any] | None = None, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16,
            cache_dtype: torch.dtype | None = None, stride: int | None = None,
            split_keys: int | None = None, paths: torch.Tensor | None = None) -> Tiles:  # fmt: skip
    monkeypatch.setattr(module, "runs_specialised", lambda device: True)
    batch = _batch([nodes], [keys], split_keys=split_keys, paths=paths)
    cache = torch.zeros(10, 8, stride or head_dim, dtype=cache_dtype or dtype)[..., :head_dim]
    query = torch.zeros(nodes, 32, head_dim, dtype=dtype)
    given = AttentionNumbers(scale=1.0, **(numbers or {}))
    return choose_tiles(_call(batch, query=query, key_cache=cache, value_cache=cache, numbers=given))


def test_the_specialised_kernel_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choose(monkeypatch).groups == 1
    assert [_choose(monkeypatch, nodes=nodes).groups for nodes in (17, 65, 80, 81)] == [1, 1, 1, 2]
    assert [_choose(monkeypatch, nodes=65, keys=keys).groups for keys in (65536, 65537)] == [1, 2]
    assert _choose(monkeypatch, head_dim=64, dtype=torch.float16).groups == 1
    others: list[dict[str, Any]] = [
        {"numbers": {"softcap": 3.0}}, {"numbers": {"sliding_window": 3}}, {"head_dim": 96}, {"head_dim": 256},
        {"dtype": torch.float32}, {"cache_dtype": torch.float8_e4m3fn}, {"stride": 136}, {"split_keys": 512},
        {"paths": torch.zeros(16, 64, dtype=torch.int32)},
    ]  # fmt: skip
    for other in others:
        assert _choose(monkeypatch, **other).groups == 0, other


def test_numbers_in_base_two() -> None:
    factor, under = AttentionNumbers(scale=0.5, key_scale=4.0).of_scores()
    assert (factor, under) == (pytest.approx(2.0 / math.log(2)), 0.0)
    factor, under = AttentionNumbers(scale=0.5, softcap=10.0).of_scores()
    assert factor == pytest.approx(10 / math.log(2)) and under == pytest.approx(0.1 / math.log(2))
    assert AttentionNumbers(scale=0.0).of_scores()[0] > 0
