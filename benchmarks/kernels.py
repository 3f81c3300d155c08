"""Speed of the operators of rounds and growth steps on this GPU, against the hardware's limit and FlashInfer.

    python benchmarks/kernels.py [--only NAME ...] [--quick] [--output-json FILE]
    python benchmarks/kernels.py --list

Every figure is what an operator adds to a CUDA graph with a cold L2: microseconds, medians, the whole measured twice.
The floor is the larger of bytes / copy bandwidth and FLOPs / bfloat16 product rate, both measured in the same run.
See docs/kernels.md for how to read the tables.
"""

import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # This file must not be found by who looks for a package called kernels, as transformers does.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.kernel_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
