from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.attention_batches import Session, ancestor_bits, attention_tensors, make_batch, on, random_tree
from tests.kernels.tensors import recorded

from outrider.kernels.attention import launch as tree_attention_launch
from outrider.kernels.attention.slot_updates import gather_paths
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference

_SLOTS = 200


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _batch(**changes: Any) -> TreeAttentionBatch:
    """A tree, a prefill chunk, a session without rows, one step of decoding, a row that sees nothing, two free rows."""
    query_start = [0, 5, 9, 9, 10, 11]
    rows, sessions = 13, 5
    tree_start = _int32([70, 0, 10, 31, 5])
    key_len = _int32([140, 4, 12, 32, 9])
    prefix_len = _int32([70] * 5 + [1, 2, 3, 4] + [32] + [0] + [0, 0])
    tree_mask = torch.zeros(rows, 2, dtype=torch.int64)
    # Nodes 0 to 4 of the tree: parents -, 0, 0, 2, and one whose path lies beyond the first word and touches its sign.
    tree_mask[:5, 0] = torch.tensor([0b1, 0b11, 0b101, 0b1101, -(2**63) + 1])
    tree_mask[4, 1] = 0b101001
    tree_mask[11:] = -1
    columns: dict[str, Any] = {
        "slot_table": torch.stack([torch.randperm(_SLOTS)[:144] for _ in range(sessions)]).int(),
        "query_start": _int32(query_start),
        "tree_start": tree_start,
        "prefix_len": prefix_len,
        "key_len": key_len,
        "tree_mask": tree_mask,
        "max_query_len": 5,
        "max_key_len": 140,
        "positions": torch.randint(0, 60, (rows,)).int(),
        "slot_positions": torch.randint(0, 60, (_SLOTS,)).int(),
    }
    return TreeAttentionBatch(**{**columns, **changes})


def _tensors(
    batch: TreeAttentionBatch, heads: int, heads_kv: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return attention_tensors(batch.prefix_len.shape[0], _SLOTS, (heads, heads_kv), head_dim, dtype)


def _visible(batch: TreeAttentionBatch, session: int, row: int, window: int) -> list[int]:
    """The slots a row may see, key by key from the definition."""
    words = [int(word) & (2**64 - 1) for word in batch.tree_mask[row].tolist()]
    bits = sum(word << (64 * place) for place, word in enumerate(words))
    start = int(batch.tree_start[session])
    slots = []
    for index in range(int(batch.key_len[session])):
        slot = int(batch.slot_table[session, index])
        seen = index < int(batch.prefix_len[row]) or (index >= start and bits >> (index - start) & 1)
        if window and batch.positions is not None and batch.slot_positions is not None and 0 <= slot < _SLOTS:
            seen = seen and int(batch.positions[row]) - int(batch.slot_positions[slot]) < window
        if seen and 0 <= slot < _SLOTS:
            slots.append(slot)
    return slots


def _brute_force(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: TreeAttentionBatch,
    scale: float, window: int, softcap: float,
) -> torch.Tensor:  # fmt: skip
    query, key, value = (tensor.double() for tensor in tensors)
    out = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for session in range(batch.key_len.shape[0]):
        for row in range(int(batch.query_start[session]), int(batch.query_start[session + 1])):
            slots = _visible(batch, session, row, window)
            for head in range(query.shape[1]):
                scores = key[slots, head // group] @ query[row, head] * scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[row, head] = torch.softmax(scores, 0) @ value[slots, head // group]
    return out


def _agree(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: TreeAttentionBatch, device: torch.device,
    *, rtol: float = 1e-4, atol: float = 1e-5, **options: Any,
) -> None:  # fmt: skip
    """Hold the kernel on a device to the reference on the CPU."""
    expected = tree_attention_reference(*tensors, batch, **options)
    query, key, value = (tensor.to(device) for tensor in tensors)
    out = tree_attention(query, key, value, on(device, batch), **options)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=rtol, atol=atol)


_SHAPES = [(3, 1, 16), (4, 2, 24), (2, 2, 32)]


@pytest.mark.parametrize(("heads", "heads_kv", "head_dim"), _SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (25, 0.0), (0, 3.0), (25, 3.0)])
def test_against_the_definition(heads: int, heads_kv: int, head_dim: int, window: int, softcap: float) -> None:
    batch = _batch()
    tensors = _tensors(batch, heads, heads_kv, head_dim)
    out = tree_attention(*tensors, batch, scale=0.3, sliding_window=window, softcap=softcap)
    expected = _brute_force(tensors, batch, 0.3, window, softcap)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert (out[10:] == 0).all() and (out[:10] != 0).all()


@pytest.mark.parametrize("split_keys", [None, 50])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (25, 3.0)])
@pytest.mark.parametrize("shape", _SHAPES[:2])
def test_triton_against_the_reference(
    triton_device: torch.device, split_keys: int | None, window: int, softcap: float, shape: tuple[int, int, int]
) -> None:  # fmt: skip
    batch = _batch(split_keys=split_keys)
    batch.slot_table[0, 3], batch.slot_table[3, 30] = -4, _SLOTS
    _agree(_tensors(batch, *shape), batch, triton_device, scale=0.3, sliding_window=window, softcap=softcap)


def test_triton_takes_strides(triton_device: torch.device) -> None:
    batch = _batch(split_keys=64)
    query, key, value = _tensors(batch, 4, 2, 16)
    expected = tree_attention_reference(query, key, value, batch, scale=0.25)
    strided = query.to(triton_device).transpose(0, 1).contiguous().transpose(0, 1)
    caches = torch.stack([key, value], dim=-1).to(triton_device)
    table = torch.stack([batch.slot_table] * 2, dim=-1)[..., 0]
    moved = on(triton_device, replace(batch, slot_table=table))
    out = tree_attention(strided, caches[..., 0], caches[..., 1], moved, scale=0.25)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_a_rows_result_does_not_depend_on_other_sessions() -> None:
    batch = _batch()
    query, key, value = _tensors(batch, 3, 1, 16)
    together = tree_attention(query, key, value, batch, scale=0.2)
    alone = replace(
        batch,
        slot_table=batch.slot_table[1:2],
        query_start=_int32([0, 4]),
        tree_start=batch.tree_start[1:2],
        prefix_len=batch.prefix_len[5:9],
        key_len=batch.key_len[1:2],
        tree_mask=batch.tree_mask[5:9],
        positions=None,
    )
    assert torch.equal(tree_attention(query[5:9], key, value, alone, scale=0.2), together[5:9])


def test_consecutive_slots_and_scattered_slots_agree() -> None:
    batch = _batch(slot_table=torch.arange(144, dtype=torch.int32).expand(5, -1).contiguous())
    query, key, value = _tensors(batch, 4, 2, 16)
    assert all(session.slots is None for session in batch.cpu_plan(_SLOTS, 0))
    order = torch.randperm(_SLOTS)
    place = torch.argsort(order)
    scattered = replace(batch, slot_table=place[batch.slot_table.long()].int())
    assert any(session.slots is not None for session in scattered.cpu_plan(_SLOTS, 0))
    expected = tree_attention(query, key, value, batch, scale=0.2)
    torch.testing.assert_close(tree_attention(query, key[order], value[order], scattered, scale=0.2), expected)


def test_slots_out_of_range_are_never_read() -> None:
    batch = _batch()
    batch.slot_table[0, 3], batch.slot_table[0, 71], batch.slot_table[3, 30] = -4, 2**31 - 1, _SLOTS
    tensors = _tensors(batch, 3, 1, 16)
    out = tree_attention(*tensors, batch, scale=0.3)
    torch.testing.assert_close(out.double(), _brute_force(tensors, batch, 0.3, 0, 0.0), rtol=1e-5, atol=1e-5)


def test_lengths_past_their_bound_are_cut(triton_device: torch.device) -> None:
    batch = _batch(split_keys=64)
    tensors = _tensors(batch, 3, 1, 16)
    cut = replace(batch, key_len=batch.key_len.clamp(max=100), max_key_len=100)
    expected = tree_attention_reference(*tensors, cut, scale=0.3)
    longer = replace(batch, max_key_len=100)
    assert torch.equal(tree_attention_reference(*tensors, longer, scale=0.3), expected)
    _agree(tensors, longer, triton_device, scale=0.3)


def test_caches_without_slots_are_zeros(triton_device: torch.device) -> None:
    batch = _batch()
    query, key, value = _tensors(batch, 3, 1, 16)
    assert (tree_attention_reference(query, key[:0], value[:0], batch, scale=0.3) == 0).all()
    query, key, value = (tensor.to(triton_device) for tensor in (query, key, value))
    assert (tree_attention(query, key[:0], value[:0], on(triton_device, batch), scale=0.3) == 0).all()


def test_half_precision_comes_back_in_its_dtype() -> None:
    batch = _batch()
    tensors = _tensors(batch, 4, 2, 16, torch.bfloat16)
    out = tree_attention(*tensors, batch, scale=0.3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), _brute_force(tensors, batch, 0.3, 0, 0.0), rtol=1e-2, atol=1e-2)


def test_recorded_attention(device: torch.device) -> None:
    for case in recorded("tree_attention"):
        keys = len(case["k"])
        batch = make_batch([Session(case["prefix_len"], parents=case["parents"])], num_slots=keys)
        query, key, value = (torch.tensor(case[name])[:, None] for name in ("q", "k", "v"))
        slots = batch.slot_table[0, :keys].long()
        caches = [torch.empty_like(tensor).index_copy_(0, slots, tensor) for tensor in (key, value)]
        moved = [tensor.to(device) for tensor in (query, *caches)]
        out = tree_attention(moved[0], moved[1], moved[2], on(device, batch), scale=case["sm_scale"])
        torch.testing.assert_close(out.cpu(), torch.tensor(case["out"])[:, None], rtol=1e-4, atol=1e-5)


def test_recorded_masks(device: torch.device) -> None:
    # With equal scores a row is the mean of the values it sees; powers of two spell out which keys those are.
    layout = recorded("custom_mask_layout")
    requests = layout["requests"]
    for request in requests:
        assert ancestor_bits(request["parents"]) == request["ancestor_bitmask"]
    sessions = [Session(request["prefix_len"], parents=request["parents"]) for request in requests]
    batch = make_batch(sessions, num_slots=21)
    value = torch.zeros(21, 1, 16)
    for session, request in enumerate(requests):
        keys = request["prefix_len"] + len(request["parents"])
        value[batch.slot_table[session, :keys].long()] = 2.0 ** torch.arange(keys)[:, None, None]
    key, query = torch.zeros(21, 1, 16), torch.zeros(batch.prefix_len.shape[0], 1, 16)
    moved = [tensor.to(device) for tensor in (query, key, value)]
    out = tree_attention(moved[0], moved[1], moved[2], on(device, batch), scale=1.0)[:, 0, 0].tolist()
    rows = [row for request in requests for row in request["dense_rows"]]
    assert [
        f"{round(mean * row.count('1')):b}"[::-1].ljust(len(row), "0") for mean, row in zip(out, rows, strict=True)
    ] == rows
    assert "".join(rows) == layout["bool_mask_flat"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_eight_bit_caches(triton_device: torch.device, dtype: torch.dtype) -> None:
    batch = _batch(split_keys=64)
    query, key, value = _tensors(batch, 4, 2, 16)
    query, caches = query.to(dtype), [tensor.to(torch.float8_e4m3fn) for tensor in (key, value)]
    wide = [cache.to(dtype) for cache in caches]
    expected = tree_attention_reference(query, wide[0] * 1.5, wide[1] * 0.25, batch, scale=0.3)
    got = tree_attention_reference(query, caches[0], caches[1], batch, scale=0.3, key_scale=1.5, value_scale=0.25)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    moved = [tensor.to(triton_device) for tensor in (query, *caches)]
    out = tree_attention(
        moved[0], moved[1], moved[2], on(triton_device, batch), scale=0.3, key_scale=1.5, value_scale=0.25
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=3e-3, atol=3e-3)


# Of splits whose best scores differ by thousands none may overflow, and small ones vanish.
@pytest.mark.parametrize(("scale", "tolerance"), [(0.0, 1e-5), (-0.3, 1e-5), (300.0, 1e-3)])
def test_scales_of_any_sign_and_size(triton_device: torch.device, scale: float, tolerance: float) -> None:
    batch = _batch(split_keys=32)
    _agree(_tensors(batch, 2, 1, 16), batch, triton_device, rtol=10 * tolerance, atol=tolerance, scale=scale)


@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_nothing_outside_the_slots_is_read(triton_device: torch.device, stray: bool, window: int) -> None:
    num_slots = 400
    batch = make_batch([Session(61, nodes=5), Session(129, nodes=1)], num_slots=num_slots, split_keys=64)
    if stray:
        batch.slot_table[0, 2], batch.slot_table[0, 63], batch.slot_table[1, 100] = num_slots, -7, 2**31 - 1
    used = batch.slot_table[(batch.slot_table >= 0) & (batch.slot_table < num_slots)].long()
    query, key, value = attention_tensors(6, num_slots, (4, 2), 16)
    expected = tree_attention_reference(query, key, value, batch, scale=0.3, sliding_window=window)
    poisoned = [torch.full_like(cache, float("nan")).index_copy_(0, used, cache[used]) for cache in (key, value)]
    moved = [tensor.to(triton_device) for tensor in (query, *poisoned)]
    moved_batch = on(triton_device, batch)
    out = tree_attention(moved[0], moved[1], moved[2], moved_batch, scale=0.3, sliding_window=window)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_the_kernels_own_splits(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many places as let the long session have splits and the short ones none.
    monkeypatch.setattr(tree_attention_launch, "multiprocessors", lambda device: 8)
    batch = make_batch([Session(520, nodes=5), Session(3, nodes=1), Session(140, nodes=3)], num_slots=700)
    _agree(attention_tensors(9, 700, (2, 1), 16), batch, triton_device, scale=0.3)


def test_sessions_that_overlap_are_merged_from_what_was_computed(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three times all rows: more units than the grid has, and poison where their partial results would lie.
    rows, sessions, keys = 24, 5, 400
    batch = TreeAttentionBatch(
        slot_table=torch.arange(keys, dtype=torch.int32).repeat(sessions, 1),
        query_start=_int32([0, rows, 0, rows, 0, rows]),
        tree_start=_int32([keys] * sessions),
        prefix_len=_int32([keys] * rows),
        key_len=_int32([keys] * sessions),
        tree_mask=torch.zeros(rows, 1, dtype=torch.int64),
        max_query_len=rows,
        max_key_len=keys,
        split_keys=64,
    )

    def poisoned(*sizes: Any, **options: Any) -> torch.Tensor:
        shape = torch.Size(sizes if isinstance(sizes[0], int) else sizes[0])
        return torch.full((shape.numel() + 2**20,), torch.nan, **options)[: shape.numel()].view(shape)

    query, key, value = (tensor.to(triton_device) for tensor in attention_tensors(rows, keys, (8, 1), 16))
    moved = on(triton_device, batch)
    monkeypatch.setattr(torch, "empty", poisoned)
    assert tree_attention(query, key, value, moved, scale=0.3).isfinite().all()


def _with_paths(batch: TreeAttentionBatch) -> TreeAttentionBatch:
    rows, words = batch.tree_mask.shape
    row = torch.arange(rows, device=batch.tree_mask.device)
    sessions = torch.searchsorted(batch.query_start, row, right=True).int() - 1
    paths = torch.empty((rows, 64 * words), dtype=torch.int32, device=row.device)
    gather_paths(batch.slot_table, sessions, batch.tree_start, batch.key_len, batch.tree_mask, paths)
    return replace(batch, paths=paths)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (25, 3.0)])
def test_paths_change_no_result(triton_device: torch.device, window: int, softcap: float) -> None:
    batch = _batch(split_keys=50)
    batch.slot_table[0, 3] = -4
    tensors = _tensors(batch, 3, 1, 16)
    expected = tree_attention_reference(*tensors, batch, scale=0.3, sliding_window=window, softcap=softcap)
    query, key, value = (tensor.to(triton_device) for tensor in tensors)
    moved = _with_paths(on(triton_device, batch))
    out = tree_attention(query, key, value, moved, scale=0.3, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


# Paths that lie across a split's end.
@pytest.mark.parametrize(("prefix", "window"), [(62, 0), (126, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_gives_the_bits_of_its_tokens_alone(
    triton_device: torch.device, prefix: int, window: int, dtype: torch.dtype
) -> None:
    if triton_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies no 16-bit numbers")
    # The path 0, 2, 5, 6, 8 among nodes of other branches.
    parents, path = [-1, 0, 0, 1, 1, 2, 5, 0, 6, 2], [0, 2, 5, 6, 8]
    sizes = {"split_keys": 64, "max_query_len": 64}
    batch = make_batch([Session(prefix, parents=parents)], num_slots=_SLOTS, **sizes)
    table = torch.nn.functional.pad(batch.slot_table, (0, 140 - batch.slot_table.shape[1]), value=-1)
    batch = replace(batch, slot_table=table, max_key_len=140)
    query, key, value = (tensor.to(triton_device, dtype) for tensor in _tensors(batch, 2, 1, 16))

    def attend(query: torch.Tensor, batch: TreeAttentionBatch) -> torch.Tensor:
        moved = _with_paths(on(triton_device, batch))
        return tree_attention(query, key, value, moved, scale=0.7, sliding_window=window)[: len(query)]

    together = attend(query, batch)
    alone_table = table.clone()
    alone_table[0, prefix : prefix + len(path)] = table[0, prefix + torch.tensor(path)]
    # numpy's products, which the interpreter runs, give a row other bits in another place: blank rows stand before it.
    blank = torch.zeros(10, dtype=torch.int32)
    for depth, node in enumerate(path):
        before, at = (blank[:node], node) if triton_device.type == "cpu" else (blank[:0], 0)
        step = replace(
            batch,
            slot_table=alone_table,
            query_start=_int32([0, at + 1]),
            tree_start=_int32([prefix + depth]),
            prefix_len=torch.cat([before, _int32([prefix + depth])]),
            key_len=_int32([prefix + depth + 1]),
            tree_mask=torch.cat([before, _int32([1])])[:, None].long(),
            positions=torch.cat([before, _int32([prefix + depth])]),
        )
        alone = attend(query[node - at : node + 1], step)[at]
        assert torch.equal(alone, together[node]), node
    # And as a chunk of a prompt, which has such rows in between.
    length = torch.zeros(10, dtype=torch.int32)
    length[path] = torch.arange(1, 6, dtype=torch.int32) + prefix
    chunk = replace(
        batch,
        slot_table=alone_table,
        tree_start=_int32([prefix + 5]),
        prefix_len=length,
        key_len=_int32([prefix + 5]),
        tree_mask=torch.zeros(10, 1, dtype=torch.int64),
        positions=(length - 1).clamp(min=0),
    )
    assert torch.equal(attend(query, chunk)[path], together[path])


@pytest.mark.parametrize("split_keys", [None, 192])
def test_trees_of_256_nodes(triton_device: torch.device, split_keys: int | None) -> None:
    # Nodes lie across the blocks of keys at an odd place; every value tells its node.
    parents = random_tree(256, 20)
    batch = make_batch([Session(37, parents=parents)], num_slots=300, split_keys=split_keys)
    value = torch.zeros(300, 1, 256)
    value[batch.slot_table[0, 37 : 37 + 256].long(), 0] = torch.eye(256)
    query, key = torch.zeros(256, 1, 256), torch.zeros(300, 1, 256)
    half = torch.float32 if triton_device.type == "cpu" else torch.bfloat16
    moved = [tensor.to(triton_device, half) for tensor in (query, key, value)]
    out = tree_attention(moved[0], moved[1], moved[2], on(triton_device, batch), scale=1.0)
    seen = (out[:, 0].cpu() > 0.001).long()
    spelled = [sum(1 << node for node in row.nonzero().flatten().tolist()) for row in seen]
    assert spelled == ancestor_bits(parents)
