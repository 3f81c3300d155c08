"""Gain of speculation through the whole service: off, sync and async, at several loads and temperatures.

    python benchmarks/end_to_end.py --sessions 1 4 --temperatures 0 --output results        the embedded pair on a CPU
    python benchmarks/end_to_end.py --device cuda --target FOLDER --draft FOLDER            two GPUs, any pair
    python benchmarks/end_to_end.py ... --setups 0+4 1+3 2+2                                four GPUs
    python benchmarks/end_to_end.py ... --synthetic 0.74                                    at given acceptance

The role processes are those of a plain deployment, on loopback, each on the GPU of its place; sessions go through the
public door, and each begins its next request when one ends. Every worker is started once and serves all cells;
`--setups` says which there are and where they stand. `outrider widen` writes the embedded pair in larger shapes.
benchmarks/end_bench/figures.py says what each figure means.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Read when gRPC is imported: without it, every stream that a cell's end cuts off is told of.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.end_bench.command import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
