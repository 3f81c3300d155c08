"""Faults in a running service: nothing that a client hears may be lost, doubled or changed by them.

    make chaos                                  60 faults with a seed of their own
    make chaos FAULTS=300 SEED=7                as many as asked for, and the same again
    python benchmarks/chaos.py --help           all options

Real processes on loopback (two targets, two drafts, two coordinators of the embedded pair), every link through a proxy,
mixed load all the time. docs/operations.md explains the faults and how to read what this prints.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Read when gRPC is imported: without it, every stream that a fault cuts off is told of.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from benchmarks.faults.command import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
