"""What a second source of growth beside a model is worth, and costs, when it rates itself rightly or wrongly.

    python benchmarks/hybrid_sources.py        about a minute; the same figures on any machine

The coordinator's own scheduler, loops and mirrors, with simulated workers on virtual time.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulation.hybrid import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
