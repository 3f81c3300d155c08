"""Tree attention through FlashInfer: keys split in two on any machine, the answer where FlashInfer runs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.attention_batches import Session, attention_tensors, make_batch, on

from outrider.kernels.attention.flashinfer import tree_attention_flashinfer
from outrider.kernels.attention.split import split_keys
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference

MIXED = (Session(40, nodes=9), Session(0, rows=7), Session(33, rows=1), Session(20), Session(64, nodes=70))
_FREE_ROWS = 2


def batch_of(sessions: tuple[Session, ...] = MIXED, *, num_slots: int = 400) -> TreeAttentionBatch:
    """A batch with a row that sees nothing, rows of no session and slots out of range."""
    batch = make_batch(sessions, num_slots=num_slots, free_rows=_FREE_ROWS)
    batch.slot_table[0, 2], batch.slot_table[1, 1] = -5, num_slots
    last = int(batch.query_start[-1])
    batch.prefix_len[last - 2] = 0
    batch.tree_mask[last - 2] = 0
    return batch


def tensors(
    batch: TreeAttentionBatch, heads: int, heads_kv: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert batch.slot_positions is not None
    return attention_tensors(len(batch.prefix_len), len(batch.slot_positions), (heads, heads_kv), head_dim, dtype)


@pytest.mark.parametrize("window", [0, 1, 12])
@pytest.mark.parametrize(
    "sessions", [MIXED, (Session(9, rows=1), Session(3, rows=1)), (Session(0, rows=6), Session(0, rows=2))]
)
def test_split_keys_hold_every_key_that_a_row_sees_once(sessions: tuple[Session, ...], window: int) -> None:
    batch = batch_of(sessions)
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
    batch = batch_of((Session(200, nodes=8), Session(100, rows=16)))
    batch.prefix_len[22] = 115  # the row that saw nothing
    keys = split_keys(batch, num_slots=400, sliding_window=0)
    # Of either session one slot is out of range; the chunk's first row sees its own key.
    assert keys.shared_start.tolist() == [0, 199, 199 + 100]
    assert keys.masked_start.tolist() == [0, 8, 8 + 15]


def test_split_keys_take_batches_without_mask_words() -> None:
    batch = batch_of((Session(9, rows=3), Session(3, rows=1)))
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
    batch = batch_of()
    with pytest.raises(ValueError, match=message):
        tree_attention_flashinfer(*tensors(batch, 4, 2, head_dim, dtype), batch, scale=1.0)


def test_wrong_shapes_are_named() -> None:
    batch = batch_of()
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
@pytest.mark.slow
@pytest.mark.timeout(900)  # FlashInfer compiles its kernels at their first use
@pytest.mark.parametrize(
    ("head_dim", "dtype", "softcap"), [(128, torch.bfloat16, 0.0), (64, torch.float16, 0.0), (128, torch.bfloat16, 5.0)]
)
def test_triton_flashinfer_and_reference_agree(head_dim: int, dtype: torch.dtype, softcap: float) -> None:
    _needs_flashinfer()
    for sessions in (MIXED, LONG, WIDE, (Session(3, rows=1), Session(9, rows=1)), (Session(0, rows=3),) * 2):
        batch = on("cuda", batch_of(sessions, num_slots=6000))
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
    first, second = (on("cuda", batch_of(sessions, num_slots=6000)) for sessions in (LONG, WIDE))
    for batch in (first, first, second, first):
        # A layer after the other: other tensors, the same plan.
        query, key, value = (tensor.cuda() for tensor in tensors(batch, 8, 2, 128, torch.bfloat16))
        out = tree_attention_flashinfer(query, key, value, batch, scale=0.1)
        expected = tree_attention_reference(query, key, value, batch, scale=0.1)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    query, key, value = (tensor.cuda() for tensor in tensors(first, 8, 2, 128, torch.bfloat16))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # a plan would wait for the host, which a capture forbids
        tree_attention_flashinfer(query, key, value, first, scale=0.1)


def _needs_flashinfer() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs FlashInfer")
