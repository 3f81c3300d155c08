"""What each kind of fault costs a client, and how soon it is noticed and over: one at a time, on a quiet service.

    python benchmarks/fault_times.py                        every case three times, some ten minutes
    python benchmarks/fault_times.py --only draft --repeats 5

Real processes on loopback, the embedded pair, two coordinators, two targets, one draft; one client of the library that
streams all the time. docs/operations.md has a table of it.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from benchmarks.faults.times import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
