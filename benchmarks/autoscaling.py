"""The autoscaler at work on one machine: load that triples for a minute, drafts that follow it, and what clients see.

    python benchmarks/autoscaling.py [--output FOLDER]
    python benchmarks/autoscaling.py --drafts-fixed 1

Ray, controller, coordinator, registry, autoscaler and clients are the real ones. The workers are gRPC servers in actors
of their own that register, load for some seconds, and sleep instead of computing: several real drafts would only share
the cores of one machine. Writes autoscaling.json and autoscaling.png.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    root = str(Path(__file__).resolve().parents[1])
    sys.path[0] = root
    # Ray's workers have to find the fake roles.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.autoscaling_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
