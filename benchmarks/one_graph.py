"""Throughput of one-graph rounds against plain steps and trees, over batch sizes, and what a round asks of CUDA.

    python benchmarks/one_graph.py --shape 8b [--head FOLDER] [--sessions 1 64 256] [--temperatures 1 0] [--seconds 110]

off        one token a session and step
tree       the same head grows a tree below every root, the host picks its best nodes and sends them back: the best of
           several sizes; `free` is the same without the time that drafting takes, as with a draft on another GPU
one-graph  the head's candidates stay on the device: verify, choose, walk, extend the head and draft in one graph

All three drive the verifier of one target worker in this process, on held-out prompts: no network, no
coordinator. `--head` is a head that was trained for the target (widened as the target is). Without it a random head of
that shape is made: it costs what a trained one costs and is never right; the columns `at` then say what the same
rounds would give if candidates were accepted as `--assume` says.

The second table counts, by torch's profiler, what rounds of one batch size ask of CUDA: graph launches, waits,
kernels. docs/one-graph.md says how to read both.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.one_graph_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
