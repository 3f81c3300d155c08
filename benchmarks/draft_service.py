"""A draft worker as it serves: growth steps a second over gRPC beside those of the growth thread alone.

    python benchmarks/draft_service.py [--device cuda] [--sessions 1 4 16 64] [--json FILE]

One process is the draft worker, as `outrider draft-worker` runs it; this one stands in for a coordinator and its
target, which commits to all sessions every few milliseconds. On a CPU a device of a given step time stands in for the
model's, so that what is measured is everything around it. docs/draft-step.md says how to read the tables.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.draft_service_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
