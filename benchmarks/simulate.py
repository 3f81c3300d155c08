"""The coordinator under load without a GPU: real scheduler and links, fake workers of given step times.

    python benchmarks/simulate.py [--sessions N] [--workers M] [--targets K] [--mode off sync async] [--json]
    python benchmarks/simulate.py --draft-rtt-ms 3 --target-step-ms 8 --target-row-us 10 --duration 5

The coordinator's own code runs in this process. The workers are gRPC servers on loopback, all targets in one other
process and all drafts in another, which sleep instead of computing and agree with each other by given rates; prompts
are not modelled. `--help` names the settings, and benchmarks/simulation/figures.py says what each figure means.

What is emitted and which drafted tokens are right follow from the seed alone. When things happen follows from this
machine's clock and load, and so do all times, the trees that are ready in time and, in `async`, the acceptance length.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Read when gRPC is imported: without it, every stream that a finished run closes is told of.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.simulation.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
