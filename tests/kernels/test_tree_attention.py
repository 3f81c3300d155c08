from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from outrider.kernels import tree_attention as module
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
    query = torch.randn(batch.prefix_len.shape[0], heads, head_dim)
    key, value = torch.randn(2, _SLOTS, heads_kv, head_dim)
    return query.to(dtype), key.to(dtype), value.to(dtype)


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


def _moved(batch: TreeAttentionBatch, device: torch.device) -> TreeAttentionBatch:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    return replace(
        batch,
        **{name: column.to(device) for name, column in columns.items() if isinstance(column, torch.Tensor)},
    )


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
    tensors = _tensors(batch, *shape)
    expected = tree_attention_reference(*tensors, batch, scale=0.3, sliding_window=window, softcap=softcap)
    query, key, value = (tensor.to(triton_device) for tensor in tensors)
    moved = _moved(batch, triton_device)
    out = tree_attention(query, key, value, moved, scale=0.3, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_triton_takes_strides(triton_device: torch.device) -> None:
    batch = _batch(split_keys=64)
    query, key, value = _tensors(batch, 4, 2, 16)
    expected = tree_attention_reference(query, key, value, batch, scale=0.25)
    strided = query.to(triton_device).transpose(0, 1).contiguous().transpose(0, 1)
    caches = torch.stack([key, value], dim=-1).to(triton_device)
    table = torch.stack([batch.slot_table] * 2, dim=-1)[..., 0]
    moved = _moved(replace(batch, slot_table=table), triton_device)
    out = tree_attention(strided, caches[..., 0], caches[..., 1], moved, scale=0.25)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [None, 64])
def test_cuda_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype, splits: int | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    batch = _batch(split_keys=splits)
    tensors = _tensors(batch, 8, 2, head_dim, dtype)
    expected = tree_attention_reference(*tensors, batch, scale=head_dim**-0.5)
    query, key, value = (tensor.to(device) for tensor in tensors)
    out = tree_attention(query, key, value, _moved(batch, device), scale=head_dim**-0.5)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_cuda_launches_replay_from_a_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    batch = _moved(_batch(split_keys=64), device)
    query, key, value = (tensor.to(device) for tensor in _tensors(batch, 8, 2, 64))
    tree_attention(query, key, value, batch, scale=0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(query, key, value, batch, scale=0.125)
    query.normal_()
    batch.tree_mask[:5, 0] = 1
    graph.replay()
    torch.testing.assert_close(out, tree_attention(query, key, value, batch, scale=0.125))


def test_masks_spelled_out_by_values() -> None:
    # With equal scores a row is the mean of the values it sees; distinct powers of two tell which those are.
    tree = torch.tensor([[0b1], [0b11], [0b101], [0b1101]])
    batch = TreeAttentionBatch(
        slot_table=torch.arange(6, dtype=torch.int32)[None],
        query_start=_int32([0, 4]),
        tree_start=_int32([2]),
        prefix_len=_int32([2, 2, 2, 2]),
        key_len=_int32([6]),
        tree_mask=tree,
        max_query_len=4,
        max_key_len=6,
    )
    query, key = torch.zeros(4, 1, 1), torch.zeros(6, 1, 1)
    value = 2.0 ** torch.arange(6).view(6, 1, 1)
    out = tree_attention(query, key, value, batch, scale=1.0).flatten()
    spelled = [round(float(out[row]) * (2 + bin(int(tree[row, 0])).count("1"))) for row in range(4)]
    assert spelled == [(int(word) << 2) | 0b11 for word in tree[:, 0].tolist()]


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
    assert all(session.slots is None for session in batch.cpu_plan(_SLOTS, 0).sessions)
    order = torch.randperm(_SLOTS)
    place = torch.argsort(order)
    scattered = replace(batch, slot_table=place[batch.slot_table.long()].int())
    assert any(session.slots is not None for session in scattered.cpu_plan(_SLOTS, 0).sessions)
    expected = tree_attention(query, key, value, batch, scale=0.2)
    torch.testing.assert_close(tree_attention(query, key[order], value[order], scattered, scale=0.2), expected)


def test_slots_out_of_range_are_never_read() -> None:
    batch = _batch()
    batch.slot_table[0, 3], batch.slot_table[0, 71], batch.slot_table[3, 30] = -4, 2**31 - 1, _SLOTS
    tensors = _tensors(batch, 3, 1, 16)
    out = tree_attention(*tensors, batch, scale=0.3)
    torch.testing.assert_close(out.double(), _brute_force(tensors, batch, 0.3, 0, 0.0), rtol=1e-5, atol=1e-5)


def test_half_precision_comes_back_in_its_dtype() -> None:
    batch = _batch()
    tensors = _tensors(batch, 4, 2, 16, torch.bfloat16)
    out = tree_attention(*tensors, batch, scale=0.3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), _brute_force(tensors, batch, 0.3, 0, 0.0), rtol=1e-2, atol=1e-2)


def test_splits_fill_the_device_and_respect_the_callers_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "_multiprocessors", lambda device: 100)
    long = _batch(slot_table=torch.zeros(5, 32768, dtype=torch.int32), max_key_len=32768)
    device = torch.device("cpu")
    few, many = (module._keys_per_split(long, programs, 64, device) for programs in (8, 400))
    assert math.ceil(32768 / few) == 25 and many == 32768
    assert module._keys_per_split(replace(long, split_keys=1000), 8, 64, device) == 1024
    assert module._keys_per_split(replace(long, max_key_len=300), 8, 64, device) == 256


@pytest.mark.parametrize(
    ("place", "tensor", "message"),
    [
        (0, torch.zeros(4, 4, 16), r"query: shape \[4, 4, 16\] given, \[13, H, D\] needed"),
        (0, torch.zeros(13, 3, 16), "query: 3 heads given, a multiple of Hkv = 2 needed"),
        (1, torch.zeros(_SLOTS, 2, 8), r"key_cache: shape .* needed"),
        (2, torch.zeros(_SLOTS, 1, 16), r"value_cache: shape \[200, 1, 16\] given, \[200, 2, 16\] needed"),
        (2, torch.zeros(_SLOTS, 2, 16).double(), "value_cache: dtype torch.float64 given, torch.float32"),
    ],
)
def test_bad_tensors_are_named(place: int, tensor: torch.Tensor, message: str) -> None:
    batch = _batch()
    tensors = list(_tensors(batch, 4, 2, 16))
    tensors[place] = tensor
    with pytest.raises(ValueError, match=message):
        tree_attention(tensors[0], tensors[1], tensors[2], batch, scale=1.0)


def test_windows_need_positions() -> None:
    batch = _batch(positions=None)
    with pytest.raises(ValueError, match="no positions or slot_positions given"):
        tree_attention(*_tensors(batch, 4, 2, 16), batch, scale=1.0, sliding_window=4)
