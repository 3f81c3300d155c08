# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.attention_batches import Session, make_batch, on

from outrider.kernels import backend
from outrider.kernels.attention.rotary_store import rotary_store
from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.linear.gated_activation import gated_activation
from outrider.kernels.linear.paired_norm import paired_norm
from outrider.kernels.linear.residual_norm import residual_norm
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention


@jit
def _slow_copy_kernel(
    out_ptr,  # [size] 16-bit numbers
    in_ptr,  # [size]
    size,
    SPINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lets the next launch begin at once, and then takes its time."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(in_ptr + at, mask=at < size, other=0)
    for _ in range(SPINS):
        # Each load waits for the one before, whose value says whether there is one.
        value = tl.load(in_ptr + at, mask=(at < size) & (value < 1e30), other=0, volatile=True)
    tl.store(out_ptr + at, value, mask=at < size)


def _slowly(source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`source`, copied to `out` some 30 us after the launch that follows may have begun."""
    blocks = triton.cdiv(source.numel(), 1024)
    _slow_copy_kernel[(blocks,)](out, source, source.numel(), SPINS=50, BLOCK=1024, num_warps=4, launch_pdl=True)
    return out


_ROWS, _HEADS, _HEADS_KV, _DIM, _KEYS = 16, 8, 2, 64, 900
_COLUMNS = (_HEADS + 2 * _HEADS_KV) * _DIM


def _batch() -> TreeAttentionBatch:
    """Rows that stand one below the other."""
    return on("cuda", make_batch([Session(_KEYS, parents=range(-1, _ROWS - 1))], num_slots=1000))


def _operators() -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], object]]]:
    """Return by name what each operator reads from the launch before it, and the operator as a function of that."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    batch, weight = _batch(), torch.ones(_COLUMNS, device=device, dtype=dtype)
    caches = torch.randn(2, 1000, _HEADS_KV, _DIM, device=device, dtype=dtype)
    table = torch.randn(1000, 2, _DIM // 2, device=device)
    slots = batch.slot_table[0, _KEYS : _KEYS + _ROWS].long()
    rows = torch.randn(_ROWS, _COLUMNS, device=device, dtype=dtype)
    query = torch.randn(_ROWS, _HEADS, _DIM, device=device, dtype=dtype)

    def store(qkv: torch.Tensor) -> object:
        assert batch.positions is not None
        query = rotary_store(qkv[None], table, batch.positions, slots, caches[0], caches[1], heads=_HEADS)
        return query, caches.clone()

    def attend(window: int) -> Callable[[torch.Tensor], object]:
        return lambda query: tree_attention(query, caches[0], caches[1], batch, scale=0.1, sliding_window=window)

    def pair(hidden: torch.Tensor) -> object:
        return paired_norm(hidden, slots % _ROWS, rows, table_weight=weight, hidden_weight=weight, eps=1e-5)

    return {
        "rotary_store": (rows, store),
        "gated_activation": (rows, lambda gate_up: gated_activation(gate_up, activation="silu")),
        "tree_attention": (query, attend(0)),
        "tree_attention, window": (query, attend(700)),
        "residual_norm": (rows, lambda hidden: residual_norm(hidden, None, weight, eps=1e-5)),
        "paired_norm": (rows, pair),
    }


@pytest.mark.gpu
@pytest.mark.skipif(backend.INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["rotary_store", "gated_activation", "tree_attention", "tree_attention, window",
                                  "residual_norm", "paired_norm"])  # fmt: skip
def test_a_launch_waits_for_a_slow_one_before_it(name: str) -> None:
    source, operator = _operators()[name]
    expected = operator(source)
    arrived = _slowly(source, torch.empty_like(source))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = operator(_slowly(source, arrived))
    for _ in range(3):
        arrived.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
