"""How long the target worker's step takes on this GPU, against the hardware's limit and against transformers.

    python benchmarks/target_step.py [--shape 8b | --model FOLDER] [--only PART ...] [--quick]
    python benchmarks/target_step.py --list

steps    milliseconds against rows, sessions and contexts, through the path that serves, beside the floor (weights read
         once at the measured copy bandwidth, or their products at the measured rate, plus keys and values) and beside
         transformers, eager and compiled in a CUDA graph, with the same weights
idle     how long the device waits between two steps of a saturated worker
prefill  8k-token prompts: tokens and FLOPs a second
mixed    the pace of 16 running sessions, alone and with a 32k-token prompt beside them
trace    calls of CUDA's runtime, waits and allocations in a steady loop of steps

`--quantization fp8` serves the same model with layers of 8 bits, and counts a byte a weight in the floor.
Everything is measured twice where noise matters. docs/target-step.md says how to read the tables.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.target_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
