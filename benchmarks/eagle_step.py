"""What a drafting step of an EAGLE head costs on this GPU, beside a step of a separate draft model.

    python benchmarks/eagle_step.py [--head 8b] [--draft 1b] [--points 1x8 1x64 16x64] [--json FILE]

A step is one forward over so many rows, the logits of all of them, and the four best tokens of each; it is captured in
a CUDA graph and replayed. The head has the sizes of the embedded one, widened to the shape of --head (an output layer
of 32,000 rows); the draft is a Llama of the shape of --draft. Weights are random: what is measured does not depend on
them. SESSIONSxROWS: rows of all sessions together, contexts of --context tokens.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.eagle_bench.step import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
