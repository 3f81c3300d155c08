"""Time of a round on several GPUs of one host, against one GPU and against the floor of reading the weights.

    python benchmarks/tensor_parallel.py 8b@1 8b@2 70b@2 [--output-json FILE]

Plain rounds of 1, 8 and 64 sessions behind 1,024 tokens each, in process; random weights, made in the memory of the GPU
that needs them.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # This file must not be found by who looks for a package called kernels, as transformers does.
    root = str(Path(__file__).resolve().parents[1])
    sys.path[0] = root
    # Ranks are processes of their own, and read the weights' source from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    from benchmarks.parallel_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
