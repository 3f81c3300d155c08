"""A target worker's rounds in process: what a round takes, what it is made of, and what growth it finds.

    python benchmarks/rounds [--device cuda] [--target FOLDER] [--sessions 1 16 64] [--modes off replay]
    python benchmarks/rounds --timeline FILE.png [--sessions 1]

`off` runs without growth. `replay` grows trees from what `off` put out: as right, deep, wide and late as asked for. The
second form draws twenty rounds.
"""

import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from benchmarks.rounds.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
