"""Tree attention through FlashInfer: keys split in two on any machine, the answer where FlashInfer runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference
from outrider.kernels.tree_attention_flashinfer import tree_attention_flashinfer
from outrider.kernels.tree_attention_split import split_keys


@dataclass(frozen=True)
class Session:
    """`committed` keys in the prefix, then a tree of `nodes` or, at 0 nodes, a chunk of `rows` prefill rows."""

    committed: int
    nodes: int = 0
    rows: int = 0


MIXED = (Session(40, nodes=9), Session(0, rows=7), Session(33, rows=1), Session(20), Session(64, nodes=70))
_FREE_ROWS = 2


def make_batch(sessions: tuple[Session, ...] = MIXED, *, num_slots: int = 400, **changes: Any) -> TreeAttentionBatch:
    """Slots in random order; a row that sees nothing, rows of no session and slots out of range are among them."""
    key_len = [session.committed + (session.nodes or session.rows) for session in sessions]
    query_len = [session.nodes or session.rows for session in sessions]
    words = max(1, -(-max(session.nodes for session in sessions) // 64))
    order, table = torch.randperm(num_slots).int(), torch.full((len(sessions), max(key_len) + 3), -1).int()
    slot_positions = torch.zeros(num_slots, dtype=torch.int32)
    prefix_len, positions, masks, taken = [], [], [], 0
    for number, (session, keys) in enumerate(zip(sessions, key_len, strict=True)):
        table[number, :keys] = order[taken : taken + keys]
        taken += keys
        at = list(range(session.committed))
        if session.nodes:
            bits, depths = _tree(session.nodes)
            at += [session.committed + depth for depth in depths]
            masks += [[(row >> (64 * word)) & (2**64 - 1) for word in range(words)] for row in bits]
            prefix_len += [session.committed] * session.nodes
        else:
            at += range(session.committed, keys)
            masks += [[0] * words] * session.rows
            prefix_len += range(session.committed + 1, keys + 1)
        positions += at[session.committed :]
        slot_positions[table[number, :keys].long()] = torch.tensor(at, dtype=torch.int32)
    assert taken <= num_slots
    table[0, 2], table[1, 1] = -5, num_slots
    prefix_len[sum(query_len) - 2], masks[-2] = 0, [0] * words
    signed = [[word - 2**64 if word >= 2**63 else word for word in row] for row in masks]
    columns: dict[str, Any] = {
        "slot_table": table,
        "query_start": torch.tensor([0, *query_len]).cumsum(0).int(),
        "tree_start": torch.tensor([session.committed for session in sessions]).int(),
        "prefix_len": torch.tensor([*prefix_len, *[5] * _FREE_ROWS]).int(),
        "key_len": torch.tensor(key_len).int(),
        "tree_mask": torch.tensor([*signed, *[[-1] * words] * _FREE_ROWS]),
        "max_query_len": max(query_len),
        "max_key_len": max(key_len),
        "positions": torch.tensor([*positions, *[0] * _FREE_ROWS]).int(),
        "slot_positions": slot_positions,
    }
    return TreeAttentionBatch(**{**columns, **changes})


def _tree(nodes: int) -> tuple[list[int], list[int]]:
    """Ancestor bits (self included) and depths of a random tree whose first node is the root."""
    bits, depths = [1], [0]
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 6), node, ()))
        bits.append(bits[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return bits, depths


def on(device: str, batch: TreeAttentionBatch) -> TreeAttentionBatch:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    moved = {name: column.to(device) for name, column in columns.items() if isinstance(column, torch.Tensor)}
    return replace(batch, **moved)


def tensors(
    batch: TreeAttentionBatch, heads: int, heads_kv: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert batch.slot_positions is not None
    query = torch.randn(batch.prefix_len.shape[0], heads, head_dim)
    key, value = torch.randn(2, batch.slot_positions.shape[0], heads_kv, head_dim)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@pytest.mark.parametrize("window", [0, 1, 12])
@pytest.mark.parametrize(
    "sessions", [MIXED, (Session(9, rows=1), Session(3, rows=1)), (Session(0, rows=6), Session(0, rows=2))]
)
def test_split_keys_hold_every_key_that_a_row_sees_once(sessions: tuple[Session, ...], window: int) -> None:
    batch = make_batch(sessions)
    keys = split_keys(batch, num_slots=400, sliding_window=window)
    query_start, shared_start, masked_start = (
        column.tolist() for column in (keys.query_start, keys.shared_start, keys.masked_start)
    )
    assert keys.rows == query_start[-1] and keys.shared_slots.dtype == keys.masked_slots.dtype == torch.int32
    # Equal scores and values that name their slot: where a row of the reference is not zero, it saw.
    zeros = torch.zeros(400, 1, 400)
    query = torch.zeros(batch.prefix_len.shape[0], 1, 400)
    named = torch.eye(400)[:, None]
    spelled = tree_attention_reference(query, zeros, named, batch, scale=1.0, sliding_window=window)[:, 0]
    cell = 0
    for session in range(len(sessions)):
        shared = keys.shared_slots[shared_start[session] : shared_start[session + 1]].tolist()
        masked = keys.masked_slots[masked_start[session] : masked_start[session + 1]]
        for row in range(query_start[session], query_start[session + 1]):
            by_mask = masked[keys.mask[cell : cell + len(masked)]].tolist()
            cell += len(masked)
            assert sorted(shared + by_mask) == spelled[row].nonzero().flatten().tolist()
    assert cell == keys.mask.numel()


def test_split_keys_leave_a_long_prefix_to_the_pass_without_a_mask() -> None:
    batch = make_batch((Session(200, nodes=8), Session(100, rows=16)))
    batch.prefix_len[22] = 115  # the row that saw nothing
    keys = split_keys(batch, num_slots=400, sliding_window=0)
    # Of either session one slot is out of range; the chunk's first row sees its own key.
    assert keys.shared_start.tolist() == [0, 199, 199 + 100]
    assert keys.masked_start.tolist() == [0, 8, 8 + 15]


def test_split_keys_take_batches_without_mask_words() -> None:
    batch = make_batch((Session(9, rows=3), Session(3, rows=1)))
    without = split_keys(replace(batch, tree_mask=batch.tree_mask[:, :0]), num_slots=400, sliding_window=0)
    assert torch.equal(without.mask, split_keys(batch, num_slots=400, sliding_window=0).mask)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"),
    [
        (96, torch.bfloat16, "query: head size 96 given, FlashInfer takes"),
        (64, torch.float32, "query: dtype torch.float32 given, FlashInfer takes torch.float16 and torch.bfloat16"),
        (64, torch.float16, "query: device cpu given, FlashInfer needs a CUDA device"),
    ],
)
def test_what_flashinfer_does_not_take_is_named(head_dim: int, dtype: torch.dtype, message: str) -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=message):
        tree_attention_flashinfer(*tensors(batch, 4, 2, head_dim, dtype), batch, scale=1.0)


def test_wrong_shapes_are_named() -> None:
    batch = make_batch()
    query, key, value = tensors(batch, 4, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match=r"value_cache: shape \[400, 1, 64\] given, \[400, 2, 64\] needed"):
        tree_attention_flashinfer(query, key, value[:, :1], batch, scale=1.0)
    with pytest.raises(ValueError, match="query: 3 heads given, a multiple of Hkv = 2 needed"):
        tree_attention_flashinfer(query[:, :3], key, value, batch, scale=1.0)
    with pytest.raises(ValueError, match="no positions or slot_positions given"):
        tree_attention_flashinfer(query, key, value, replace(batch, positions=None), scale=1.0, sliding_window=4)


# --------------------------------------------------------------------------------------------------------------- CUDA

LONG = (Session(1500, nodes=17), Session(0, rows=300), Session(700, rows=40), Session(2600, rows=1), Session(90))
WIDE = (Session(31, nodes=200), Session(1000, nodes=64), Session(5, nodes=1), Session(800, nodes=8))


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 3.0)])
def test_the_reference_gives_the_same_on_cuda(window: int, softcap: float) -> None:
    _needs_cuda()
    batch = make_batch()
    inputs = tensors(batch, 4, 2, 32)
    options: dict[str, Any] = {"scale": 0.3, "sliding_window": window, "softcap": softcap}
    query, key, value = (tensor.cuda() for tensor in inputs)
    out = tree_attention_reference(query, key, value, on("cuda", batch), **options)
    torch.testing.assert_close(out.cpu(), tree_attention_reference(*inputs, batch, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)  # FlashInfer compiles its kernels at their first use
@pytest.mark.parametrize(
    ("head_dim", "dtype", "softcap"), [(128, torch.bfloat16, 0.0), (64, torch.float16, 0.0), (128, torch.bfloat16, 5.0)]
)
def test_triton_flashinfer_and_reference_agree(head_dim: int, dtype: torch.dtype, softcap: float) -> None:
    _needs_flashinfer()
    for sessions in (MIXED, LONG, WIDE, (Session(3, rows=1), Session(9, rows=1)), (Session(0, rows=3),) * 2):
        batch = on("cuda", make_batch(sessions, num_slots=6000))
        for heads, heads_kv in ((8, 2), (6, 1), (4, 4)):
            query, key, value = (tensor.cuda() for tensor in tensors(batch, heads, heads_kv, head_dim, dtype))
            for window in (0, 37):
                options: dict[str, Any] = {"scale": head_dim**-0.5, "sliding_window": window, "softcap": softcap}
                expected = tree_attention_reference(query, key, value, batch, **options)
                for operator in (tree_attention, tree_attention_flashinfer):
                    out = operator(query, key, value, batch, **options)
                    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
                    assert (out[int(batch.query_start[-1]) - 2] == 0).all()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flashinfer_plans_once_a_batch_and_anew_for_the_next() -> None:
    _needs_flashinfer()
    first, second = (on("cuda", make_batch(sessions, num_slots=6000)) for sessions in (LONG, WIDE))
    for batch in (first, first, second, first):
        # A layer after the other: other tensors, the same plan.
        query, key, value = (tensor.cuda() for tensor in tensors(batch, 8, 2, 128, torch.bfloat16))
        out = tree_attention_flashinfer(query, key, value, batch, scale=0.1)
        expected = tree_attention_reference(query, key, value, batch, scale=0.1)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    query, key, value = (tensor.cuda() for tensor in tensors(first, 8, 2, 128, torch.bfloat16))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # a plan would wait for the host, which a capture forbids
        tree_attention_flashinfer(query, key, value, first, scale=0.1)


def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def _needs_flashinfer() -> None:
    _needs_cuda()
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs FlashInfer")
