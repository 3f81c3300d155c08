"""What the small kernels of a decoder step take: `python benchmarks/decoder_kernels.py`, on one CUDA GPU.

They are launched one after the other as in a step, many in one CUDA graph, so that a launch may begin under the end of
the one before; the first column of times is without that. Data stays in the L2 cache, where the product before left it.
Sizes are those of Llama 3.1 8B, bfloat16.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from outrider.kernels import gated_activation, residual_norm, rotary_store
from outrider.kernels.slot_updates import gather_slot_rows, store_positions

_HIDDEN, _FEED_FORWARD, _HEADS, _HEADS_KV, _HEAD_DIM = 4096, 14336, 32, 8, 128
_LAUNCHES, _REPLAYS = 64, 21
_COPY_BYTES_PER_US = 4.25e6

MAX_KEYS = 131072

Run = Callable[[], object]
Build = Callable[[int, int, torch.device], tuple[Run, int]]


def _parts(rows: int, columns: int, parts: int, device: torch.device) -> torch.Tensor:
    dtype = torch.float32 if parts > 1 else torch.bfloat16
    return torch.randn(parts, rows, columns, device=device, dtype=dtype) * 1e-3


def residual_norm_run(rows: int, parts: int, device: torch.device) -> tuple[Run, int]:
    """The launch, and the bytes it must move."""
    hidden = torch.randn(rows, _HIDDEN, device=device, dtype=torch.bfloat16)
    addend, weight = _parts(rows, _HIDDEN, parts, device), torch.ones(_HIDDEN, device=device, dtype=torch.bfloat16)
    moved = addend.nbytes + 3 * hidden.nbytes
    return lambda: residual_norm.residual_norm(hidden, addend, weight, eps=1e-5), moved


def rotary_store_run(rows: int, parts: int, device: torch.device) -> tuple[Run, int]:
    """As `residual_norm_run`."""
    columns = (_HEADS + 2 * _HEADS_KV) * _HEAD_DIM
    caches = torch.zeros(2, max(rows, 1000), _HEADS_KV, _HEAD_DIM, device=device, dtype=torch.bfloat16)
    qkv, table = _parts(rows, columns, parts, device), torch.randn(8192, 2, _HEAD_DIM // 2, device=device)
    positions = torch.randint(0, 8192, (rows,), device=device, dtype=torch.int32)
    slots = torch.randperm(caches.shape[1], device=device)[:rows].contiguous()
    moved = qkv.nbytes + 2 * rows * columns
    return lambda: rotary_store.rotary_store(qkv, table, positions, slots, *caches.unbind(), heads=_HEADS), moved


def gated_activation_run(rows: int, _parts: int, device: torch.device) -> tuple[Run, int]:
    """As `residual_norm_run`."""
    gate_up = torch.randn(rows, 2 * _FEED_FORWARD, device=device, dtype=torch.bfloat16)
    return lambda: gated_activation.gated_activation(gate_up, activation="silu"), gate_up.nbytes * 3 // 2


def slot_runs(sessions: int, keys: int, device: torch.device) -> Iterator[tuple[str, Run]]:
    """The launches at the start of a step, with eight rows a session."""
    table = torch.zeros(257, MAX_KEYS, device=device, dtype=torch.int32)
    out = torch.zeros(sessions, MAX_KEYS, device=device, dtype=torch.int32)
    index = torch.arange(8 * sessions, device=device, dtype=torch.int32)
    key_len, positions = torch.full_like(index[:sessions], keys), torch.zeros(10000, device=device, dtype=torch.int32)
    yield "gather_slot_rows", lambda: gather_slot_rows(table, index[:sessions], key_len, out)
    yield "store_positions", lambda: store_positions(positions, index, index)


def chain_us(run: Run) -> float:
    """Median time of one of many launches in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            run()
    times = []
    for _ in range(_REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / _LAUNCHES)
    return statistics.median(times[2:])


def in_order_us(run: Run) -> float:
    """`chain_us` where every launch waits for the end of the one before."""
    with mock.patch("outrider.kernels.early_launch.launches_early", lambda _device: False):
        return chain_us(run)


_SHAPES: dict[str, tuple[Build, list[tuple[int, int]]]] = {
    "residual_norm": (residual_norm_run, [(1, 1), (1, 4), (1, 8), (1, 16), (8, 4), (64, 4), (512, 1), (4096, 1)]),
    "rotary_store": (rotary_store_run, [(1, 2), (8, 2), (64, 2), (512, 1), (4096, 1)]),
    "gated_activation": (gated_activation_run, [(1, 1), (64, 1), (512, 1), (4096, 1)]),
}


def main() -> int:
    """Print the tables; 2 where there is no CUDA."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("this benchmark needs a CUDA device, and torch finds none")
        return 2
    device = torch.device("cuda")
    table = Table("kernel", "rows", "parts", "in order, us", "early, us", "bytes alone, us")
    with torch.inference_mode():
        for name, (build, shapes) in _SHAPES.items():
            for rows, parts in shapes:
                run, moved = build(rows, parts, device)
                times = f"{in_order_us(run):.2f}", f"{chain_us(run):.2f}", f"{moved / _COPY_BYTES_PER_US:.2f}"
                table.add_row(name, str(rows), str(parts), *times)
        for sessions, keys in ((1, 1000), (32, 1000), (32, 32000)):
            for name, run in slot_runs(sessions, keys, device):
                table.add_row(f"{name}, {keys} keys", str(sessions), "", f"{chain_us(run):.2f}", "", "")
    console.print(torch.cuda.get_device_name(device), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
