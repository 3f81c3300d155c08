"""Tree attention at real sizes, on a GPU: every kernel, shape and dtype against the reference, bits, and graphs."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.kernels.attention_batches import Session, attention_tensors, make_batch, on

from outrider.kernels import backend
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(backend.INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# (rows, prefix, whether the rows are a tree; otherwise they are a chunk of a prompt)
_Sessions = list[tuple[int, int, bool]]


def _batch(sessions: _Sessions, free_rows: int = 0, **changes: Any) -> tuple[TreeAttentionBatch, int]:
    """The sessions' batch on the GPU, and the number of slots."""
    made = [Session(prefix, nodes=rows) if tree else Session(prefix, rows=rows) for rows, prefix, tree in sessions]
    num_slots = sum(rows + prefix for rows, prefix, _ in sessions) + 50
    return on("cuda", make_batch(made, num_slots=num_slots, free_rows=free_rows, **changes)), num_slots


_tensors = partial(attention_tensors, device="cuda")


def _agree(
    batch: TreeAttentionBatch, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], **numbers: float
) -> torch.Tensor:
    """The kernel's result, after comparison with the reference and with poison in fresh memory."""
    options: Any = {"scale": tensors[0].shape[2] ** -0.5, **numbers}
    query, key, value = (tensor.float() for tensor in tensors)
    expected = tree_attention_reference(query, key, value, batch, **options)
    poison = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
    del poison
    out = tree_attention(*tensors, batch, **options)
    tolerance = _TOLERANCE[tensors[0].dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    return out


_MIXED: _Sessions = [(16, 3000, True), (1, 130, True), (70, 901, False), (64, 64, True), (3, 0, True), (300, 5, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "heads_kv", "head_dim"), [(8, 8, 64), (12, 4, 96), (32, 8, 128), (8, 1, 128), (7, 1, 64), (8, 2, 256)]
)
def test_mixed_batches(heads: int, heads_kv: int, head_dim: int, dtype: torch.dtype) -> None:
    batch, num_slots = _batch(_MIXED, free_rows=37)
    out = _agree(batch, _tensors(454 + 37, num_slots, (heads, heads_kv), head_dim, dtype))
    assert (out[454:] == 0).all()


@pytest.mark.parametrize("nodes", [1, 7, 8, 16, 33, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("prefix", [0, 63, 4097])
def test_one_tree(nodes: int, prefix: int) -> None:
    batch, num_slots = _batch([(nodes, prefix, True)])
    _agree(batch, _tensors(nodes, num_slots, (32, 8), 128, torch.bfloat16))


@pytest.mark.parametrize("sessions", [2, 5, 33, 257])
def test_many_trees(sessions: int) -> None:
    lengths = torch.randint(0, 2000, (sessions,)).tolist()
    batch, num_slots = _batch([(1 + length % 64, length, True) for length in lengths])
    rows = int(batch.query_start[-1])
    _agree(batch, _tensors(rows, num_slots, (8, 2), 128, torch.bfloat16))


@pytest.mark.parametrize(("rows", "prefix"), [(1, 0), (100, 0), (1000, 0), (513, 2000), (2500, 700)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_of_prompts(rows: int, prefix: int, head_dim: int) -> None:
    batch, num_slots = _batch([(rows, prefix, False)])
    _agree(batch, _tensors(rows, num_slots, (8, 2), head_dim, torch.bfloat16))


@pytest.mark.parametrize(("window", "softcap"), [(100, 0.0), (1500, 0.0), (0, 2.0), (700, 20.0)])
@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_windows_and_caps(window: int, softcap: float, head_dim: int) -> None:
    batch, num_slots = _batch([*_MIXED, (20, 9000, True)])
    tensors = _tensors(474, num_slots, (8, 2), head_dim, torch.float16)
    _agree(batch, tensors, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_eight_bit_caches(head_dim: int) -> None:
    batch, num_slots = _batch(_MIXED)
    query, key, value = _tensors(454, num_slots, (8, 2), head_dim, torch.bfloat16)
    key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e4m3fn)
    _agree(batch, (query, key, value), key_scale=0.5, value_scale=2.0)


def test_contexts_of_128k() -> None:
    batch, num_slots = _batch([(64, 131072 - 64, True), (2, 100, True)])
    _agree(batch, _tensors(66, num_slots, (8, 2), 128, torch.bfloat16))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_places_beyond_32_bits(softcap: float, heads_first: bool) -> None:
    # Caches with room between the slots, or between the heads: the last ones lie beyond 2^31 elements.
    batch, num_slots = _batch([(16, 500, True)])
    query, key, value = _tensors(16, num_slots, (9, 3), 128, torch.bfloat16)
    apart = 2**31 // (2 if heads_first else num_slots) // 2048 * 2048 + 4096
    places = apart * (3 if heads_first else num_slots)
    room = torch.empty(places, dtype=torch.bfloat16, device="cuda")
    strided = room.as_strided((num_slots, 3, 128), (128, apart, 1) if heads_first else (apart, 128, 1))
    strided.copy_(key)
    assert places > 2**31
    out = tree_attention(query, strided, value, batch, scale=0.1, softcap=softcap)
    torch.testing.assert_close(out, tree_attention(query, key, value, batch, scale=0.1, softcap=softcap))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_caches_of_one_slot(softcap: float) -> None:
    # Triton compiles an argument of 1 as a constant.
    batch, _ = _batch([(5, 100, True)])
    batch = replace(batch, slot_table=torch.zeros_like(batch.slot_table))
    query, key, value = _tensors(5, 1, (8, 2), 128, torch.bfloat16)
    out = tree_attention(query, key, value, batch, scale=0.1, softcap=softcap)
    torch.testing.assert_close(out, value.repeat_interleave(4, 1).expand_as(out), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("nodes", [16, 64])
def test_strays_and_poison(nodes: int) -> None:
    batch, num_slots = _batch([(nodes, 2000, True), (nodes, 100, True), (nodes, 5000, True)])
    tensors = _tensors(3 * nodes, num_slots, (32, 8), 128, torch.bfloat16)
    used = torch.zeros(num_slots, dtype=torch.bool, device="cuda")
    table = batch.slot_table
    used[table[(table >= 0) & (table < num_slots)].long()] = True
    for cache in tensors[1:]:
        cache[~used] = float("nan")
    clean = _agree(batch, tensors)
    # A copy: the reference keeps what it derived from a batch.
    table = table.clone()
    table[0, 70], table[2, 4999], table[2, 5003] = -1, num_slots, 2**31 - 1
    out = _agree(replace(batch, slot_table=table), tensors)
    # Only sessions with strays change, and the whole batch stays finite.
    assert torch.equal(out[nodes : 2 * nodes], clean[nodes : 2 * nodes])


def test_lengths_out_of_range_touch_nothing_foreign() -> None:
    batch, num_slots = _batch([(16, 300, True), (16, 700, True)])
    tensors = _tensors(32, num_slots, (8, 2), 128, torch.bfloat16)
    for name, values in (
        ("key_len", [2**31 - 1, -5]),
        ("tree_start", [-(2**31), 2**31 - 100]),
        ("query_start", [-9, 40, 2**31 - 1]),
        ("query_start", [30, 10, 5]),
        ("query_start", [0, 32, 0]),
        ("prefix_len", [2**31 - 1, -3] * 16),
    ):
        changed = replace(batch, **{name: torch.tensor(values, dtype=torch.int32, device="cuda")})
        tree_attention(*tensors, changed, scale=0.1)
        torch.cuda.synchronize()


def _moved_session(batch: TreeAttentionBatch, order: list[int], rows: int) -> TreeAttentionBatch:
    """The same sessions, all with `rows` rows, in another order."""
    picked = torch.tensor(order, device="cuda")
    lines = (picked[:, None] * rows + torch.arange(rows, device="cuda")).flatten()
    by_row = {name: getattr(batch, name)[lines] for name in ("prefix_len", "tree_mask", "positions")}
    by_session = {name: getattr(batch, name)[picked] for name in ("slot_table", "tree_start", "key_len")}
    return replace(batch, **by_row, **by_session)


@pytest.mark.parametrize("nodes", [1, 16, 64])
@pytest.mark.parametrize("split_keys", [None, 512])
def test_same_bits_run_to_run_and_anywhere_in_the_batch(nodes: int, split_keys: int | None) -> None:
    lengths = [4000, 100, 900, 4000, 2500, 1, 3999]
    batch, num_slots = _batch([(nodes, length, True) for length in lengths], split_keys=split_keys)
    query, key, value = _tensors(7 * nodes, num_slots, (32, 8), 128, torch.bfloat16)
    out = tree_attention(query, key, value, batch, scale=0.09)
    for _ in range(3):
        assert torch.equal(tree_attention(query, key, value, batch, scale=0.09), out)
    order = [6, 2, 5, 0, 1, 4, 3]
    lines = (torch.tensor(order)[:, None] * nodes + torch.arange(nodes)).flatten().cuda()
    elsewhere = tree_attention(query[lines], key, value, _moved_session(batch, order, nodes), scale=0.09)
    assert torch.equal(elsewhere, out[lines])


def test_fixed_splits_do_not_depend_on_the_batch() -> None:
    batch, num_slots = _batch([(16, 3000, True), (64, 700, True), (5, 8000, True)], split_keys=1024)
    query, key, value = _tensors(85, num_slots, (32, 8), 128, torch.bfloat16)
    together = tree_attention(query, key, value, batch, scale=0.09)
    for session, (begin, end) in enumerate([(0, 16), (16, 80), (80, 85)]):
        one = slice(session, session + 1)
        alone = replace(
            batch,
            **{name: getattr(batch, name)[one] for name in ("slot_table", "tree_start", "key_len")},
            **{name: getattr(batch, name)[begin:end] for name in ("prefix_len", "tree_mask", "positions")},
            query_start=torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            max_query_len=end - begin,
            max_key_len=int(batch.key_len[session]),
        )
        assert torch.equal(tree_attention(query[begin:end], key, value, alone, scale=0.09), together[begin:end])


@pytest.mark.parametrize("nodes", [16, 64])
def test_a_graph_follows_the_contents(nodes: int) -> None:
    batch, num_slots = _batch([(nodes, 3000, True), (nodes, 800, True), (nodes, 5, True)])
    tensors = _tensors(3 * nodes, num_slots, (32, 8), 128, torch.bfloat16)
    tree_attention(*tensors, batch, scale=0.09)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(*tensors, batch, scale=0.09)
    # Other lengths, rows and trees than those of the capture, within the same bounds.
    changed, _ = _batch([(nodes, 100, True), (nodes // 2, 2900, True), (3, 0, True)])
    columns = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), torch.Tensor)]
    for name in columns:
        if name not in ("slot_table", "slot_positions"):
            new = getattr(changed, name)
            getattr(batch, name)[: len(new)].copy_(new)
    graph.replay()
    query, key, value = (tensor.float() for tensor in tensors)
    expected = tree_attention_reference(query, key, value, batch, scale=0.09)
    torch.testing.assert_close(out.float(), expected, rtol=1.6e-2, atol=1.6e-2)
