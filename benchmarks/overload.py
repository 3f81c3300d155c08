"""A coordinator at several times its capacity: who is refused, how soon, and what the others notice.

    python benchmarks/overload.py [--max-queue-wait-s S] [--storm-s 10] [--json]

A closed loop of as many clients as there are places finds the capacity in requests a second. Then requests come at
random times, whatever becomes of the ones before: at normal load, at `--overload` times the capacity, and at normal
load again. Times count from the moment when a request was to be sent, so they hold what this process itself adds; how
late it was by its own clock is the last column.

What serves is the embedded pair; its processes share this machine's cores with the clients.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.overload_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
