"""What speculation is worth on this machine: tokens per second of off, sync and async, side by side.

    python benchmarks/modes.py [--sessions 1 8] [--temperature 0] [--device cpu] [--output-json FILE]

Real services, real processes, the embedded pair. Thread counts are set per role: on a CPU `off` gets all cores for its
target, `sync` and `async` share them between target and draft. The modes take turns over the prompts, and every ratio
is the median over the repeats of (mode / off) within one repeat, so that a noisy neighbour hits all modes alike.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.end_bench.turns import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
