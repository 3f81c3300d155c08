"""What a draft's host time, overlapping steps and the nodes it may hold are worth, on virtual time.

    python benchmarks/draft_host.py [--sessions 1 4 16] [--live-nodes 128 256 512] [--right 45 65 80] [--json]

The same on every machine; needs no GPU. docs/draft-step.md says what came of it.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulation.draft_host import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
