"""A draft worker as it serves over gRPC: steps a second, how idle its device is, and how soon commits are answered.

    python benchmarks/draft_service.py [--device cuda] [--shape 160m] [--sessions 1 4 16 64] [--json FILE]

One process is the draft worker, as `outrider draft-worker` runs it; this one stands in for a coordinator and its
target, which commits to all sessions every few milliseconds. Estimates do not learn, so that trees stay as wide as they
begin. On a CPU the model is the embedded draft.
"""

import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.draft_service_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
