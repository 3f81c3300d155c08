"""When a second draft worker pays: simulated, on virtual time, so any machine gives these figures.

    python benchmarks/several_drafts.py [--duration 4] [--json]

docs/several-drafts.md has the figures and what follows from them.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulation.several_drafts import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
