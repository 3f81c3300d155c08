"""A target worker's rounds in process: what a round takes, what it is made of, and what growth it finds.

    python benchmarks/rounds [--device cuda] [--target FOLDER] [--sessions 1 16 64] [--modes off replay model]
    python benchmarks/rounds --timeline FILE.png [--sessions 1]
    python benchmarks/rounds --ttft [--running 32] [--arriving 128 4096]

`off` runs without growth. `replay` grows trees from what `off` put out: as right, deep, wide and late as asked for.
`model` grows them with a draft model on a thread of this process. The second form draws twenty rounds; the third has
prompts arrive beside running sessions, and tells how long each waits for its first token and the others for their next.
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
