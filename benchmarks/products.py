"""What the products of a decode or verify step take: `python benchmarks/products.py`, on one CUDA GPU.

Every product runs over the weights of 32 layers, one after the other in one CUDA graph, and so does the chain of all
products of a forward: its 15 GB leave nothing in the L2 cache, and a launch may begin under the end of the one before.
Beside it stands torch's product (cuBLAS) on the same weights, without the gate's activation. Sizes are those of
Llama 3.1 8B, bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from outrider.kernels.skinny_linear import gated_linear, linear, linear_parts

_LAYERS, _HIDDEN, _FEED_FORWARD, _VOCABULARY = 32, 4096, 14336, 128256
# [N, K], in the order of their use.
SHAPES = {
    "qkv": (6144, _HIDDEN),
    "o": (_HIDDEN, _HIDDEN),
    "gate_up": (2 * _FEED_FORWARD, _HIDDEN),
    "down": (_HIDDEN, _FEED_FORWARD),
    "lm_head": (_VOCABULARY, _HIDDEN),
}
_BYTES_PER_US = 4.25e6
_REPLAYS = 9

Weights = Mapping[str, Sequence[torch.Tensor]]
Product = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(name: str, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product as a step runs it."""
    if name == "lm_head":
        return linear(rows, weight)
    return gated_linear(rows, weight, activation="silu") if name == "gate_up" else linear_parts(rows, weight)


def torchs(_name: str, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product as torch runs it."""
    return torch.nn.functional.linear(rows, weight)


def chain(product: Product, rows: Mapping[int, torch.Tensor], weights: Weights, names: Sequence[str]) -> None:
    """The named products, layer after layer, then the output layer's if it is named."""
    inside = [name for name in names if name != "lm_head"]
    for layer in range(max((len(weights[name]) for name in inside), default=0)):
        for name in inside:
            product(name, rows[SHAPES[name][1]], weights[name][layer])
    if "lm_head" in names:
        for weight in weights["lm_head"]:
            product("lm_head", rows[_HIDDEN], weight)


def time_us(run: Callable[[], None]) -> float:
    """Median time of a replay."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_REPLAYS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    # The first replay loads the graph.
    return statistics.median(times[1:])


def main(arguments: Sequence[str]) -> int:
    """Prints one table a number of rows; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/products.py", description="Times the products of a step on one GPU."
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128], metavar="T")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("this benchmark needs a CUDA device, and torch finds none\n")
        return 2
    device = torch.device("cuda")
    counts = {name: 1 if name == "lm_head" else _LAYERS for name in SHAPES}
    weights = {
        name: [torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02) for _ in range(counts[name])]
        for name, shape in SHAPES.items()
    }
    console = Console(width=110)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows in options.rows:
        console.print(_table(rows, weights, counts))
    return 0


@torch.inference_mode()
def _table(count: int, weights: Weights, counts: Mapping[str, int]) -> Table:
    device = weights["o"][0].device
    rows = {inner: torch.randn(count, inner, dtype=torch.bfloat16, device=device) for inner in (_HIDDEN, _FEED_FORWARD)}
    table = Table(title=f"{count} rows, microseconds", title_justify="left")
    for heading in ("product", "ours", "cuBLAS", "cuBLAS / ours", "weight at 4.25 TB/s", "ours, TB/s"):
        table.add_column(heading, justify="left" if heading == "product" else "right")
    for names in (*([name] for name in SHAPES), list(SHAPES)):
        moved = sum(counts[name] * weights[name][0].nbytes for name in names)
        each = counts[names[0]] if len(names) == 1 else 1
        mine, others = (
            time_us(lambda product=product, names=names: chain(product, rows, weights, names)) / each
            for product in (ours, torchs)
        )
        floor = moved / each / _BYTES_PER_US
        title = names[0] if len(names) == 1 else "a forward's"
        cells = (mine, others, others / mine, floor, moved / each / mine / 1e6)
        table.add_row(title, *(f"{cell:.2f}" for cell in cells))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
