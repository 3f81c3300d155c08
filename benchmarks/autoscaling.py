"""The autoscaler at work on one machine: load that triples for a minute, drafts that follow it, and what clients see.

    python benchmarks/autoscaling.py [--output FOLDER]
    python benchmarks/autoscaling.py --drafts-fixed 1

All of the service is real, with the embedded pair: on one machine its drafts share the cores with everything else, so
what is looked at is when they come and go, not what each of them brings. Writes autoscaling.json and autoscaling.png.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.autoscaling_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
