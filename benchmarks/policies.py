"""The scheduler's learned policy beside fixed trees, at twelve settings, on virtual time.

    python benchmarks/policies.py [--settings near far dear] [--sessions 1 4 16 64] [--jobs 2] [--json]

The coordinator's scheduler, loops and mirrors run with fake workers on a clock that jumps, so that its figures follow
from the seed alone: not from this machine, its load or its speed. benchmarks/simulation/comparison.py has the settings
and the fixed trees. The exit code is 1 where the learned policy misses what it promises: 95 % of the best fixed tree at
every setting, more than every single fixed tree on the mean, and never less than without speculation.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulation.comparison import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
